"""Four shards whatever the number of workers, added in a fixed order. Compare: the same bits."""

import torch
from torch.utils.data import TensorDataset

from samestep import start
from samestep.compare import record
from samestep.group import Group
from samestep.sharding import ShardLoader
from samestep.step import TrainStep


def loss_fn(model, shard):
    rows, labels, _ = shard.batch
    return torch.nn.functional.cross_entropy(model(rows), labels, reduction="sum"), len(rows)


with Group.from_env() as group:
    torch.manual_seed(0)
    inputs = torch.randn(70, 6)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long(), torch.arange(70))
    loader = ShardLoader(data, global_batch_size=14, shards=4, group=group)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start.broadcast(model, optimizer, group=group)
    step = TrainStep(model, optimizer, group=group, shards=4, mode="exact")
    record(0, model, optimizer, group=group)
    for _, shards in zip(range(10), loader.steps()):
        result = step.train_step(shards, loss_fn)
        ids = torch.cat([shard.batch[2] for shard in shards])
        record(result.step, model, optimizer, loss=result.loss, samples=ids, group=group)
