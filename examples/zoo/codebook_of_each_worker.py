"""A codebook that follows each worker's own data.

A running mean in a buffer is updated from local samples. DDP copies rank 0's buffers at each forward, and
throws the others' work away.

Reports: lucidrains/vector-quantize-pytorch#10, #17; espnet/espnet#6284
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    model.register_buffer("codebook", torch.zeros(6))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    audit = Audit(group, every=1)
    audit.watch(ddp, optimizer)
    draw = torch.Generator().manual_seed(group.rank)
    try:
        for _ in range(6):
            inputs = torch.randn(8, 6, generator=draw)
            ddp.module.codebook.lerp_(inputs.mean(0), 0.1)  # of this worker's samples
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        audit.check(6)
    except ReplicaMismatchError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
