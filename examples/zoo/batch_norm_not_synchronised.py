"""BatchNorm takes the statistics of a worker's own samples.

With 4 samples on a worker in place of 16, the forward pass itself is another one. That may be what is wanted;
then it is the number of samples per worker that must not change.

Reports: Lightning-AI/pytorch-lightning#6789; facebookresearch/fvcore#152
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    ddp = DistributedDataParallel(model)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
