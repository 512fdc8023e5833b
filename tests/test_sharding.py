"""Shards, the order of samples, and loaders: every sample once, the same for any number of workers."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset

from samestep import launch
from samestep.errors import SpecError
from samestep.sharding import (
    Shard,
    ShardLoader,
    StreamLoader,
    counter_merges,
    fold_order,
    sample_order,
    shard_range,
    straggler_factor,
    subtrees,
    tree_fold,
)
from samestep.sharding._order import Plan


@dataclass
class Place:
    rank: int = 0
    world_size: int = 1


class Noisy:
    """Samples that draw from every generator there is; the first two entries say which sample it is."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.n_samples:
            raise IndexError(index)
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return torch.tensor([index, *noise], dtype=torch.float64)


def shift(sample: Tensor, generator: torch.Generator) -> Tensor:
    return torch.cat([sample, torch.rand(2, generator=generator, dtype=torch.float64)])


def noisy_collate(samples: list[Tensor]) -> Tensor:
    return torch.stack([*samples, torch.rand(6, dtype=torch.float64)])


def all_workers(
    n_samples: int, batch: int, shards: int, world_size: int, dataset: Any = None, **options: Any
) -> list[ShardLoader]:
    data = Noisy(n_samples) if dataset is None else dataset
    return [
        ShardLoader(data, batch, shards, group=Place(r, world_size), **options) for r in range(world_size)
    ]


def joined(steps_by_worker: Any) -> list[list[Shard]]:
    """Return per step the shards of all workers, in rank order."""
    return [[shard for mine in step for shard in mine] for step in zip(*steps_by_worker, strict=True)]


def ids(steps: list[list[Shard]]) -> list[list[list[int]]]:
    return [[shard.sample_ids.tolist() for shard in step] for step in steps]


def assert_same_shards(a: list[list[Shard]], b: list[list[Shard]]) -> None:
    assert len(a) == len(b)
    for step_a, step_b in zip(a, b):
        assert [s.index for s in step_a] == [s.index for s in step_b]
        for shard_a, shard_b in zip(step_a, step_b):
            assert torch.equal(shard_a.sample_ids, shard_b.sample_ids)
            assert (shard_a.batch is None) == (shard_b.batch is None)
            if shard_a.batch is not None:
                assert torch.equal(shard_a.batch, shard_b.batch)


# -- blocks and the tree ------------------------------------------------------------------------------------


@given(st.integers(1, 70), st.data())
def test_blocks_tile_the_shards_and_differ_by_one(n_shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, n_shards))
    blocks = [shard_range(n_shards, world_size, rank) for rank in range(world_size)]
    assert [shard for block in blocks for shard in block] == list(range(n_shards))
    sizes = [len(block) for block in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert straggler_factor(n_shards, world_size) == sizes[0] * world_size / n_shards


def test_blocks_and_subtrees_of_the_drawn_case() -> None:
    blocks = [shard_range(8, 3, rank) for rank in range(3)]
    assert [[list(part) for part in subtrees(8, block)] for block in blocks] == [
        [[0, 1], [2]],
        [[3], [4, 5]],
        [[6, 7]],
    ]


# (S, N) -> most subtrees of a worker; straggler factor. Measured facts of the design.
TABLE = {
    (8, 2): (1, 1), (8, 3): (2, 1.125), (8, 4): (1, 1), (8, 5): (1, 1.25), (8, 6): (1, 1.5), (8, 7): (1, 1.75),
    (12, 2): (2, 1), (12, 3): (1, 1), (12, 4): (2, 1), (12, 5): (2, 1.25), (12, 6): (1, 1), (12, 8): (1, 4 / 3),
    (24, 2): (2, 1), (24, 3): (1, 1), (24, 5): (3, 25 / 24), (24, 7): (2, 28 / 24), (24, 8): (2, 1),
}  # fmt: skip


@pytest.mark.parametrize(("n_shards", "world_size"), list(TABLE))
def test_the_table_of_subtree_counts(n_shards: int, world_size: int) -> None:
    blocks = [shard_range(n_shards, world_size, rank) for rank in range(world_size)]
    most = max(len(subtrees(n_shards, block)) for block in blocks)
    assert (most, straggler_factor(n_shards, world_size)) == TABLE[n_shards, world_size]


def tree_nodes(n_shards: int) -> set[tuple[int, int]]:
    """The definition, level by level: neighbours join, a last single one is promoted."""
    level = [(leaf, leaf + 1) for leaf in range(n_shards)]
    nodes = set(level)
    while len(level) > 1:
        level = [(pair[0][0], pair[-1][1]) for pair in (level[i : i + 2] for i in range(0, len(level), 2))]
        nodes |= set(level)
    return nodes


@given(st.integers(1, 40), st.data())
def test_subtrees_are_the_largest_nodes_inside_the_block(n_shards: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n_shards))
    stop = data.draw(st.integers(start, n_shards))
    inside = {node for node in tree_nodes(n_shards) if start <= node[0] and node[1] <= stop}
    largest = {
        node for node in inside if not any(o != node and o[0] <= node[0] and node[1] <= o[1] for o in inside)
    }
    assert [(part.start, part.stop) for part in subtrees(n_shards, range(start, stop))] == sorted(largest)


