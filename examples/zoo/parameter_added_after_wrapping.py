"""A parameter added after wrapping is never reduced.

DDP's list of parameters is made once. A temperature that is registered later learns from local data alone.

Reports: the warning in torch's DDP documentation; TrainCheck's collection
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    ddp = DistributedDataParallel(model)
    model.register_parameter("temperature", torch.nn.Parameter(torch.full((6,), 0.5)))
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.temperature,))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return ddp, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
