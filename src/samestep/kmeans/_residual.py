"""What is left of rows after some levels of codebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from samestep.kmeans._assign import Assigner
from samestep.kmeans._points import CACHE_BYTES, Points, as_points, each_piece, together
from samestep.kmeans._search import Codes
from samestep.pooling import Pool

__all__ = ["Chain", "keep_small", "remover", "square_norms"]


class Chain:
    """Walks raw rows down the levels.

    Args:
        levels: (n_centroids, dim) float32 each.
        offset: (dim,) float32, taken off first.
        normalize: divide each level's input by its norm.
        n_threads: how many threads will walk.
    """

    def __init__(self, levels: Sequence[Tensor], offset: Tensor, normalize: bool, n_threads: int) -> None:
        self._levels = levels
        self._offset = offset
        self._normalize = normalize
        self._searches = [Assigner(table, n_threads) for table in levels]

    def base(self, rows: Tensor) -> Tensor:
        """Return (n_rows, dim) float32 input of level 0."""
        if rows.shape[1] != self._offset.shape[0]:
            raise ValueError(f"`points`: expected dim {self._offset.shape[0]}, got {rows.shape[1]}.")
        if rows.dtype is torch.float64:
            left = (rows - self._offset.double()).float()
        else:
            left = rows.float() - self._offset
        return _unit(left) if self._normalize else left

    def walk(self, rows: Tensor, start: int, thread: int) -> list[tuple[Codes, Tensor, Tensor]]:
        """Return for each level (codes, its input, what it leaves)."""
        out: list[tuple[Codes, Tensor, Tensor]] = []
        left = self.base(rows)
        for search, table in zip(self._searches, self._levels):
            codes = search.codes(left, start, thread)
            rest = _rest(left, table, codes)
            out.append((codes, left, rest))
            left = _unit(rest) if self._normalize else rest
        return out


def remover(table: Tensor, codes: Codes, normalize: bool) -> Callable[[int, Tensor], Tensor]:
    """Return a transform of rows into what a level leaves of them, by codes known already."""

    def remove(start: int, rows: Tensor) -> Tensor:
        rest = _rest(rows, table, codes[start : start + rows.shape[0]])
        return _unit(rest) if normalize else rest

    return remove


def keep_small(points: Points, n_rows: int, dim: int, pool: Pool, n_threads: int) -> Points:
    """Hold this worker's rows in memory when they are few; else they are made again in each pass.

    Collective: all workers call it.
    """
    kept: list[Tensor] = []

    def read() -> None:
        if n_rows * dim * 4 > CACHE_BYTES:
            return
        table = torch.empty(n_rows, dim)

        def keep(_: int, start: int, rows: Tensor) -> None:
            table[start : start + rows.shape[0]] = rows

        each_piece(points, keep, n_threads)
        kept.append(table)

    together(pool, read)
    return as_points(kept[0]) if kept else points


def square_norms(rows: Tensor) -> Tensor:
    """Return (n_rows,) float64 squared norms, added in the order of the columns."""
    return rows.double().square().cumsum(1)[:, -1]


def _rest(rows: Tensor, table: Tensor, codes: Codes) -> Tensor:
    return rows - table[torch.from_numpy(codes.astype(np.int64))]


def _unit(rows: Tensor) -> Tensor:
    """Divide rows by their norms; a row of zeros stays."""
    largest = rows.abs().amax(1, keepdim=True).double().clamp_min(1e-300)
    scaled = rows.double() / largest
    return (scaled / scaled.square().cumsum(1)[:, -1:].sqrt().clamp_min(1e-300)).float()
