"""Sums over workers along the shard tree: the same bits for any number of workers and any cut of the tensor.

Every element of the result has one fixed expression, the binary tree over shards of `sharding`. Each worker
brings the sums of the subtrees that its block of shards decomposes into; here they are added up across workers.
Backends only move bytes: no addition is left to an all-reduce, whose order depends on sizes and rings.

::

    halving and doubling (each worker holds one subtree, all of one size; gloo)
        rank 0  [a0 a1]   ⇄ 1     half of (0+1)    ⇄ 2     quarter of ((0+1)+(2+3))   then back: 2, 1
    exchange of chunks (any layout; NCCL)
        all-to-all: chunk j of every subtree goes to worker j ── worker j adds them along the tree ── all-gather
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.group import Group
from samestep.sharding import fold_order, shard_range, subtrees

__all__ = ["Layout", "tree_sum"]


@dataclass(frozen=True)
class Layout:
    """Which subtrees of S shards each of N workers holds, and how their sums are finished.

    Attributes:
        parts: number of subtree sums of each worker, by rank.
        folds: (a, b) pairs over all sums in rank order: slot a becomes slot a + slot b; slot 0 ends as the total.
        halving: whether recursive halving and doubling follows this very tree.
    """

    parts: tuple[int, ...]
    folds: tuple[tuple[int, int], ...]
    halving: bool

    @classmethod
    def of(cls, n_shards: int, world_size: int) -> Layout:
        """Return the layout of S shards on N workers.

        Example:
            >>> Layout.of(8, 3).parts
            (2, 2, 1)
        """
        blocks = [shard_range(n_shards, world_size, rank) for rank in range(world_size)]
        each = [subtrees(n_shards, block) for block in blocks]
        folds = fold_order(n_shards, [part for parts in each for part in parts])
        # Equal blocks of a power of two on a power of two of workers: the upper levels pair ranks 1, 2, 4 apart.
        equal = n_shards % world_size == 0
        halving = equal and _is_power(world_size) and _is_power(n_shards // world_size)
        return cls(tuple(map(len, each)), tuple(folds), halving)


def tree_sum(sums: list[Tensor], layout: Layout, group: Group) -> Tensor:
    """Return the total over all workers' subtree sums, added along the shard tree.

    Args:
        sums: this worker's subtree sums in leaf order, each (n,) contiguous, one dtype; `layout.parts[rank]` of
            them. Overwritten.
        layout: of the shards on this group.
        group: the workers.

    Returns:
        (n,) tensor, equal bit for bit on all workers and for every world size; may share memory with `sums`.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`.
    Numerics: order-fixed; accumulates in the tensors' own dtype.
    """
    if group.world_size == 1:
        return _fold(sums, layout.folds)
    if sums[0].numel() == 0:
        return sums[0]
    with group.collective("ordered all-reduce"):
        if layout.halving and sums[0].device.type == "cpu":
            return _halve_and_double(sums[0], group)
        return _exchange(sums, layout, group)


def _fold(slots: list[Tensor], folds: tuple[tuple[int, int], ...]) -> Tensor:
    for left, right in folds:
        slots[left].add_(slots[right])
    return slots[0]


def _halve_and_double(flat: Tensor, group: Group) -> Tensor:
    """Sum in place: at distance 1, 2, 4 .. swap halves with the partner and add, then gather back."""
    rank, n_workers = group.rank, group.world_size
    start, stop = 0, flat.numel()
    spans: list[tuple[int, int, int, int, int]] = []
    incoming = torch.empty((flat.numel() + 1) // 2, dtype=flat.dtype)
    distance = 1
    while distance < n_workers:
        partner = rank ^ distance
        middle = (start + stop + 1) // 2
        low = rank < partner
        keep, give = ((start, middle), (middle, stop)) if low else ((middle, stop), (start, middle))
        landing = incoming[: keep[1] - keep[0]]
        _swap(flat[give[0] : give[1]], landing, partner, group)
        flat[keep[0] : keep[1]].add_(landing)  # IEEE addition commutes, so both partners' order is the same
        spans.append((partner, *keep, *give))
        start, stop = keep
        distance *= 2
    for partner, keep_start, keep_stop, give_start, give_stop in reversed(spans):
        _swap(flat[keep_start:keep_stop], flat[give_start:give_stop], partner, group)
    return flat


def _swap(outgoing: Tensor, incoming: Tensor, partner: int, group: Group) -> None:
    works = []
    if incoming.numel():
        works.append(dist.irecv(incoming, src=partner, group=group.process_group))
    if outgoing.numel():
        works.append(dist.isend(outgoing, dst=partner, group=group.process_group))
    for work in works:
        if work is not None:
            work.wait()


def _exchange(sums: list[Tensor], layout: Layout, group: Group) -> Tensor:
    """Sum by chunks: worker j receives chunk j of every subtree sum, adds them, and all gather the chunks."""
    n_workers, size = group.world_size, sums[0].numel()
    chunk = -(-size // n_workers)
    outgoing = sums[0].new_zeros(
        n_workers, len(sums), chunk
    )  # the padding travels, and is cut off at the end
    for slot, flat in enumerate(sums):
        for worker in range(n_workers):
            piece = flat[worker * chunk : (worker + 1) * chunk]
            outgoing[worker, slot, : piece.numel()] = piece
    incoming = sums[0].new_empty(sum(layout.parts), chunk)
    dist.all_to_all_single(
        incoming.view(-1),
        outgoing.view(-1),
        output_split_sizes=[n * chunk for n in layout.parts],
        input_split_sizes=[len(sums) * chunk] * n_workers,
        group=group.process_group,
    )
    total = _fold(list(incoming.unbind(0)), layout.folds)
    gathered = [total.new_empty(chunk) for _ in range(n_workers)]
    dist.all_gather(gathered, total.contiguous(), group=group.process_group)
    return torch.cat(gathered)[:size]


def _is_power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
