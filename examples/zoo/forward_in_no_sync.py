"""Forward inside no_sync, backward outside: nothing is reduced, and nobody says so.

DDP decides at the forward pass. The loss goes on falling, only slightly worse, while replicas part.

Reports: karpathy/build-nanogpt#30
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def gradients(ddp, loss_fn, part):
    with ddp.no_sync():
        loss = loss_fn(ddp, part)
    loss.backward()


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return explain.Program(ddp, optimizer, loss_fn, gradients=gradients)


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
