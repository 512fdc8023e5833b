"""One worker builds another model.

A flag was read on one node only. DDP says that rank 1 is inconsistent, or hangs; start.broadcast says what
differs.

Reports: pytorch/pytorch#32426, #73547
"""

import torch

from samestep import launch, start
from samestep.errors import AgreementError


def train(group):
    width = 8 if group.rank == 1 else 6
    model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 3))
    try:
        start.broadcast(model, group=group)
    except AgreementError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
