"""Not seen by explain: a layer that autocast should have left in float32.

The step is replayed in float64, where autocast changes nothing. `compare` sees the two runs part, as wide as
bfloat16 allows.

Reports: pytorch/pytorch#136748
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))

    def loss_fn(model, batch):
        many = torch.distributed.get_world_size() > 1
        with torch.autocast("cpu", torch.bfloat16, enabled=many):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
