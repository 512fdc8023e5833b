"""One worker's tensors copied over everybody's, many at a time, in bounded memory.

::

    tensors ──> pieces of at most 32 MiB ──┬── large and contiguous: broadcast where they stand, no copy
                (cut by shape alone)       └── small, or strided: packed into one buffer, broadcast, unpacked

All dtypes travel as bytes, so one buffer carries any mixture of them. How tensors are cut depends on their shapes
and dtypes alone, never on strides: the messages fit even where one worker holds another memory format.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.group import Group

__all__ = ["broadcast_tensors"]

_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 19
_PARCEL_BYTES = 4 << 20
_FLIGHTS = 64
_ALIGN = 16  # views of another dtype want aligned starts


def broadcast_tensors(
    tensors: Sequence[Tensor],
    group: Group,
    source_rank: int = 0,
    landed: Callable[[int], None] | None = None,
) -> None:
    """Overwrite tensors on all workers with the source rank's values, bit for bit.

    Args:
        tensors: dense tensors of any dtype, shape and strides, with the same shapes, dtypes and kinds of device in
            the same order on all workers; changed in place, outside autograd.
        group: the workers.
        source_rank: whose values count.
        landed: called with the number of each tensor once it is whole, while others are still under way; on the
            source too, and for each tensor once.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`. One copy of at most 32 MiB is held beside the tensors.

    Example:
        >>> broadcast_tensors([torch.tensor([7])], Group.single())
    """
    cut = [list(_pieces(_storable(tensor.detach()))) if group.world_size > 1 else [] for tensor in tensors]
    under_way = [len(pieces) for pieces in cut]

    def arrive(numbers: list[int]) -> None:
        for number in numbers:
            under_way[number] -= 1
            if landed is not None and not under_way[number]:
                landed(number)

    if landed is not None:
        for number, pieces in enumerate(cut):
            if not pieces:
                landed(number)
    if group.world_size == 1:
        return
    with torch.no_grad(), group.collective("broadcast of tensors"):
        flights = _Flights(group, source_rank, arrive)
        for numbers, parcel in _parcels(cut):
            flights.send(*_load(parcel, group.rank == source_rank), numbers)
        flights.land_all()


class _Flights:
    """Broadcasts under way, several at a time, so that packing and unpacking overlap with the transfer."""

    def __init__(self, group: Group, source_rank: int, arrive: Callable[[list[int]], None]) -> None:
        self._group, self._source_rank, self._arrive = group, source_rank, arrive
        self._open: deque[tuple[dist.Work, int, list[Tensor], list[Tensor], list[int]]] = deque()
        self._copied_bytes = 0

    def send(self, flat: Tensor, pieces: list[Tensor], views: list[Tensor], numbers: list[int]) -> None:
        """Start the broadcast of `flat`; once it has landed, copy its `views`, if any, to the pieces, and tell."""
        n_bytes = flat.numel() if views else 0
        while self._open and (len(self._open) >= _FLIGHTS or self._copied_bytes + n_bytes > _PIECE_BYTES):
            self.land()
        work = dist.broadcast(
            flat, group=self._group.process_group, group_src=self._source_rank, async_op=True
        )
        assert work is not None
        self._open.append((work, n_bytes, pieces, views, numbers))
        self._copied_bytes += n_bytes

    def land(self) -> None:
        """Wait for the oldest broadcast."""
        work, n_bytes, pieces, views, numbers = self._open.popleft()
        work.wait()
        if views and self._group.rank != self._source_rank:
            _copy_all(pieces, views)
        self._copied_bytes -= n_bytes
        self._arrive(numbers)

    def land_all(self) -> None:
        """Wait for all broadcasts."""
        while self._open:
            self.land()


def _parcels(cut: Sequence[list[Tensor]]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield what travels in one message, with the numbers of the tensors that it is of.

    That is a large piece, or small ones of one kind of device together.
    """
    waiting: dict[str, tuple[list[int], list[Tensor]]] = {}
    held: dict[str, int] = {}
    for number, pieces in enumerate(cut):
        for piece in pieces:
            if piece.nbytes >= _SMALL_BYTES:
                yield [number], [piece]
                continue
            kind = piece.device.type
            numbers, parcel = waiting.setdefault(kind, ([], []))
            numbers.append(number)
            parcel.append(piece)
            held[kind] = held.get(kind, 0) + _padded(piece)
            if held[kind] >= _PARCEL_BYTES:
                yield waiting.pop(kind)
                held[kind] = 0
    yield from waiting.values()


def _load(pieces: list[Tensor], is_source: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the bytes that travel, the pieces, and views of a copy in their shapes (none if no copy)."""
    first = pieces[0]
    if len(pieces) == 1 and first.is_contiguous() and not first.is_conj() and not first.is_neg():
        return first.view(-1).view(torch.uint8), pieces, []
    flat = torch.empty(sum(map(_padded, pieces)), dtype=torch.uint8, device=first.device)
    views = []
    at = 0
    for piece in pieces:
        views.append(flat[at : at + piece.nbytes].view(piece.dtype).view(piece.shape))
        at += _padded(piece)
    if is_source:
        _copy_all(views, pieces)
    return flat, pieces, views


def _copy_all(pieces: list[Tensor], values: list[Tensor]) -> None:
    if any(t.is_conj() or t.is_neg() for t in pieces):  # the fused copy cannot write through such views
        for piece, value in zip(pieces, values, strict=True):
            piece.copy_(value)
    else:
        torch._foreach_copy_(pieces, values)


def _storable(tensor: Tensor) -> Tensor:
    """Return a view in which every element has its own memory: expanded dimensions are cut to one."""
    if tensor.is_contiguous():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor along its leading dimensions; a contiguous one gives contiguous pieces."""
    if tensor.numel() == 0:
        return
    if tensor.nbytes <= _PIECE_BYTES:
        yield tensor
        return
    dim = next(d for d, size in enumerate(tensor.shape) if size > 1)
    rows = max(1, _PIECE_BYTES * tensor.shape[dim] // tensor.nbytes)
    for part in torch.split(tensor, rows, dim):
        yield from _pieces(part)


def _padded(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / _ALIGN) * _ALIGN