def pair(left: str, right: str) -> str:
    return f"({left}{right})"


@given(st.integers(1, 40), st.data())
def test_any_world_size_adds_in_the_order_of_the_tree(n_shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, n_shards))
    slots, parts = [], []
    for rank in range(world_size):
        block = shard_range(n_shards, world_size, rank)
        stack: list[str] = []
        for leaf in block:
            stack.append(f"{leaf} ")
            # The bound of partial sums: one per level of the block, and one that is being added.
            assert len(stack) <= 2 * math.log2(len(block)) + 2
            for _ in range(counter_merges(n_shards, block.start, leaf)):
                newer, older = stack.pop(), stack.pop()
                stack.append(pair(older, newer))
        own = subtrees(n_shards, block)
        assert len(stack) == len(own)
        slots += stack
        parts += own
    for left, right in fold_order(n_shards, parts):
        assert left < right
        slots[left] = pair(slots[left], slots[right])
    assert slots[0] == tree_fold([f"{leaf} " for leaf in range(n_shards)], pair)


@given(st.integers(1, 12))
def test_one_worker_needs_log2_of_the_shards_plus_one_buffers(log2_shards: int) -> None:
    n_shards = 2**log2_shards
    held = most = 0
    for leaf in range(n_shards):
        held += 1
        most = max(most, held)
        held -= counter_merges(n_shards, 0, leaf)
    assert (held, most) == (1, log2_shards + 1)


def test_tree_fold_of_seven_and_of_floats() -> None:
    assert tree_fold(list("abcdefg"), pair) == "(((ab)(cd))((ef)g))"
    assert tree_fold([1e16, 1.0, 1.0, -1e16]) == (1e16 + 1.0) + (1.0 - 1e16)
    with pytest.raises(SpecError, match="values"):
        tree_fold([])


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        (lambda: shard_range(2, 3, 0), "world_size=3, got 2"),
        (lambda: shard_range(8, 2, 2), "world_size=2, got 2"),
        (lambda: shard_range(0, 1, 0), "at least 1, got 0"),
        (lambda: shard_range(8, 2.0, 0), "got 2.0"),  # type: ignore[arg-type]
        (lambda: shard_range(True, 1, 0), "got True"),
        (lambda: subtrees(8, range(6, 9)), r"range\(6, 9\)"),
        (lambda: subtrees(8, range(0, 8, 2)), r"range\(0, 8, 2\)"),
        (lambda: counter_merges(8, 0, 8), "got 8"),
        (lambda: counter_merges(8, 4, 3), "got 3"),
        (lambda: fold_order(8, [range(4)]), "got 4"),
        (lambda: fold_order(8, [range(3), range(3, 8)]), r"range\(0, 3\)"),
        (lambda: fold_order(8, [range(4, 8), range(4)]), r"range\(4, 8\)"),
    ],
)
def test_wrong_numbers_are_refused(call: Any, fragment: str) -> None:
    with pytest.raises(SpecError, match=fragment):
        call()


