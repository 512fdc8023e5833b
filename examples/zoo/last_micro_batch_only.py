"""Only the last micro-batch's gradient is kept.

Gradients are cleared in the wrong place, so three quarters of the data are read and thrown away.

Reports: deepspeedai/DeepSpeed#5583, #1488; huggingface/accelerate#3877
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def gradients(ddp, loss_fn, part):
    inputs, targets = part
    for first in range(0, len(inputs), 2):
        ddp.zero_grad()  # one line too low
        loss_fn(ddp, (inputs[first : first + 2], targets[first : first + 2])).backward()


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return explain.Program(ddp, optimizer, loss_fn, gradients=gradients)


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
