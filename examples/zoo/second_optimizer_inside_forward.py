"""A second optimizer inside the model steps on local gradients.

A codebook with an optimizer of its own is trained within forward; DDP reduces nothing of it.

Reports: lucidrains/vector-quantize-pytorch#222
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    model.centroids = torch.nn.Parameter(torch.zeros(6))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    audit = Audit(group, every=1)
    audit.watch(ddp, optimizer)
    draw = torch.Generator().manual_seed(group.rank)
    try:
        for _ in range(6):
            inputs = torch.randn(8, 6, generator=draw)
            local = (model.centroids - inputs.mean(0)).square().sum()
            (gradient,) = torch.autograd.grad(local, model.centroids)
            model.centroids.data -= 0.1 * gradient  # the inner optimizer's step
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
        audit.check(6)
    except ReplicaMismatchError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
