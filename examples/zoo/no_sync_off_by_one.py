"""no_sync off by one: the first micro-batch is reduced, the last is not.

The condition for the last micro-batch is wrong, so workers add their own last gradient to the common one.
Replicas part.

Reports: modelscope/FunASR#3472
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def gradients(ddp, loss_fn, part):
    inputs, targets = part
    half = len(inputs) // 2
    loss_fn(ddp, (inputs[:half], targets[:half])).backward()
    with ddp.no_sync():
        loss_fn(ddp, (inputs[half:], targets[half:])).backward()
    for parameter in ddp.parameters():
        parameter.grad /= 2


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return explain.Program(ddp, optimizer, loss_fn, gradients=gradients)


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
