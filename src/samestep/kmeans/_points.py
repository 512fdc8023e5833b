"""Rows to cluster, whatever holds them: tensor, array, memmap, or chunks that can be read again and again.

A pass over the rows is a pass over *pieces*: up to a few thousand consecutive rows, small enough that a converted
copy stays in the processor's cache. Threads take pieces one after the other; nothing that is computed from a row
may depend on the piece it came in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.pooling import Pool

__all__ = [
    "BLOCK_ROWS",
    "CACHE_BYTES",
    "Points",
    "Transform",
    "as_points",
    "each_piece",
    "raise_together",
    "together",
]

BLOCK_ROWS = 1024
CACHE_BYTES = 1 << 29
_PIECE_ELEMENTS = 1 << 21

Transform = Callable[[int, Tensor], Tensor]

_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Points:
    """Rows on this worker, read in pieces of consecutive rows.

    Args:
        chunks: called for each pass; yields arrays or tensors of shape (chunk_rows, dim), in the same order.
        transform: turns (first row, rows as stored) into the rows that count; called by the thread that works
            on them. None leaves them as they are.
    """

    def __init__(self, chunks: Callable[[], Iterator[Any]], transform: Transform | None = None) -> None:
        self._chunks = chunks
        self._transform = transform

    def mapped(self, transform: Transform) -> Points:
        """Return these rows after one more transform, applied whenever they are read."""
        inner = self.transformed
        return Points(self._chunks, lambda start, rows: transform(start, inner(start, rows)))

    def transformed(self, start: int, rows: Tensor) -> Tensor:
        """Return the rows that count, from those as stored."""
        return rows if self._transform is None else self._transform(start, rows)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of the first row on this worker, rows as they are stored)."""
        start = 0
        for chunk in self._chunks():
            if chunk.ndim != 2:
                raise ValueError(
                    f"`points`: expected rows of shape (n_points, dim), got {tuple(chunk.shape)}."
                )
            size = _piece_rows(chunk.shape[1])
            for begin in range(0, max(chunk.shape[0], 1), size):
                rows = _as_tensor(chunk[begin : begin + size])
                yield start, rows
                start += rows.shape[0]


def as_points(source: object) -> Points:
    """Wrap what the user passed.

    Args:
        source: (n_points, dim) float tensor, array or memmap, or an iterable of such chunks that can be
            iterated again (a list, a data loader, an object with ``__iter__``).

    Returns:
        The same rows as `Points`; nothing is copied.

    Raises:
        TypeError: for anything else, also for an iterator, which can be read only once.

    Example:
        >>> [rows.shape for _, rows in as_points(torch.zeros(3, 2)).pieces()]
        [torch.Size([3, 2])]
    """
    if isinstance(source, Points):
        return source
    if isinstance(source, Tensor):
        rows = source.detach()
        return Points(lambda: iter((rows,)))
    if isinstance(source, np.ndarray):
        return Points(lambda: iter((source,)))
    if isinstance(source, Iterable):
        if iter(source) is source:
            raise TypeError(
                "`points`: expected chunks that can be read again in each pass, got an iterator, which can be "
                "read once. Pass a list, or an object whose `__iter__` starts anew."
            )
        return Points(lambda: map(_as_chunk, source))
    raise TypeError(f"`points`: expected a tensor, an array or chunks of rows, got {type(source).__name__}.")


def each_piece(points: Points, work: Callable[[int, int, Tensor], None], n_threads: int) -> None:
    """Call `work(thread, first_row, rows)` for each piece, from several threads with one torch thread each.

    Args:
        points: the rows.
        work: called once for each piece; the first argument is 0 .. n_threads-1.
        n_threads: threads that take pieces, the caller's own among them.
    """
    pieces, lock = points.pieces(), threading.Lock()
    failures: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            torch.set_num_threads(1)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                while not failures:
                    with lock:
                        piece = next(pieces, None)
                    if piece is None:
                        return
                    start, rows = piece
                    work(thread, start, points.transformed(start, rows))
        except BaseException as error:
            failures.append(error)

    n_torch_threads = torch.get_num_threads()
    others = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(1, n_threads)]
    try:
        for other in others:
            other.start()
        run(0)
        for other in others:
            other.join()
    finally:
        torch.set_num_threads(n_torch_threads)
    if failures:
        raise failures[0]


def together(pool: Pool, work: Callable[[], None]) -> None:
    """Run this worker's part; when it fails on any worker, all raise the same `SpecError`.

    Args:
        pool: all workers.
        work: local, calls no collective.

    Collective: all workers call it.
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    raise_together(pool, failure)


def raise_together(pool: Pool, failure: Exception | None) -> None:
    """Raise the same `SpecError` on all workers when this worker's part failed on any; else return.

    Args:
        pool: all workers.
        failure: what this worker's part raised, or None.

    Collective: all workers call it.
    """
    message = "" if failure is None else str(failure) or type(failure).__name__
    try:
        pool.agree(failure is None, message)
    except ValueError as common:
        raise common from failure


def _as_tensor(rows: Any) -> Tensor:
    if isinstance(rows, Tensor):
        tensor = rows.detach()
    else:
        array = np.asarray(rows)
        if array.dtype.kind == "f" and (not array.dtype.isnative or not array.flags.writeable):
            # torch cannot share foreign byte order, and warns about read-only memory (a memmap).
            array = array.astype(array.dtype.newbyteorder("="), copy=True)
        if array.dtype.kind != "f" or array.dtype.itemsize > 8:
            raise TypeError(f"`points`: expected float rows, got {array.dtype}. Convert them to float32.")
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"`points`: expected float rows, got {tensor.dtype}. Convert them to float32.")
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _as_chunk(chunk: Any) -> Any:
    return chunk if isinstance(chunk, (Tensor, np.ndarray)) else np.asarray(chunk)


def _piece_rows(dim: int) -> int:
    blocks = _PIECE_ELEMENTS // (BLOCK_ROWS * max(dim, 1))
    return BLOCK_ROWS * min(max(blocks, 1), 16)
