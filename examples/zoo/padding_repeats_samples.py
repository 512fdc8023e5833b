"""The sampler pads with repeats so that workers have equally many samples.

14 samples on 4 workers become 16; the first two count twice.

Reports: pytorch/pytorch#25162
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(14, 6, generator=torch.Generator().manual_seed(0)), torch.arange(14) % 3)


def split(batch, rank, world_size):
    sampler = torch.utils.data.DistributedSampler(range(14), world_size, rank, shuffle=False)
    return tuple(tensor[list(sampler)] for tensor in batch)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return explain.Program(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn, split=split)


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