# -- the order of samples -----------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_is_a_permutation_of_seed_and_epoch(n_samples: int, seed: int, epoch: int) -> None:
    order = sample_order(n_samples, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n_samples))
    assert (order == sample_order(n_samples, seed, epoch)).all()


def test_orders_of_other_epochs_and_seeds_are_unrelated() -> None:
    orders = [sample_order(4000, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0), (10, 1)]]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            # Two random permutations share one fixed point on average; rank correlation has sigma 1/sqrt(n).
            assert (a == b).sum() < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(4000)


def test_all_orders_of_four_samples_are_about_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        key = tuple(sample_order(4, seed, 0).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 24
    chi_squared = sum((n - 200) ** 2 / 200 for n in counts.values())
    assert chi_squared < 49.7  # 23 degrees of freedom, p = 0.001


def test_equal_bits_keep_the_order_of_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.tile(np.array([7, 3, 3, 5], dtype=np.uint64), 50)
    monkeypatch.setattr(np.random, "Philox", lambda key: SimpleNamespace(random_raw=lambda n: bits[:n]))
    assert sample_order(200, 0, 0).tolist() == sorted(range(200), key=lambda i: (bits[i], i))


def test_orders_of_past_epochs_are_let_go() -> None:
    plan = Plan(10, 4, 2, range(2), seed=0, drop_last=False, shuffle=True)
    for epoch in range(5):
        assert (plan.order(epoch) == sample_order(10, 0, epoch)).all()
        assert set(plan._orders) == {max(epoch - 1, 0), epoch}


# -- the loader ---------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shards = draw(st.integers(1, 9))
    batch = shards + draw(st.integers(0, 20))
    drop_last = draw(st.booleans())
    n_samples = draw(st.integers(batch if drop_last else 1, 60))
    seed, shuffle = draw(st.integers(0, 2**33)), draw(st.booleans())
    case = {"n_samples": n_samples, "batch": batch, "shards": shards}
    return {**case, "seed": seed, "drop_last": drop_last, "shuffle": shuffle}


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_every_sample_is_owned_exactly_once(case: dict[str, Any], data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, case["shards"]))
    steps = joined(all_workers(world_size=world_size, **case))
    reference = joined(all_workers(world_size=1, **case))
    assert_same_shards(steps, reference)
    n, batch = case["n_samples"], case["batch"]
    assert len(steps) == len(
        ShardLoader(Noisy(n), batch, case["shards"], group=Place(), drop_last=case["drop_last"])
    )
    seen = [i for step in steps for shard in step for i in shard.sample_ids.tolist()]
    used = n - n % batch if case["drop_last"] else n
    assert seen == sample_order(n, case["seed"], 0, case["shuffle"]).tolist()[:used]
    assert len(set(seen)) == used
    for step in steps:
        sizes = [shard.n_samples for shard in step]
        assert [shard.index for shard in step] == list(range(case["shards"]))
        assert max(sizes) - min(sizes) <= 1
        for shard in step:
            assert (shard.batch is None) == (shard.n_samples == 0)
            if shard.batch is not None:
                assert shard.batch[:, 0].tolist() == shard.sample_ids.tolist()


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_resume_at_any_step_under_another_world_size(case: dict[str, Any], data: st.DataObject) -> None:
    before, after = (data.draw(st.integers(1, case["shards"])) for _ in range(2))
    n_steps = data.draw(st.integers(0, 7))
    further = 6
    straight = joined([x.steps(n_steps + further) for x in all_workers(world_size=1, **case)])
    first = all_workers(world_size=before, **case)
    start = joined([loader.steps(n_steps) for loader in first])
    states = [json.dumps(loader.state_dict()) for loader in first]
    assert len(set(states)) == 1
    second = all_workers(world_size=after, **case)
    for loader in second:
        loader.load_state_dict(json.loads(states[0]))
    assert_same_shards(start + joined([loader.steps(further) for loader in second]), straight)


