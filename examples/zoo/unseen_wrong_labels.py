"""Not seen: labels shifted by one, on any number of workers.

One worker and four train the same wrong model. samestep proves that they do the same, not that it is right.

Reports: none: this is what the proof does not cover
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), (batch[1] + 1) % 3)

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
