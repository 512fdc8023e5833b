"""The shards of one worker: what every one starts from, and what is reported instead of raised."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from samestep.buffers import BufferMerge
from samestep.forward import Settings, ShardRunner
from samestep.gradients import GradientSum
from samestep.group import Group
from samestep.sharding import Shard


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(1))


def runner(n_shards: int = 3, micro: int | None = None) -> tuple[Drawing, ShardRunner, BufferMerge]:
    model, group = Drawing(), Group.single()
    gradients = GradientSum(model, group, "exact", n_shards, False, None)
    buffers = BufferMerge(model, group)
    settings = Settings(range(n_shards), nullcontext, None, micro, 5, False, True)
    gradients.begin()
    buffers.begin()
    return model, ShardRunner(model, group, settings, gradients, buffers), buffers


def shards(*sizes: int) -> list[Shard]:
    return [Shard(i, torch.arange(n), torch.ones(n, 2) if n else None) for i, n in enumerate(sizes)]


def test_every_shard_starts_from_the_same_buffers_and_its_own_numbers():
    seen: list[Any] = []

    def loss(model: Drawing, shard: Shard) -> tuple[Tensor, int]:
        if torch.is_grad_enabled():
            seen.append((shard.index, float(model.calls), float(torch.rand(1))))
        model.calls += 1
        return (model.weight * shard.batch).sum(), shard.n_samples

    for _ in range(2):
        _, work, _ = runner()
        assert work.read(shards(2, 2, 2), 4) is None
        rows, pending, failure = work.run(loss, 4)
        assert failure is None
        assert pending is not None
        assert [row.count for row in rows] == [2, 2, 2]
    assert seen[:3] == seen[3:]
    assert [calls for _, calls, _ in seen] == [0.0] * 6
    assert len({draw for _, _, draw in seen}) == 3


def test_empty_shards_are_not_given_to_the_loss_function():
    _, work, _ = runner()
    work.read(shards(0, 2, 0), 0)
    rows, pending, failure = work.run(lambda m, s: ((m.weight * s.batch).sum(), s.n_samples), 0)
    assert ([row.count for row in rows], pending, failure) == ([0.0, 2.0, 0.0], None, None)


def test_pieces_add_up():
    whole, cut = [], []
    for micro, found in ((None, whole), (2, cut)):
        model, work, _ = runner(micro=micro)
        work.read(shards(5, 1, 3), 0)
        rows, pending, _ = work.run(
            lambda m, s: ((m.weight * s.batch).sum(), s.n_samples, {"n": s.n_samples}), 0
        )
        assert pending is not None
        work._gradients.finish(pending, lambda x: x)
        work._gradients.settle(9.0)
        found.extend([[(row.count, row.loss, row.sums) for row in rows], model.weight.grad.tolist()])
    assert whole == cut


def test_failures_are_told_apart():
    _, work, _ = runner()
    wrong_number = work.read(shards(1), 0)
    assert wrong_number is not None
    assert wrong_number.is_spec
    assert work.read(shards(1, 1, 1), 0) is None
    _, _, broken = work.run(lambda m, s: 3.0, 0)
    assert broken is not None
    assert broken.is_spec
    _, _, crashed = work.run(lambda m, s: {}["key"], 0)
    assert crashed is not None
    assert not crashed.is_spec
    assert "KeyError: 'key'" in crashed.text
