"""One worker's tensors copied over everybody's, many at a time, in bounded memory.

::

    tensors ──> pieces of at most 32 MiB ──┬── large and contiguous: broadcast where they stand, no copy
                (cut by shape alone)       └── small, or strided: packed into one buffer, broadcast, unpacked

All dtypes travel as bytes, so one buffer carries any mixture of them. How tensors are cut depends on their shapes
and dtypes alone, never on strides: the messages fit even where one worker holds another memory format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.group import Group

__all__ = ["broadcast_tensors"]

_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 18
_ALIGN = 16  # views of another dtype want aligned starts


def broadcast_tensors(tensors: Sequence[Tensor], group: Group, source_rank: int = 0) -> None:
    """Overwrite tensors on all workers with the source rank's values, bit for bit.

    Args:
        tensors: dense tensors of any dtype, shape and strides, with the same shapes, dtypes and kinds of device in
            the same order on all workers; changed in place, outside autograd.
        group: the workers.
        source_rank: whose values count.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`. One copy of at most 32 MiB is held beside the tensors.

    Example:
        >>> broadcast_tensors([torch.tensor([7])], Group.single())
    """
    if group.world_size == 1:
        return
    waiting: dict[str, list[Tensor]] = {}
    held: dict[str, int] = {}
    with torch.no_grad(), group.collective("broadcast of tensors"):
        for tensor in tensors:
            for piece in _pieces(_storable(tensor.detach())):
                if _n_bytes(piece) >= _SMALL_BYTES:
                    _send_large(piece, group, source_rank)
                    continue
                kind = piece.device.type
                pack = waiting.setdefault(kind, [])
                if held.get(kind, 0) + _padded(piece) > _PIECE_BYTES:
                    _send_packed(pack, group, source_rank)
                    pack.clear()
                    held[kind] = 0
                pack.append(piece)
                held[kind] = held.get(kind, 0) + _padded(piece)
        for pack in waiting.values():
            _send_packed(pack, group, source_rank)


def _storable(tensor: Tensor) -> Tensor:
    """Return a view in which every element has its own memory: expanded dimensions are cut to one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor along its leading dimensions; a contiguous one gives contiguous pieces."""
    if tensor.numel() == 0:
        return
    if _n_bytes(tensor) <= _PIECE_BYTES:
        yield tensor
        return
    dim = next(d for d, size in enumerate(tensor.shape) if size > 1)
    rows = max(1, _PIECE_BYTES * tensor.shape[dim] // _n_bytes(tensor))
    for part in torch.split(tensor, rows, dim):
        yield from _pieces(part)


def _send_large(piece: Tensor, group: Group, source_rank: int) -> None:
    plain = not (piece.is_conj() or piece.is_neg())
    if plain and piece.is_contiguous():
        _send(piece.view(-1).view(torch.uint8), group, source_rank)
    else:
        flat = piece.resolve_conj().resolve_neg().contiguous()
        _send(flat.view(-1).view(torch.uint8), group, source_rank)
        if group.rank != source_rank:
            piece.copy_(flat)


def _send_packed(pieces: Sequence[Tensor], group: Group, source_rank: int) -> None:
    if not pieces:
        return
    buffer = torch.empty(sum(map(_padded, pieces)), dtype=torch.uint8, device=pieces[0].device)
    views = []
    at = 0
    for piece in pieces:
        views.append(buffer[at : at + _n_bytes(piece)].view(piece.dtype).view(piece.shape))
        at += _padded(piece)
    is_source = group.rank == source_rank
    if is_source:
        torch._foreach_copy_(views, list(pieces))
    _send(buffer, group, source_rank)
    if not is_source:
        torch._foreach_copy_(list(pieces), views)


def _send(flat: Tensor, group: Group, source_rank: int) -> None:
    dist.broadcast(flat, group=group.process_group, group_src=source_rank)


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _padded(tensor: Tensor) -> int:
    return math.ceil(_n_bytes(tensor) / _ALIGN) * _ALIGN
