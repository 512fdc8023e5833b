"""Figures of all shards on all workers: the totals of the tree, the bits of one worker, one error for all."""

from __future__ import annotations

from typing import Any

import pytest

from samestep import launch
from samestep.errors import AgreementError, SpecError
from samestep.group import Group
from samestep.sharding import shard_range, tree_fold
from samestep.tally import Failure, Row, Tally
from workers import outcome

N_SHARDS = 8


def rows(step: int) -> list[Row]:
    """Further sums come and go from step to step and from shard to shard."""
    found = []
    for shard in range(N_SHARDS):
        sums = {"right": shard * 0.1} if step > 0 else {}
        if step == 2 and shard == 5:
            sums["rare"] = 1e-17
        found.append(Row(float(shard % 3), 0.1 * shard + 1e10 * (shard == step), sums))
    return found


def totals(group: Group) -> list[Any]:
    tally, found = Tally(group), []
    block = shard_range(N_SHARDS, group.world_size, group.rank)
    for step in range(4):
        all_rows = rows(step)
        result = tally.exchange(all_rows[block.start : block.stop])
        assert result.rows == tuple(
            Row(
                r.count,
                r.loss,
                {**dict.fromkeys(result.sums, 0.0), **r.sums} if len(r.sums) < len(row.sums) else r.sums,
            )
            for r, row in zip(all_rows, result.rows)
        )
        found.append((repr(result.count), repr(result.loss), repr(sorted(result.sums.items()))))
    return found


def test_totals_have_the_bits_of_the_tree_at_any_number_of_workers():
    right = [
        (
            repr(tree_fold([row.count for row in rows(step)])),
            repr(tree_fold([row.loss for row in rows(step)])),
            repr(
                [
                    (name, tree_fold([row.sums.get(name, 0.0) for row in rows(step)]))
                    for name in sorted({name for row in rows(step) for name in row.sums})
                ]
            ),
        )
        for step in range(4)
    ]
    assert totals(Group.single()) == right
    for world_size in (2, 3):
        assert launch.run(totals, world_size, timeout_seconds=120)[0][:2] == right[:2]


def failures(group: Group) -> dict[str, Any]:
    tally = Tally(group)
    last = group.rank == group.world_size - 1
    broken, crashed = Failure("a mean", is_spec=True), Failure("Traceback: boom")
    found = {}
    for turn in range(2):  # before and after the short form knows its size
        found[f"spec {turn}"] = outcome(lambda: tally.exchange([Row(1.0, 1.0, {})], broken if last else None))
        found[f"crash {turn}"] = outcome(
            lambda: tally.exchange([Row(1.0, 1.0, {})], crashed if last else None)
        )
        both = crashed if group.rank == 0 else broken
        found[f"both {turn}"] = outcome(lambda b=both: tally.exchange([], b))
        found[f"fine {turn}"] = outcome(lambda: tally.exchange([Row(1.0, 1.0, {})]).count)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_workers_raise_the_same(world_size):
    results = launch.run(failures, world_size, timeout_seconds=120)
    assert all(result == results[0] for result in results)
    for turn in range(2):
        who = f"rank {world_size - 1} of {world_size}: "
        assert results[0][f"spec {turn}"] == ("SpecError", f"{who}a mean")
        assert results[0][f"crash {turn}"] == ("AgreementError", f"{who}Traceback: boom")
        assert results[0][f"both {turn}"][0] == "AgreementError"
        assert results[0][f"fine {turn}"] == ("", str(float(world_size)))


def test_one_worker_raises_alike():
    tally = Tally(Group.single())
    with pytest.raises(SpecError):
        tally.exchange([], Failure("x", is_spec=True))
    with pytest.raises(AgreementError):
        tally.exchange([], Failure("x"))
