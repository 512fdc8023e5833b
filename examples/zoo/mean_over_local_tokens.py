"""A mean over this worker's tokens: a short text counts as much as a long one.

Each worker divides by its own number of tokens that are not padding. The curves of 1 and 4 workers part
slowly.

Reports: huggingface/transformers#34242, #39392; meta-pytorch/torchtune#1875, #2980
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

lengths = torch.tensor([1, 5, 2, 5, 5, 1, 3, 4])
labels = (torch.arange(40) % 3).view(8, 5).masked_fill(torch.arange(5) >= lengths.unsqueeze(1), -100)
global_batch = (torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0)), labels)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
