"""A mean of means: workers with 6 samples and workers with 5 count alike.

DDP averages the workers' means. With 22 samples on 4 workers the gradient is not that of the mean over 22
samples.

Reports: pytorch/pytorch#31579, #37359, #67253
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(22, 6, generator=torch.Generator().manual_seed(0)), torch.arange(22) % 3)


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    ddp = DistributedDataParallel(model)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
