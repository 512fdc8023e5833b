"""Nearest centroid of each row: a fast guess with a bound of its error, float64 where that leaves a choice.

The score of row x for centroid c is |c|^2 / 2 - x c, which orders the centroids as the distance does. Scores are
first computed in bfloat16 on matrix tiles or in float32, whatever is fast here, with a proven bound of their
error. A centroid whose score is above the smallest by more than twice that bound cannot be the nearest. Mostly
one is left; otherwise those that are left are scored in float64, in a fixed order, ties to the lowest index. So
the code of a row hangs on the row and on the centroids alone: not on blocks, threads, the processor, or the way.

::

    tiles   ss_search: rows and table in bfloat16                    |kept| |left out| bound the error
    scan    torch's product in float32, then ss_scan, ss_settle      dim x 2^-24 |x| |c|
    torch   torch's product, numpy's argmin twice, float64 by torch  the same
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.kmeans._native import Kernels, address, kernels, zeros
from samestep.kmeans._points import BLOCK_ROWS

__all__ = ["Codes", "Nearest", "exact_scores"]

Codes = npt.NDArray[np.int32]
Way = Literal["tiles", "scan", "torch"]

_PANEL = 512
_PAIRS = 1 << 14
_LANES = 8


class Nearest:
    """Search among fixed centroids, with room to work in for each thread.

    Args:
        table: (n_centroids, dim) float32, in the frame of the rows to come.
        n_threads: how many threads will search.
        way: how the guess is made; the fastest at hand by default.
    """

    def __init__(self, table: Tensor, n_threads: int, way: Way | None = None) -> None:
        self._kernels = kernels() if way != "torch" else None
        self._table = table.contiguous()
        # In parts: float64 copies of a large table would be most of a fit's memory.
        starts = range(0, self._table.shape[0], _PANEL)
        parts = (self._table[start : start + _PANEL].double() for start in starts)
        exact = 0.5 * torch.cat([_in_order(part, part) for part in parts])
        self._same_as_earlier(exact)
        self._exact = exact
        self._way: Way = way or _fastest(self._kernels)
        if self._way == "tiles":
            assert self._kernels is not None
            self._tiles = _Tiles(self._kernels, self._table, exact, n_threads)
        else:
            self._panels = _Panels(self._table, exact, n_threads)

    def codes(self, rows: Tensor, thread: int = 0) -> Codes:
        """Return (n_rows,) int32 codes of prepared rows; any number of rows."""
        rows = rows.contiguous()
        codes = np.empty(rows.shape[0], dtype=np.int32)
        if self._way == "tiles":
            self._tiles.search(rows, thread, codes)
            return codes
        for begin in range(0, rows.shape[0], BLOCK_ROWS):
            block = rows[begin : begin + BLOCK_ROWS]
            codes[begin : begin + BLOCK_ROWS] = (
                self._scan(block, thread) if self._way == "scan" else self._by_torch(block, thread)
            )
        return codes

    def _scan(self, block: Tensor, thread: int) -> Codes:
        found, n_rows = self._kernels, block.shape[0]
        assert found is not None
        known = zeros(n_rows * found.ss_row_bytes())
        for base, scores, slack in self._panels.scores(block, thread):
            found.ss_scan(address(scores), n_rows, scores.shape[1], base, address(slack), address(known))
        codes = np.empty(n_rows, dtype=np.int32)
        found.ss_settle(
            address(block), n_rows, block.shape[1], address(self._table), self._table.shape[0],
            address(self._exact), address(known), address(codes),
        )  # fmt: skip
        return codes

    def _by_torch(self, block: Tensor, thread: int) -> Codes:
        n_rows = block.shape[0]
        every = np.arange(n_rows)
        upper = np.full(n_rows, np.inf, dtype=np.float32)
        found: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float32]]] = []
        for base, panel, gap in self._panels.scores(block, thread):
            # numpy's argmin is vectorized, torch's on CPU is not; the view shares the buffer.
            scores, slack = panel.numpy(), gap.numpy()
            first = scores.argmin(axis=1)
            least = scores[every, first]
            upper = np.minimum(upper, least + slack)
            limit = upper + slack
            scores[every, first] = np.inf
            several = np.flatnonzero(scores.min(axis=1) <= limit)
            scores[every, first] = least
            rows, columns = np.nonzero(scores[several] <= limit[several, None])
            alone = np.setdiff1d(np.flatnonzero(least <= limit), several, assume_unique=True)
            found.append((alone, base + first[alone], least[alone] - slack[alone]))
            rows = several[rows]
            found.append((rows, base + columns, scores[rows, columns] - slack[rows]))
        rows, centroids, lower = (np.concatenate(parts) for parts in zip(*found))
        kept = lower <= upper[rows]
        return self._settle(block, rows[kept], centroids[kept])

    def _settle(self, block: Tensor, rows: npt.NDArray[np.intp], centroids: npt.NDArray[np.intp]) -> Codes:
        """Choose for each row among its candidates, of which it has at least one."""
        codes = np.empty(block.shape[0], dtype=np.int32)
        counts = np.bincount(rows, minlength=block.shape[0])
        alone = counts[rows] == 1
        codes[rows[alone]] = centroids[alone]
        rows, centroids = rows[~alone], centroids[~alone]
        scores = np.empty(len(rows))
        for begin in range(0, len(rows), _PAIRS):
            part = slice(begin, begin + _PAIRS)
            left = block[torch.from_numpy(rows[part])]
            right = torch.from_numpy(centroids[part])
            scores[part] = exact_scores(left, self._table[right], self._exact[right]).numpy()
        order = np.lexsort((centroids, scores, rows))
        firsts = np.flatnonzero(np.diff(rows[order], prepend=-1))
        codes[rows[order[firsts]]] = centroids[order[firsts]]
        return codes

    def _same_as_earlier(self, exact: Tensor) -> None:
        """Put centroids that equal an earlier one out of reach: otherwise every row near them had to be settled."""
        if len(np.unique(exact.numpy())) == len(exact):
            return
        _, first = np.unique((self._table + 0.0).numpy(), axis=0, return_index=True)
        copies = np.ones(len(exact), dtype=bool)
        copies[first] = False
        exact[torch.from_numpy(copies)] = torch.inf


def exact_scores(rows: Tensor, centroids: Tensor, half: Tensor) -> Tensor:
    """Return (n_pairs,) float64 scores half - row * centroid, products exact, added in a fixed order.

    Args:
        rows: (n_pairs, dim) float32.
        centroids: (n_pairs, dim) float32.
        half: (n_pairs,) float64, |centroid|^2 / 2.
    """
    return half - _in_order(rows.double(), centroids.double())


class _Tiles:
    """The table in bfloat16, and room to work in."""

    def __init__(self, found: Kernels, table: Tensor, exact: Tensor, n_threads: int) -> None:
        self._kernels, self._table, self._exact = found, table, exact
        n, dim = table.shape
        self._padded = -(-dim // 32) * 32
        wide = -(-n // 32) * 32
        self._packed = np.zeros(wide * self._padded, dtype=np.uint16)
        norms = np.zeros((wide, 2), dtype=np.float32)
        found.ss_pack(address(table), n, dim, self._padded, address(self._packed), address(norms))
        self._half = np.full(wide, np.inf, dtype=np.float32)
        self._half[:n] = exact.numpy()
        finite = np.where(np.isfinite(self._half), self._half, 0.0)
        self._limits = np.zeros((-(-n // _PANEL), 3), dtype=np.float32)
        for number, limit in enumerate(self._limits):
            part = slice(number * _PANEL, (number + 1) * _PANEL)
            limit[:] = norms[part, 0].max(), norms[part, 1].max(), finite[part].max()
        self._limits *= 1.001
        self._scratch = [zeros(found.ss_scratch(self._padded)) for _ in range(n_threads)]

    def search(self, rows: Tensor, thread: int, codes: Codes) -> None:
        """Write the codes of contiguous rows."""
        self._kernels.ss_search(
            address(rows), rows.shape[0], rows.shape[1], self._padded, address(self._table), self._table.shape[0],
            address(self._packed), address(self._half), address(self._exact), address(self._limits),
            address(self._scratch[thread]), address(codes),
        )  # fmt: skip


class _Panels:
    """Scores in float32, up to 512 centroids at a time, in a buffer that stays in the cache."""

    def __init__(self, table: Tensor, exact: Tensor, n_threads: int) -> None:
        half = exact.float()
        finite = torch.where(half.isfinite(), half, torch.zeros(()))
        norms = torch.linalg.vector_norm(table, dim=1, dtype=torch.float64).float()
        # Any order of adding; the factor covers the rounding of the bound itself.
        self._share = 1.01 * (table.shape[1] + 4) * 2.0**-24
        self._panels = [
            (
                begin,
                table[begin : begin + _PANEL].neg().t().contiguous(),
                half[begin : begin + _PANEL],
                float(norms[begin : begin + _PANEL].max()),
                float(finite[begin : begin + _PANEL].max()),
            )
            for begin in range(0, table.shape[0], _PANEL)
        ]
        width = min(_PANEL, table.shape[0])
        self._buffers = [torch.empty(BLOCK_ROWS * width) for _ in range(n_threads)]

    def scores(self, block: Tensor, thread: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield for each panel its first centroid, (n_rows, width) scores, and (n_rows,) bounds of their error."""
        lengths = block.square().sum(1).sqrt()
        for begin, panel, half, norm, largest in self._panels:
            scores = self._buffers[thread][: block.shape[0] * half.shape[0]].view(
                block.shape[0], half.shape[0]
            )
            torch.addmm(half, block, panel, out=scores)
            yield begin, scores, (lengths * norm + largest) * self._share + 2.0**-100


def _fastest(found: Kernels | None) -> Way:
    if found is None:
        return "torch"
    return "tiles" if found.has_tiles else "scan"


def _in_order(left: Tensor, right: Tensor) -> Tensor:
    """Return (n,) sums of left * right along rows, in the order of the kernels: eight lanes, then their sum."""
    n, dim = left.shape
    products = torch.zeros(n, -(-dim // _LANES) * _LANES, dtype=torch.float64)
    products[:, :dim] = left * right
    lanes = torch.zeros(n, _LANES, dtype=torch.float64)
    for part in products.view(n, -1, _LANES).unbind(1):
        lanes += part
    a = lanes.unbind(1)
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
