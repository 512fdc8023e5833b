"""The loss is multiplied by the world size where it should not be.

A sum-of-losses recipe needs that factor, a mean does not: the gradient is 4 times too large on 4 workers.

Reports: facebookresearch/fairseq#494; ultralytics/ultralytics#18616
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))

    def loss_fn(model, batch):
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * torch.distributed.get_world_size()

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
