"""The mean over all 14 samples, in your own DDP loop. Compare: rounding is all that is left."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from samestep import hooks
from samestep.compare import record
from samestep.group import Group
from samestep.sharding import ShardLoader

with Group.from_env() as group:
    torch.manual_seed(0)
    inputs = torch.randn(70, 6)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long(), torch.arange(70))
    loader = ShardLoader(data, global_batch_size=14, shards=group.world_size, group=group)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    ddp = DistributedDataParallel(model) if group.world_size > 1 else model
    weights = hooks.register(ddp, hooks.weighted_mean, group) if group.world_size > 1 else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    record(0, ddp, optimizer, group=group)
    for step, (shard,) in zip(range(1, 11), loader.steps()):
        rows, labels, ids = shard.batch
        loss = torch.nn.functional.cross_entropy(ddp(rows), labels)
        optimizer.zero_grad()
        (weights.weigh(loss, len(rows)) if weights else loss).backward()
        optimizer.step()
        record(step, ddp, optimizer, loss=loss, samples=ids, group=group)
