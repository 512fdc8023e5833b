"""Blocks of shards and the binary tree over them, in whole numbers only.

The tree has the shards 0..S-1 as leaves. Level by level, neighbours 2i and 2i+1 are joined; a last one without
a right neighbour is promoted as it is. The tree depends on S alone, so a sum that follows it has the same bits
whoever holds the shards.

::

    S = 7        0 1 2 3 4 5 6        level 0
                 \\/  \\/  \\/  |
                 01  23  45  6        level 1
                  \\  /    \\  /
                  0123     456        level 2
                      \\   /
                     0123456          level 3

Node i of level k covers the leaves from i * 2^k up to, and without, min((i + 1) * 2^k, S).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

from samestep.errors import SpecError

__all__ = [
    "counter_merges",
    "fold_order",
    "shard_range",
    "split",
    "straggler_factor",
    "subtrees",
    "tree_fold",
    "whole",
]

T = TypeVar("T")


def whole(name: str, value: object, minimum: int) -> int:
    """Return `value` as an int of at least `minimum`; a bool or a float is refused.

    Args:
        name: of the argument, for the message.
        value: anything.
        minimum: smallest value allowed.

    Raises:
        SpecError: when `value` is not a whole number or too small.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(
            f"`{name}`: expected a whole number >= {minimum}, got {value!r}. Pass an int.", name=name
        ) from None
    if number < minimum:
        raise SpecError(f"`{name}`: expected at least {minimum}, got {number}. Pass a larger one.", name=name)
    return number


