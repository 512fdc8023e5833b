"""Sums over workers along the shard tree: the same bits for any number of workers and any cut of the tensor.

Every element of the result has one fixed expression, the binary tree over shards of `sharding`. Each worker
brings the sums of the subtrees that its block of shards decomposes into; here they are added up across workers.
Backends only move bytes: their own all-reduce adds in an order that depends on sizes and rings. The exception is
two workers with one sum each: there is one addition per element, and an addition of two numbers has no order.

::

    all-reduce (two workers, one subtree each)
        rank 0  a ⇄ 1 b     a + b
    halving and doubling (each worker holds one subtree, all of one size; gloo)
        rank 0  [a0 a1]   ⇄ 1     half of (0+1)    ⇄ 2     quarter of ((0+1)+(2+3))   then back: 2, 1
    exchange of chunks (any layout; NCCL)
        all-to-all: chunk j of every subtree goes to worker j ── worker j adds them along the tree ── all-gather
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.group import Group
from samestep.sharding import fold_order, shard_range, subtrees

__all__ = ["Layout", "TreeSum", "tree_sum"]

_BLOCK_BYTES = 24 << 20  # halving and doubling in pieces: the scratch memory stays small and is used again
_PAIR_DTYPES = (torch.float32, torch.float64)  # others the backends may round in their own ways


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

    @property
    def pair(self) -> bool:
        """Whether there is but one addition to make across workers."""
        return self.parts == (1, 1)


class TreeSum:
    """A sum over workers that is under way: begun where it is made, ended by `wait`.

    Args:
        sums: this worker's subtree sums in leaf order, each (n,) contiguous, one dtype; `layout.parts[rank]` of
            them. Overwritten; not to be read before `wait`.
        layout: of the shards on this group.
        group: the workers.
        tag: tells sums that are under way at the same time apart; the same on all workers.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`, making and waiting, in one order of each.
    Numerics: order-fixed; accumulates in the tensors' own dtype.
    """

    def __init__(self, sums: list[Tensor], layout: Layout, group: Group, tag: int = 0) -> None:
        self._group, self._total = group, sums[0]
        self._steps = self._run(sums, layout, tag)
        with group.collective("ordered all-reduce"):
            next(self._steps, None)

    def wait(self) -> Tensor:
        """Return the total, (n,), equal bit for bit on all workers; may share memory with the sums.

        Raises:
            WorkerError: when a worker is gone.

        Collective: all ranks of the group.
        """
        with self._group.collective("ordered all-reduce"):
            for _ in self._steps:
                pass
        return self._total

    def _run(self, sums: list[Tensor], layout: Layout, tag: int) -> Iterator[None]:
        flat, group = sums[0], self._group
        if group.world_size == 1:
            self._total = _fold(sums, layout.folds)
        elif flat.numel() == 0:
            return
        elif layout.pair and flat.dtype in _PAIR_DTYPES:
            work = dist.all_reduce(flat, group=group.process_group, async_op=True)
            yield
            assert work is not None
            work.wait()
        elif layout.halving and flat.device.type == "cpu":
            yield from _halve_and_double(flat, group, tag)
        else:
            self._total = _exchange(sums, layout, group)


def tree_sum(sums: list[Tensor], layout: Layout, group: Group) -> Tensor:
    """Return the total over all workers' subtree sums, added along the shard tree.

    Args:
        sums: as for `TreeSum`; overwritten.
        layout: of the shards on this group.
        group: the workers.

    Returns:
        (n,) tensor, equal bit for bit on all workers and for every world size; may share memory with `sums`.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`.
    Numerics: order-fixed; accumulates in the tensors' own dtype.
    """
    return TreeSum(sums, layout, group).wait()


def _fold(slots: list[Tensor], folds: tuple[tuple[int, int], ...]) -> Tensor:
    for left, right in folds:
        slots[left].add_(slots[right])
    return slots[0]


def _halve_and_double(flat: Tensor, group: Group, tag: int) -> Iterator[None]:
    """Sum in place: at distance 1, 2, 4 .. swap halves with the partner and add, then gather back.

    Whatever is to come is received for in advance: gloo then writes at once, without asking first. It yields when
    the first halves are on their way.
    """
    sends, last = [], []
    block = min(flat.numel(), _BLOCK_BYTES // flat.element_size())
    scratch = torch.empty(block + group.world_size, dtype=flat.dtype)  # every half is rounded up
    for place, part in enumerate(torch.split(flat, block)):
        spans = _spans(part, group)
        landings = torch.split(
            scratch[: sum(keep.numel() for _, keep, _ in spans)], [k.numel() for _, k, _ in spans]
        )
        incoming = [
            _receive(landing, partner, group, 2 * tag)
            for landing, (partner, _, _) in zip(landings, spans, strict=True)
        ]
        back = []
        for level, (partner, keep, give) in enumerate(spans):
            sends.append(_send(give, partner, group, 2 * tag))
            # Over what is being sent: what comes back was made of it, and so comes after it has left.
            back.append(_receive(give, partner, group, 2 * tag + 1))
            if place == level == 0:
                yield
            _wait(incoming[level])
            keep.add_(landings[level])  # IEEE addition commutes, so both partners' order is the same
        for level, (partner, keep, _) in reversed(list(enumerate(spans))):
            sends.append(_send(keep, partner, group, 2 * tag + 1))
            if level:
                _wait(back[level])
        last.append(back[0])  # meanwhile the next block is on its way
    for work in [*last, *sends]:
        _wait(work)


def _spans(part: Tensor, group: Group) -> list[tuple[int, Tensor, Tensor]]:
    """Return for each distance 1, 2, 4 .. the partner, what is kept and what is given, as views."""
    spans = []
    distance = 1
    while distance < group.world_size:
        partner = group.rank ^ distance
        low, high = part[: (part.numel() + 1) // 2], part[(part.numel() + 1) // 2 :]
        keep, give = (low, high) if group.rank < partner else (high, low)
        spans.append((partner, keep, give))
        part, distance = keep, 2 * distance
    return spans


def _send(tensor: Tensor, partner: int, group: Group, tag: int) -> dist.Work | None:
    return dist.isend(tensor, partner, group.process_group, tag) if tensor.numel() else None


def _receive(tensor: Tensor, partner: int, group: Group, tag: int) -> dist.Work | None:
    return dist.irecv(tensor, partner, group.process_group, tag) if tensor.numel() else None


def _wait(work: dist.Work | None) -> None:
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