def test_the_epoch_goes_on_after_a_break_and_advances_at_its_end() -> None:
    loader = ShardLoader(Noisy(10), 4, 2, group=Place(), shuffle=False)
    for shards in loader:
        assert shards[0].sample_ids.tolist() == [0, 1]
        break
    assert (loader.epoch, loader.samples_consumed, len(loader)) == (0, 4, 3)
    assert ids(list(loader)) == [[[4, 5], [6, 7]], [[8], [9]]]
    assert (loader.epoch, loader.samples_consumed) == (1, 0)
    assert len(list(loader)) == 3


def test_a_state_of_the_last_step_resumes_behind_it() -> None:
    loader = ShardLoader(Noisy(10), 4, 2, group=Place())
    states = [loader.state_dict() for _ in loader]
    assert (states[-1]["epoch"], states[-1]["samples_consumed"]) == (0, 10)
    following = [list(loader) for _ in range(2)]
    resumed = ShardLoader(Noisy(10), 4, 2, group=Place())
    resumed.load_state_dict(states[-1])
    assert (
        list(resumed) == []
    )  # what is left of the epoch; work at its end is done again, as it would have been
    for expected in following:
        assert_same_shards(list(resumed), expected)
    resumed.load_state_dict(states[-1])
    assert_same_shards(list(resumed.steps(6)), following[0] + following[1])


def test_epochs_have_other_orders_and_other_noise() -> None:
    loader = ShardLoader(Noisy(40), 40, 1, group=Place(), augment=shift)
    (first,), (second,) = list(loader), list(loader)
    assert ids([first]) != ids([second])
    rows = [{row[0]: row[1:] for row in epoch[0].batch.tolist()} for epoch in (first, second)]
    assert rows[0].keys() == rows[1].keys()
    assert all(x != y for key in rows[0] for x, y in zip(rows[0][key], rows[1][key]))
    everything = [value for epoch in rows for row in epoch.values() for value in row]
    assert len(set(everything)) == len(everything)


def test_noise_depends_on_the_sample_and_not_on_batch_or_shards() -> None:
    a = ShardLoader(Noisy(40), 40, 1, group=Place(), augment=shift, seed=3)
    b = ShardLoader(Noisy(40), 9, 4, group=Place(), augment=shift, seed=3)
    rows_a, rows_b = (
        torch.cat([s.batch for step in loader for s in step if s.batch is not None]) for loader in (a, b)
    )
    assert torch.equal(rows_a, rows_b)


def draw() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_callers_generators_are_left_alone(num_workers: int) -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    threads = torch.get_num_threads()
    with ShardLoader(Noisy(9), 4, 2, group=Place(), augment=shift, num_workers=num_workers) as loader:
        list(loader)
    assert draw() == expected
    assert torch.get_num_threads() == threads


def test_loader_processes_change_nothing_and_end() -> None:
    options: dict[str, Any] = {"augment": shift, "collate_fn": noisy_collate, "seed": 7}
    straight = list(ShardLoader(Noisy(22), 8, 3, group=Place(), **options).steps(8))
    with ShardLoader(Noisy(22), 8, 3, group=Place(), num_workers=2, **options) as loader:
        assert_same_shards(list(loader.steps(2)), straight[:2])
        processes = multiprocessing.active_children()
        assert len(processes) == 2
        state = loader.state_dict()
        assert state["samples_consumed"] == 16  # though more was read ahead
        assert_same_shards(list(loader.steps(3)), straight[2:5])
        assert {p.pid for p in multiprocessing.active_children()} == {p.pid for p in processes}
        loader.load_state_dict(state)
        assert_same_shards(list(loader.steps(2)), straight[2:4])
    assert multiprocessing.active_children() == []
    # From two loader processes to one, and from one worker to two, in the middle of an epoch.
    resumed = [
        ShardLoader(Noisy(22), 8, 3, group=Place(r, 2), num_workers=1 - r, **options) for r in range(2)
    ]
    for one in resumed:
        one.load_state_dict(state)
    assert_same_shards(joined([one.steps(6) for one in resumed]), straight[2:])
    for one in resumed:
        one.close()


