"""Buffers over shards: every rule against the plain definition, the same on any number of workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep import launch
from samestep.buffers import BufferMerge, ema_sum
from samestep.errors import SpecError
from samestep.group import Group
from samestep.sharding import shard_range
from workers import digest, outcome

DECAY = 0.9


class Holder(nn.Module):
    """One buffer of each kind, all changed by a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer_rules = {"largest": "max", "smallest": "min", "added": "sum", "average": ema_sum(DECAY)}
        for name in ("running", "largest", "smallest", "added", "average", "derived", "untouched"):
            self.register_buffer(name, torch.full((3,), 2.0))
        self.register_buffer("counter", torch.tensor(5))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64), persistent=False)
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("never", torch.tensor([float("nan"), float("inf")]))

    def see(self, shard: int) -> None:
        x = torch.tensor([1.0, 2.0, 4.0]) * (shard + 1)
        self.running.mul_(0.5).add_(x, alpha=0.5)
        self.largest.copy_(torch.maximum(self.largest, x))
        self.smallest.copy_(torch.minimum(self.smallest, -x))
        self.added.add_(x)
        self.average = DECAY * self.average + (1 - DECAY) * x  # replaced, not changed in place
        self.derived.copy_(self.average * 2)
        self.counter.add_(1)
        self.seen[shard % 4] = True
        self.waves.add_(1j * shard)
        self.low.add_(shard)

    def buffers_merged(self) -> None:
        self.derived.copy_(self.average * 2)


def step(group: Group, n_shards: int, empty: tuple[int, ...] = ()) -> Holder:
    holder = Holder()
    merge = BufferMerge(holder, group)
    merge.begin()
    for shard in shard_range(n_shards, group.world_size, group.rank):
        merge.restore()
        if shard not in empty:
            holder.see(shard)
            merge.after_shard()
    merge.merge()
    return holder


def check(holder: Holder, shards: list[int]) -> None:
    x = torch.stack([torch.tensor([1.0, 2.0, 4.0]) * (shard + 1) for shard in shards]).double()
    right = {
        "running": (1 + 0.5 * x).mean(0),
        "largest": x.amax(0).clamp(min=2.0),
        "smallest": -x.amax(0),
        "added": 2 + x.sum(0),
        "average": DECAY * 2 + (1 - DECAY) * x.sum(0),
        "derived": 2 * (DECAY * 2 + (1 - DECAY) * x.sum(0)),
        "untouched": torch.full((3,), 2.0),
        "low": torch.full((2,), 1 + sum(shards) / len(shards)).bfloat16(),
    }
    for name, value in right.items():
        torch.testing.assert_close(
            getattr(holder, name).double(), value.double(), rtol=1e-6, atol=0, msg=name
        )
    assert int(holder.counter) == 6  # counted once
    assert holder.seen.tolist() == [shard in [s % 4 for s in shards] for shard in range(4)]
    assert torch.allclose(holder.waves, torch.full((2,), 1 + 1j * sum(shards) / len(shards)))
    assert str(holder.never.tolist()) == "[nan, inf]"


def all_layouts(group: Group) -> list[str]:
    found = []
    for n_shards, empty in ((8, ()), (5, ()), (8, (0, 1, 2, 7)), (4, (1, 2, 3))):
        holder = step(group, n_shards, empty)
        check(holder, [shard for shard in range(n_shards) if shard not in empty])
        found.append(digest(holder.buffers()))
    return found


def test_every_rule_on_any_number_of_workers():
    alone = all_layouts(Group.single())
    for world_size in (2, 3, 4):
        assert launch.run(all_layouts, world_size, timeout_seconds=120) == [alone] * world_size


def test_a_step_that_is_given_up_leaves_the_buffers():
    holder = Holder()
    before = digest(holder.buffers())
    merge = BufferMerge(holder, Group.single())
    merge.begin()
    holder.see(0)
    merge.after_shard()
    merge.restore()
    holder.see(1)  # and fails before its end
    merge.rewind()
    assert digest(holder.buffers()) == before


def test_batch_norm_is_the_mean_of_what_the_shards_made():
    torch.manual_seed(0)
    shards = [torch.randn(n, 3) * (n + 1) for n in (4, 2, 3)]
    layer, twins = nn.BatchNorm1d(3), [nn.BatchNorm1d(3) for _ in shards]
    merge = BufferMerge(layer, Group.single())
    for _ in range(2):
        merge.begin()
        for shard in shards:
            merge.restore()
            layer(shard)
            merge.after_shard()
        merge.merge()
        for twin, shard in zip(twins, shards):
            twin(shard)
        for name in ("running_mean", "running_var"):
            right = torch.stack([getattr(twin, name).double() for twin in twins]).mean(0)
            torch.testing.assert_close(getattr(layer, name), right.float(), rtol=1e-6, atol=1e-7)
            for twin in twins:
                getattr(twin, name).copy_(right)
    assert int(layer.num_batches_tracked) == 2


def test_bad_rules_and_shapes_are_refused():
    for rules in ({"running": "median"}, {"no_such": "sum"}):
        holder = Holder()
        holder.buffer_rules = rules
        with pytest.raises(SpecError, match="buffer_rules"):
            BufferMerge(holder, Group.single())
    holder: Any = Holder()
    merge = BufferMerge(holder, Group.single())
    merge.begin()
    holder.added = torch.zeros(7)
    assert outcome(merge.after_shard)[0] == "SpecError"
    merge.rewind()
    assert holder.added.tolist() == [2.0, 2.0, 2.0]


def test_a_buffer_that_comes_late_has_a_part_from_the_next_step_on():
    holder: Any = nn.Module()
    merge = BufferMerge(holder, Group.single())
    merge.begin()
    holder.register_buffer("late", torch.zeros(1))
    merge.after_shard()
    merge.merge()
    merge.begin()
    for value in (1.0, 3.0):
        merge.restore()
        holder.late.add_(value)
        merge.after_shard()
    merge.merge()
    assert float(holder.late) == 2.0
