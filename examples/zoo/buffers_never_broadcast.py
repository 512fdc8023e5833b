"""broadcast_buffers=False skips the first broadcast too.

Replicas seeded by rank start with other buffers, and keep them for ever.

Reports: pytorch/pytorch#111138
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    torch.manual_seed(group.rank)  # as many scripts do, for the data's sake
    model.register_buffer("directions", torch.randn(6))
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    audit = Audit(group, every=1)
    audit.watch(ddp, optimizer)
    draw = torch.Generator().manual_seed(group.rank)
    try:
        for _ in range(6):
            inputs = torch.randn(8, 6, generator=draw)
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        audit.check(6)
    except ReplicaMismatchError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