def three_epochs(group: Any, state: dict[str, Any]) -> tuple[list[list[Shard]], dict[str, Any]]:
    loader = ShardLoader(Noisy(22), 8, 5, group=group, augment=shift, seed=7)
    loader.load_state_dict(state)
    return list(loader.steps(7)), loader.state_dict()


def test_real_workers_get_the_shards_of_one() -> None:
    alone = ShardLoader(Noisy(22), 8, 5, group=Place(), augment=shift, seed=7)
    list(alone.steps(2))
    results = launch.run(three_epochs, 3, alone.state_dict(), timeout_seconds=120)
    assert_same_shards(joined([steps for steps, _ in results]), list(alone.steps(7)))
    assert [state for _, state in results] == [alone.state_dict()] * 3


class Table:
    """Rows that are asked for all at once, with noise."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, indices: list[int]) -> Tensor:
        return torch.stack([torch.tensor(indices, dtype=torch.float64), torch.rand(len(indices)).double()], 1)


def test_whole_shards_are_the_same_for_any_number_of_workers_and_processes() -> None:
    options: dict[str, Any] = {
        "dataset": Table(),
        "fetch": "shards",
        "n_samples": 22,
        "batch": 8,
        "shards": 3,
    }
    alone = joined([x.steps(8) for x in all_workers(world_size=1, **options)])
    assert_same_shards(joined([x.steps(8) for x in all_workers(world_size=2, **options)]), alone)
    (reader,) = all_workers(world_size=1, num_workers=1, **options)
    with reader:
        assert_same_shards(joined([reader.steps(8)]), alone)
    for step in alone:
        for shard in step:
            assert shard.batch[:, 0].tolist() == shard.sample_ids.tolist()
    noise = [x for step in alone for shard in step for x in shard.batch[:, 1].tolist()]
    assert len(set(noise)) == len(noise)
    (reader,) = all_workers(world_size=1, collate_fn=lambda batch: batch * 2, **options)
    assert torch.equal(next(iter(reader))[0].batch, alone[0][0].batch * 2)


class Threads(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(torch.get_num_threads())


def test_samples_are_made_on_one_thread_wherever_that_is() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for num_workers in (0, 1):
            with ShardLoader(Threads(4), 4, 1, group=Place(), num_workers=num_workers) as loader:
                assert next(iter(loader))[0].batch.tolist() == [1, 1, 1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# -- streams ------------------------------------------------------------------------------------------------


class Counter:
    """A stream whose epochs have different lengths and whose samples draw random numbers."""

    def __init__(self, lengths: tuple[int, ...] = (10, 7, 12), broken_at: int = -1) -> None:
        self.lengths, self.broken_at = lengths, broken_at
        self.epoch = self.at = 0

    def __iter__(self) -> Any:
        while self.at < self.lengths[self.epoch % len(self.lengths)]:
            self.at += 1
            if self.at == self.broken_at:
                raise OSError("disk gone")
            noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
            yield torch.tensor([100 * self.epoch + self.at - 1, *noise], dtype=torch.float64)
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def streams(world_size: int, batch: int, shards: int, **options: Any) -> list[StreamLoader]:
    options = {"augment": shift, "collate_fn": noisy_collate, **options}
    return [
        StreamLoader(Counter(), batch, shards, group=Place(r, world_size), **options)
        for r in range(world_size)
    ]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 9), st.booleans(), st.data())
def test_a_stream_resumes_anywhere_under_another_world_size(
    shards: int, extra: int, n_steps: int, drop_last: bool, data: st.DataObject
) -> None:
    batch = min(shards + extra, 7)
    before, after = (data.draw(st.integers(1, shards)) for _ in range(2))
    straight = joined([x.steps(n_steps + 6) for x in streams(1, batch, shards, drop_last=drop_last)])
    first = streams(before, batch, shards, drop_last=drop_last)
    start = joined([loader.steps(n_steps) for loader in first])
    states = {json.dumps(loader.state_dict()) for loader in first}
    assert len(states) == 1
    second = streams(after, batch, shards, drop_last=drop_last)
    for loader in second:
        loader.load_state_dict(json.loads(next(iter(states))))
    assert_same_shards(start + joined([loader.steps(6) for loader in second]), straight)
    for step in straight:
        for shard in step:
            assert shard.n_samples == (0 if shard.batch is None else len(shard.batch) - 1)


@pytest.mark.parametrize(
    ("drop_last", "sizes"), [(False, [[4, 4, 2], [4, 3], [4, 4, 4]]), (True, [[4, 4], [4], [4] * 3])]
)
def test_epochs_of_a_stream_end_where_the_stream_says(drop_last: bool, sizes: list[list[int]]) -> None:
    (loader,) = streams(1, 4, 2, drop_last=drop_last, collate_fn=None)
    for epoch, expected in enumerate(sizes):
        assert loader.epoch == epoch
        steps = list(loader)
        assert [sum(shard.n_samples for shard in step) for step in steps] == expected
        seen = [int(row[0]) for step in steps for shard in step for row in shard.batch]
        assert seen == [100 * epoch + i for i in range(sum(expected))]
    state = loader.state_dict()
    assert (state["epoch"], state["samples_consumed"], state["stream"]) == (3, 0, {"epoch": 3, "at": 0})


def test_a_stream_leaves_the_callers_generators_alone() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    list(streams(1, 4, 2)[0])
    assert draw() == expected


def test_what_is_wrong_with_a_stream_is_said() -> None:
    with pytest.raises(SpecError, match="state_dict"):
        StreamLoader(range(4), 4, 2, group=Place())  # type: ignore[arg-type]
    broken = StreamLoader(Counter(broken_at=6), 4, 2, group=Place())
    assert next(broken.steps())[1].sample_ids.tolist() == [2, 3]
    before = broken.state_dict()
    for _ in range(2):  # the stream goes back to the start of the step
        with pytest.raises(SpecError, match=r"sample 5 .*disk gone.*epoch 0"):
            next(broken.steps())
        assert broken.state_dict() == before
    empty = StreamLoader(Counter(lengths=(0,)), 4, 2, group=Place())
    with pytest.raises(SpecError, match="at least one step"):
        next(empty.steps())
    (loader,) = streams(1, 4, 2)
    with pytest.raises(SpecError, match="shards"):
        loader.load_state_dict(streams(1, 4, 3)[0].state_dict())
    for name in ("stream", "stream_ended"):
        with pytest.raises(SpecError, match=f"`{name}`.*None"):
            loader.load_state_dict({**loader.state_dict(), name: None})


# -- what is refused ----------------------------------------------------------------------------------------


class Iterable(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"dataset": []}, "none"),
        ({"dataset": iter([1])}, "__len__"),
        ({"dataset": {1, 2}}, "__getitem__"),
        ({"dataset": Iterable()}, "StreamLoader"),
        ({"global_batch_size": 1}, "shards=2, got 1"),
        ({"group": Place(0, 3)}, "world_size=3, got 2"),
        ({"group": Place(3, 2)}, "got 3"),
        ({"shards": 0}, "got 0"),
        ({"seed": -1}, "got -1"),
        ({"seed": 0.5}, "got 0.5"),
        ({"num_workers": -1}, "got -1"),
        ({"prefetch_factor": 2}, "num_workers"),
        ({"fetch": "batches"}, "batches"),
        ({"fetch": "shards", "augment": shift}, "augment"),
        ({"global_batch_size": 11, "drop_last": True}, "got 11"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], fragment: str) -> None:
    arguments: dict[str, Any] = {"dataset": range(10), "global_batch_size": 4, "shards": 2, "group": Place()}
    with pytest.raises(SpecError, match=fragment):
        ShardLoader(**{**arguments, **change})


class Marked(Noisy):
    def fingerprint(self) -> str:
        return "abc"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seed", {"seed": 1}),
        ("dataset", {"dataset": Noisy(11)}),
        ("dataset", {"dataset": Marked(10)}),
        ("dataset", {"dataset": range(10)}),
        ("global_batch_size", {"batch": 5}),
        ("shards", {"shards": 3}),
        ("drop_last", {"drop_last": True}),
        ("shuffle", {"shuffle": False}),
    ],
)
def test_a_state_of_other_settings_is_refused_with_both_values(name: str, change: dict[str, Any]) -> None:
    same: dict[str, Any] = {"n_samples": 10, "batch": 4, "shards": 2, "world_size": 1}
    (saved,) = all_workers(**same)
    list(saved.steps(1))
    (other,) = all_workers(**{**same, **change})
    with pytest.raises(SpecError) as caught:
        other.load_state_dict(saved.state_dict())
    assert str(caught.value.name).startswith(name)
    assert other.samples_consumed == 0
    wanted = {"dataset": "in the state"}.get(name, f"{saved.state_dict()[name]!r} in the state")
    assert wanted in caught.value.message
    other.load_state_dict(saved.state_dict(), allow=(name,))
    assert other.samples_consumed == 4
    list(other.steps(4))


def test_a_daemonic_process_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    ShardLoader(range(10), 4, 2, group=Place())
    with pytest.raises(SpecError, match="daemonic"):
        ShardLoader(range(10), 4, 2, group=Place(), num_workers=1)


def test_damaged_states_are_refused() -> None:
    loader = ShardLoader(Noisy(10), 4, 2, group=Place())
    good = loader.state_dict()
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "missing"),
        (None, "NoneType"),  # type: ignore[list-item]
        ({**good, "format_version": 2}, "format_version 1, got 2"),
        ({**good, "samples_consumed": 11}, "got 11"),
        ({**good, "samples_consumed": -4}, "got -4"),
        ({**good, "epoch": "0"}, "got '0'"),
    ]
    for state, fragment in bad:
        with pytest.raises(SpecError, match=fragment):
            loader.load_state_dict(state)
    with pytest.raises(SpecError, match="sed"):
        loader.load_state_dict(good, allow=("sed",))


class Broken(Noisy):
    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise KeyError("no such picture")
        return super().__getitem__(index)


def ragged(samples: list[Tensor]) -> Tensor:
    return torch.stack([row[: 2 + (row[0] == 7).int().item()] for row in samples])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate_fn", "name"), [(Broken, None, "dataset"), (Noisy, ragged, "collate_fn")]
)
def test_a_failing_sample_or_batch_names_the_shard_and_the_samples(
    dataset: Any, collate_fn: Any, name: str, num_workers: int
) -> None:
    options: dict[str, Any] = {"shuffle": False, "num_workers": num_workers, "collate_fn": collate_fn}
    with ShardLoader(dataset(12), 6, 3, group=Place(1, 2), **options) as loader:
        list(loader.steps(1))
        assert loader.samples_consumed == 6
    with ShardLoader(dataset(12), 6, 3, group=Place(0, 2), **options) as loader:
        list(loader.steps(1))
        with pytest.raises(SpecError, match=r"rank 0, epoch 0, shard 0, samples \[6, 7\]") as caught:
            list(loader)
        assert caught.value.name == name
        assert "Traceback" in caught.value.__notes__[0]
        assert loader.samples_consumed == 6
        with pytest.raises(SpecError, match="shard 0"):  # the position still points at that step
            list(loader)
