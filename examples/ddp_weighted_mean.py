"""Your own DDP loop with the exact mean, and a guard that stays on.

    torchrun --nproc-per-node 2 examples/ddp_weighted_mean.py

Worker 0 has 9 samples a step and worker 1 has 3. Plain DDP takes the mean of two means; the hook takes the mean of
the 12 samples. The audit's two lines say at once when replicas part.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import hooks, start
from samestep.audit import Audit
from samestep.group import Group


def main() -> None:
    with Group.from_env() as group:
        torch.manual_seed(group.rank)  # even a different start on each worker does no harm
        model = torch.nn.Linear(4, 1).to(group.device)
        start.broadcast(model, group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        net, weights = model, None
        if group.world_size > 1:
            net = DistributedDataParallel(model)
            weights = hooks.register(net, hooks.weighted_mean, group)
        audit = Audit(group, every=10).watch(model, optimizer)

        inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).to(group.device)
        targets = inputs.sum(1, keepdim=True)
        bounds = {1: [0, 12], 2: [0, 9, 12]}[group.world_size]
        mine = slice(bounds[group.rank], bounds[group.rank + 1])
        for _ in range(40):
            loss = torch.nn.functional.mse_loss(net(inputs[mine]), targets[mine])
            optimizer.zero_grad()
            (weights.weigh(loss, len(inputs[mine])) if weights else loss).backward()
            optimizer.step()
        audit.check(step=40)
        if group.is_main:
            print(f"weight {model.weight.detach().flatten().tolist()}")


if __name__ == "__main__":
    main()
