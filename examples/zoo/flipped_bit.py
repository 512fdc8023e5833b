"""One bit of one moment flips on one worker.

A failing device, or a stray write. The largest public case took 15 days to notice.

Reports: bigscience-workshop/Megatron-DeepSpeed#271; huggingface/nanotron#242
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
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    audit = Audit(group, every=1)
    audit.watch(ddp, optimizer)
    draw = torch.Generator().manual_seed(group.rank)
    try:
        for step in range(6):
            inputs = torch.randn(8, 6, generator=draw)
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            optimizer.step()
            if step == 3 and group.rank == 3:
                optimizer.state[model.weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1
        audit.check(6)
    except ReplicaMismatchError as error:
        return str(error)
    return "agree"


if __name__ == "__main__":
    print(launch.run(train, 4)[0])