def split(n_items: int, n_parts: int, index: int) -> range:
    """Return part `index` of `n_items` cut into contiguous parts, the first ones one item larger where needed.

    Args:
        n_items: how many items there are; below `n_parts`, the last parts are empty.
        n_parts: how many parts.
        index: which part, from 0.

    Example:
        >>> [list(split(5, 3, i)) for i in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    size, larger = divmod(n_items, n_parts)
    start = index * size + min(index, larger)
    return range(start, start + size + (index < larger))


def shard_range(n_shards: int, world_size: int, rank: int) -> range:
    """Return the shards that worker `rank` holds: a contiguous block.

    Blocks differ by at most one shard; where `world_size` does not divide `n_shards`, the first workers hold one
    more.

    Args:
        n_shards: shards of a global batch, S >= `world_size`.
        world_size: number of workers, N >= 1.
        rank: of the worker, 0 .. N-1.

    Returns:
        Range of shard numbers, never empty.

    Raises:
        SpecError: when there are fewer shards than workers, or no such rank.

    Example:
        >>> [list(shard_range(8, 3, rank)) for rank in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7]]
    """
    n_shards, world_size = whole("n_shards", n_shards, 1), whole("world_size", world_size, 1)
    rank = whole("rank", rank, 0)
    if n_shards < world_size:
        raise SpecError(
            f"`n_shards`: expected at least world_size={world_size}, got {n_shards}. "
            "Use fewer workers or more shards (more shards change the numbers of the run).",
            rank=rank,
            name="n_shards",
        )
    if rank >= world_size:
        raise SpecError(
            f"`rank`: expected less than world_size={world_size}, got {rank}. Check the group.", name="rank"
        )
    return split(n_shards, world_size, rank)


def straggler_factor(n_shards: int, world_size: int) -> float:
    """Return how much longer a step takes than with shards spread evenly: ceil(S / N) * N / S, at least 1.

    A step waits for the worker with the most shards. Choose S divisible by the world sizes you mean to use.

    Args:
        n_shards: S >= `world_size`.
        world_size: N >= 1.

    Example:
        >>> straggler_factor(8, 4), straggler_factor(8, 5)
        (1.0, 1.25)
    """
    most = len(shard_range(n_shards, world_size, 0))
    return most * world_size / n_shards


def subtrees(n_shards: int, block: range) -> list[range]:
    """Return the largest whole subtrees that a block of shards decomposes into, in leaf order.

    Their sums are all that other workers need of this block: 8 shards on 3 workers give {0,1}{2} | {3}{4,5} |
    {6,7}.

    Args:
        n_shards: leaves of the tree, S.
        block: contiguous shards inside 0 .. S-1, as from `shard_range`; may be empty.

    Returns:
        Ranges of leaves that together are `block`; at most 2 * log2(len(block)) + 1 of them.

    Raises:
        SpecError: when `block` has steps or reaches outside the shards.

    Example:
        >>> subtrees(8, range(3, 6))
        [range(3, 4), range(4, 6)]
        >>> subtrees(7, range(4, 7))
        [range(4, 7)]
    """
    n_shards = whole("n_shards", n_shards, 1)
    if block.step != 1 or (block and (block.start < 0 or block.stop > n_shards)):
        raise SpecError(
            f"`block`: expected contiguous shards inside range(0, {n_shards}), got {block}. Use shard_range.",
            name="block",
        )
    parts = []
    start = block.start
    while start < block.stop:
        size = 1
        # A node that starts at leaf `start` may double while its start stays aligned; past S it is cut off, and
        # a cut-off node is whole.
        while size < n_shards and start % (2 * size) == 0 and min(start + 2 * size, n_shards) <= block.stop:
            size *= 2
        stop = min(start + size, n_shards)
        parts.append(range(start, stop))
        start = stop
    return parts


def counter_merges(n_shards: int, start: int, leaf: int) -> int:
    """Return how often to add the two top partial sums once shard `leaf` was pushed on the stack.

    A worker runs its shards in order and keeps a stack of partial sums: push the new shard's, then that many
    times replace the two top ones by their sum (older + newer). After the last shard the stack holds the sums of
    `subtrees`. It never holds more than about log2 of the block plus one.

    Args:
        n_shards: leaves of the tree, S.
        start: first shard of the worker's block.
        leaf: shard just pushed, `start` <= leaf < S.

    Returns:
        Number of additions, from 0.

    Raises:
        SpecError: when `leaf` lies outside `start` .. S-1.

    Example:
        >>> [counter_merges(8, 0, leaf) for leaf in range(8)]
        [0, 1, 0, 2, 0, 1, 0, 3]
        >>> [counter_merges(8, 3, leaf) for leaf in (3, 4, 5)]
        [0, 0, 1]
    """
    n_shards, start = whole("n_shards", n_shards, 1), whole("start", start, 0)
    leaf = whole("leaf", leaf, start)
    if leaf >= n_shards:
        raise SpecError(f"`leaf`: expected less than n_shards={n_shards}, got {leaf}.", name="leaf")
    merges, node, size = 0, leaf, 1
    while True:
        if node % 2:  # a right child: its left sibling is below it on the stack, if this worker has it
            if (node - 1) * size < start:
                return merges
            merges += 1
        elif (
            node == 0 or (node + 1) * size < n_shards
        ):  # the root's edge, or the right sibling is still to come
            return merges
        node, size = node // 2, size * 2


def fold_order(n_shards: int, parts: Sequence[range]) -> list[tuple[int, int]]:
    """Return which subtree sums to add, in which order, to finish the tree.

    Each pair (a, b) says: slot a becomes slot a + slot b. After the last pair slot 0 holds the total.

    Args:
        n_shards: leaves of the tree, S.
        parts: subtrees in leaf order that cover 0 .. S-1, such as `subtrees` of all workers, one after another.

    Returns:
        len(parts) - 1 pairs of slot numbers, a < b.

    Raises:
        SpecError: when the parts do not cover the shards in order, or one is no subtree.

    Example:
        >>> parts = [part for rank in range(3) for part in subtrees(8, shard_range(8, 3, rank))]
        >>> fold_order(8, parts)
        [(1, 2), (0, 1), (3, 4), (0, 3)]
    """
    n_shards = whole("n_shards", n_shards, 1)
    expected = 0
    for part in parts:
        if part.start != expected or subtrees(n_shards, part) != [part]:
            raise SpecError(
                f"`parts`: expected a subtree of {n_shards} shards that starts at {expected}, got {part}. "
                "Use subtrees.",
                name="parts",
            )
        expected = part.stop
    if expected != n_shards:
        raise SpecError(f"`parts`: expected {n_shards} shards, got {expected}. Add the rest.", name="parts")
    pairs: list[tuple[int, int]] = []
    stack: list[int] = []  # slots whose sums wait for a right sibling
    for slot, part in enumerate(parts):
        stack.append(slot)
        # Whole subtrees behave like their last leaf: whatever that leaf completes is completed now, except the
        # additions that made the subtree itself.
        inside = sum(counter_merges(n_shards, part.start, leaf) for leaf in part)
        before = sum(counter_merges(n_shards, 0, leaf) for leaf in part)
        for _ in range(before - inside):
            newer, older = stack.pop(), stack.pop()
            pairs.append((older, newer))
            stack.append(older)
    return pairs


def tree_fold(values: Sequence[T], add: Callable[[T, T], T] = operator.add) -> T:
    """Return the sum of one value per shard, added along the tree.

    The plain definition of the order that all order-fixed sums follow.

    Args:
        values: (n_shards,) one value per shard, in shard order; at least one.
        add: the addition; called as add(left, right).

    Raises:
        SpecError: when there are no values.

    Numerics: order-fixed; the order depends on the number of values alone.

    Example:
        >>> tree_fold(["a", "b", "c", "d", "e"], lambda left, right: f"({left}{right})")
        '(((ab)(cd))e)'
    """
    if not values:
        raise SpecError("`values`: expected one value per shard, got none. Pass at least one.", name="values")
    level = list(values)
    while len(level) > 1:
        joined = [add(left, right) for left, right in zip(level[::2], level[1::2])]
        level = joined + level[len(joined) * 2 :]
    return level[0]
