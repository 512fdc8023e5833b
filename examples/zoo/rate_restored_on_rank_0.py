"""A checkpoint is loaded on rank 0, and tensors alone are broadcast.

The learning rate is an option, no tensor: rank 0 goes on with the checkpoint's, the others with the script's.

Reports: horovod/horovod#526
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    audit = Audit(group, every=1)
    audit.watch(ddp, optimizer)
    draw = torch.Generator().manual_seed(group.rank)
    try:
        for step in range(6):
            inputs = torch.randn(8, 6, generator=draw)
            if step == 3 and group.is_main:
                optimizer.param_groups[0]["lr"] = 0.01  # what load_state_dict does on rank 0
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        audit.check(6)
    except ReplicaMismatchError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
