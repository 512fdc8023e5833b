"""Forward through the unwrapped module: gradients stay local.

Training code unwraps the model for a method of its own. DDP never sees a forward pass, so nothing is reduced.

Reports: kohya-ss/sd-scripts#924, #989
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def build():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(6, 3))

    def loss_fn(model, batch):
        unwrapped = getattr(model, "module", model)
        return torch.nn.functional.cross_entropy(unwrapped(batch[0]), batch[1])

    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), loss_fn


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
