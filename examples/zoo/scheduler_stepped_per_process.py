"""The schedule is stepped once per process and update.

A wrapper means well. On 4 workers a schedule over 8 updates is over after two.

Reports: huggingface/accelerate#2926, #1398; huggingface/diffusers#3954
"""

import torch

from samestep import launch, schedules
from samestep.scheduler import LRScheduler


def train(group):
    rates = {}
    for ours in (False, True):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        if ours:
            scheduler = LRScheduler(optimizer, schedules.linear(8), group=group)
        else:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: max(0.0, 1 - update / 8))
        rates[ours] = []
        for _ in range(4):
            rates[ours].append(optimizer.param_groups[0]["lr"])
            weight.grad = torch.ones(1)
            optimizer.step()
            for _ in range(group.world_size):
                scheduler.step()
    return f"torch's scheduler: {rates[False]}; samestep's LRScheduler: {rates[True]}, its clock is the optimizer's"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
