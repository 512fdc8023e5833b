"""A contrastive loss whose negatives are this worker's own.

A sample is held against the others of its worker, so the loss itself depends on how many there are.

Reports: lightly-ai/lightly#1977; texttron/tevatron#30, #143
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 4))

    def loss_fn(model, batch):
        one = torch.nn.functional.normalize(model(batch[0]), dim=1)
        two = torch.nn.functional.normalize(model(batch[0] + 0.1), dim=1)
        return torch.nn.functional.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)))

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
