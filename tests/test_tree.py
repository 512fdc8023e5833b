"""Sums along the shard tree: against the plain definition, for any layout, cut and schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep import launch, tree
from samestep.group import Group
from samestep.sharding import counter_merges, shard_range, subtrees, tree_fold
from samestep.tree import Layout, TreeSum, tree_sum

SIZES = [0, 1, 2, 3, 7, 64, 1001]
SHARDS = [4, 5, 8, 12]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def leaves(n_shards: int, size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size + 1000 * n_shards)
    values = [torch.randn(size, generator=generator) * 10.0 ** (i % 5) for i in range(n_shards)]
    return [value.to(dtype) for value in values]


def local_sums(n_shards: int, block: range, values: list[torch.Tensor]) -> list[torch.Tensor]:
    stack: list[torch.Tensor] = []
    for leaf in block:
        stack.append(values[leaf].clone())
        for _ in range(counter_merges(n_shards, block.start, leaf)):
            newer = stack.pop()
            stack[-1] = stack[-1] + newer
    return stack


def add_all(group: Group) -> list[str]:
    wrong = []
    cases = [(s, size, torch.float32) for s in SHARDS for size in SIZES]
    cases += [(8, 65, dtype) for dtype in DTYPES]
    for n_shards, size, dtype in cases:
        if n_shards < group.world_size:
            continue
        values = leaves(n_shards, size, dtype)
        sums = local_sums(n_shards, shard_range(n_shards, group.world_size, group.rank), values)
        layout = Layout.of(n_shards, group.world_size)
        assert len(sums) == layout.parts[group.rank]
        found = tree_sum(sums, layout, group)
        if not torch.equal(found, tree_fold(values)):
            wrong.append(f"S={n_shards} size={size} {dtype}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_sum_has_the_bits_of_the_plain_definition(world_size):
    assert launch.run(add_all, world_size, timeout_seconds=120) == [[]] * world_size


def all_schedules(group: Group) -> bool:
    """One subtree each: messages of chunks, halving and doubling, and the collectives, on the same sums."""
    values = leaves(8, 1003)
    layout = Layout.of(8, group.world_size)
    block = shard_range(8, group.world_size, group.rank)
    assert layout.halving
    same = []
    for block_bytes in (tree._BLOCK_BYTES, 64, 4):  # at once, in many pieces, of single elements
        tree._BLOCK_BYTES = block_bytes
        halved, exchanged = (local_sums(8, block, values) for _ in range(2))
        for _ in tree._halve_and_double(halved[0], group, 0):
            pass
        for _ in tree._exchange(exchanged, layout, group, 0):
            pass
        same += [torch.equal(sums[0], tree_fold(values)) for sums in (halved, exchanged)]
    return all(same) and torch.equal(
        tree._all_to_all(local_sums(8, block, values), layout, group), tree_fold(values)
    )


def test_all_schedules_give_the_same_bits():
    assert launch.run(all_schedules, 4, timeout_seconds=120) == [True] * 4
    assert launch.run(all_schedules, 2, timeout_seconds=120) == [True] * 2


def uneven(group: Group) -> list[bool]:
    """Unlike numbers of subtrees, through both schedules for them, and a sum in pieces."""
    same = []
    for n_shards in (4, 5, 8):
        values, layout = leaves(n_shards, 1003), Layout.of(n_shards, group.world_size)
        block = shard_range(n_shards, group.world_size, group.rank)
        for tree._BLOCK_BYTES in (1 << 20, 64, 4):
            same.append(
                torch.equal(tree_sum(local_sums(n_shards, block, values), layout, group), tree_fold(values))
            )
        together = tree._all_to_all(local_sums(n_shards, block, values), layout, group)
        same.append(torch.equal(together, tree_fold(values)))
    return same


def test_uneven_layouts_in_pieces():
    assert launch.run(uneven, 3, timeout_seconds=120) == [[True] * 12] * 3


def under_way(group: Group, n_shards: int) -> list[bool]:
    """Several sums begun before the first is waited for, as the buckets of one backward are."""
    layout, block = (
        Layout.of(n_shards, group.world_size),
        shard_range(n_shards, group.world_size, group.rank),
    )
    sizes = [1001, 3, 64, 1, 0, 777]
    begun = [
        TreeSum(local_sums(n_shards, block, leaves(n_shards, size)), layout, group, tag)
        for tag, size in enumerate(sizes)
    ]
    return [
        torch.equal(each.wait(), tree_fold(leaves(n_shards, size)))
        for each, size in zip(begun, sizes, strict=True)
    ]


@pytest.mark.parametrize(("world_size", "n_shards"), [(2, 8), (4, 4), (3, 8)])
def test_sums_may_be_under_way_together(world_size, n_shards):
    assert launch.run(under_way, world_size, n_shards, timeout_seconds=120) == [[True] * 6] * world_size


@given(n_shards=st.integers(1, 40), data=st.data())
def test_layouts_cover_the_shards(n_shards, data):
    world_size = data.draw(st.integers(1, n_shards))
    layout = Layout.of(n_shards, world_size)
    assert len(layout.parts) == world_size
    assert len(layout.folds) == sum(layout.parts) - 1
    if layout.halving:
        assert set(layout.parts) == {1}
    # The order is the tree's: written out with brackets it is the same text.
    names = [str(i) for i in range(n_shards)]
    slots = [
        tree_fold(names[part.start : part.stop], lambda a, b: f"({a}+{b})")
        for rank in range(world_size)
        for part in subtrees(n_shards, shard_range(n_shards, world_size, rank))
    ]
    for left, right in layout.folds:
        slots[left] = f"({slots[left]}+{slots[right]})"
    assert slots[0] == tree_fold(names, lambda a, b: f"({a}+{b})")
