"""One worker skips an update because its own loss looked odd.

A local test for NaN or an outlier, and `continue`. From then on that replica is one update behind.

Reports: facebookresearch/optimizers#149; TrainCheck's collection
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError


def train(group):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    audit = Audit(group, every=1)
    audit.watch(ddp, optimizer)
    draw = torch.Generator().manual_seed(group.rank)
    try:
        for step in range(6):
            inputs = torch.randn(8, 6, generator=draw)
            optimizer.zero_grad()
            loss = ddp(inputs).square().mean()
            loss.backward()
            if not (step == 3 and group.rank == 2):  # "this worker's batch was an outlier"
                optimizer.step()
        audit.check(6)
    except ReplicaMismatchError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
