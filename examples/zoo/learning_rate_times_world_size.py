"""The learning rate is multiplied by the number of workers behind the user's back.

Made for a fixed batch per worker. With the global batch fixed, as here, every update is 4 times too long.

Reports: open-mmlab/mmdetection#3079, #7482; mala-project/mala#374, #422
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 * torch.distributed.get_world_size())

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ddp, optimizer, loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
