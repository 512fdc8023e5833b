"""Sums over workers along the shard tree: the same bits for any number of workers and any cut of the tensor.

Every element of the result has one fixed expression, the binary tree over shards of `sharding`. Each worker
brings the sums of the subtrees that its block of shards decomposes into; here they are added up across workers.
Backends only move bytes: their own all-reduce adds in an order that depends on sizes and rings. The exception is
two workers with one sum each: there is one addition per element, and an addition of two numbers has no order.

::

    all-reduce (two workers, one subtree each)
        rank 0  a ⇄ 1 b     a + b
    exchange of chunks (any layout)
        chunk j of every subtree goes to worker j ── worker j adds them along the tree ── and sends the sum to all
        gloo: straight from the tensor and back into it, in messages;  NCCL: all-to-all and all-gather
    halving and doubling (each worker holds one subtree, all of one size; gloo, from eight workers on)
        rank 0  [a0 a1]   ⇄ 1     half of (0+1)    ⇄ 2     quarter of ((0+1)+(2+3))   then back: 2, 1

Chunks travel once each way; halves go log2(N) ways, in fewer messages, which pays when there are many workers.
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

_BLOCK_BYTES = 32 << 20  # large sums go in pieces: the scratch memory stays small and is used again
_MANY_WORKERS = 8  # from here on halving and doubling is the faster one on gloo (benchmarks/reduce.py)
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
        elif flat.device.type != "cpu":
            self._total = _all_to_all(sums, layout, group)
        elif layout.halving and group.world_size >= _MANY_WORKERS:
            yield from _halve_and_double(flat, group, tag)
        else:
            yield from _exchange(sums, layout, group, tag)


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


def _exchange(sums: list[Tensor], layout: Layout, group: Group, tag: int) -> Iterator[None]:
    """Sum in place into the first tensor, by messages of chunks; it yields when the first are on their way.

    A worker sends the sum of its chunk only when it has all its parts: so what comes back for a chunk comes after
    that chunk has left, and may be received over it.
    """
    me, n_workers = group.rank, group.world_size
    others = [(me + distance) % n_workers for distance in range(1, n_workers)]  # not all to rank 0 at first
    block = max(1, _BLOCK_BYTES // sums[0].element_size())
    scratch = sums[0].new_empty(
        (sum(layout.parts) - layout.parts[me]) * -(-min(block, sums[0].numel()) // n_workers)
    )
    sends, back = [], []
    for place, parts in enumerate(zip(*(torch.split(flat, block) for flat in sums), strict=True)):
        size = -(-parts[0].numel() // n_workers)
        mine, *own = [part[me * size : (me + 1) * size] for part in parts]
        rest = iter(torch.split(scratch, max(1, mine.numel())))
        slots = [
            [mine, *own] if rank == me else [next(rest) for _ in range(n)] if mine.numel() else []
            for rank, n in enumerate(layout.parts)
        ]
        incoming = [_receive(slot, rank, group, 2 * tag) for rank in others for slot in slots[rank]]
        for rank in others:
            span = slice(rank * size, (rank + 1) * size)
            sends += [_send(part[span], rank, group, 2 * tag) for part in parts]
            back.append(_receive(parts[0][span], rank, group, 2 * tag + 1))
        if place == 0:
            yield
        for work in incoming:
            _wait(work)
        if mine.numel():
            total = _fold([slot for each in slots for slot in each], layout.folds)
            if me:
                mine.copy_(total)
        sends += [_send(mine, rank, group, 2 * tag + 1) for rank in others]
    for work in [*back, *sends]:
        _wait(work)


def _all_to_all(sums: list[Tensor], layout: Layout, group: Group) -> Tensor:
    """The same exchange by the collectives that NCCL has for it."""
    n_workers, size = group.world_size, sums[0].numel()
    chunk = -(-size // n_workers)
    # The padding travels, and is cut off at the end.
    outgoing = sums[0].new_zeros(n_workers, len(sums), chunk)
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
