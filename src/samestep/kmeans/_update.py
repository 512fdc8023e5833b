"""Sums of rows by code that do not depend on the order, so neither on the split over workers nor on threads.

Each value is rounded once to a grid on which every partial sum is exact in float64. Exact sums can also be
corrected: a row that changes its code is subtracted here and added there, and the sums stay those of a fresh
start. Late in a run few rows move, and an update costs next to nothing.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.kmeans._frame import rounding_term
from samestep.kmeans._native import address, kernels
from samestep.pooling import Pool

__all__ = ["ExactSums", "exact_total", "grid_weights", "pool_beside", "pool_exact"]

_BUDGET_BYTES = 1 << 25
_POOL_ELEMENTS = 1 << 20
_PART_ELEMENTS = 1 << 17


class ExactSums:
    """(n_centroids, dim) float64 sums of weighted rows.

    Args:
        n_centroids: rows of the table.
        dim: columns of the table.
        max_abs: largest |weight * value| over all workers.
        n_points: rows of all workers.
        n_threads: threads that will move rows.
    """

    def __init__(self, n_centroids: int, dim: int, max_abs: float, n_points: int, n_threads: int) -> None:
        size = max(n_centroids * dim * 8, 1)
        n_tables = min(max(_BUDGET_BYTES // size, 1), n_threads)
        self._tables = [torch.zeros(n_centroids, dim, dtype=torch.float64) for _ in range(n_tables)]
        self._locks = [threading.Lock() for _ in range(n_tables)]
        self._term = rounding_term(max_abs, n_points)
        self._part = max(_PART_ELEMENTS // dim, 16)

    def move(
        self,
        rows: Tensor,
        old: npt.NDArray[np.int32],
        new: npt.NDArray[np.int32],
        weights: Tensor | None,
        thread: int,
    ) -> int:
        """Take rows out of the sums of their old codes, add them to the new ones; return how many moved.

        Args:
            rows: (n_rows, dim) float32, prepared.
            old: (n_rows,) codes they are counted under, -1 for none.
            new: (n_rows,) codes to count them under.
            weights: (n_rows,) float64 or None.
            thread: picks the table.
        """
        table, lock = self._tables[thread % len(self._tables)], self._locks[thread % len(self._tables)]
        found = kernels()
        if found is not None:
            rows, old, new = rows.contiguous(), np.ascontiguousarray(old), np.ascontiguousarray(new)
            with lock:
                n_moved: int = found.ss_move(
                    address(rows), rows.shape[0], rows.shape[1], address(old), address(new), address(weights),
                    self._term, address(table),
                )  # fmt: skip
            return n_moved
        moved = np.flatnonzero(old != new)
        for begin in range(0, len(moved), self._part):
            part = moved[begin : begin + self._part]
            index = torch.from_numpy(part)
            values = rows[index].double() if len(part) < rows.shape[0] else rows.double()
            if weights is not None:
                values.mul_(weights[index].unsqueeze(1))
            values.add_(self._term).sub_(self._term)
            before = old[part]
            known = np.flatnonzero(before >= 0)
            with lock:
                table.index_add_(0, torch.from_numpy(new[part].astype(np.int64)), values)
                if len(known):
                    out = values if len(known) == len(part) else values[torch.from_numpy(known)]
                    table.index_add_(0, torch.from_numpy(before[known].astype(np.int64)), out, alpha=-1)
        return len(moved)

    def total(self, pool: Pool) -> Tensor:
        """Return the (n_centroids, dim) float64 sums over all workers; the tables keep counting.

        Collective: all workers call it.
        """
        return self.total_beside(pool, torch.empty(0, dtype=torch.int64))[0]

    def total_beside(self, pool: Pool, beside: Tensor) -> tuple[Tensor, Tensor]:
        """As `total`, with figures that are summed, too.

        Args:
            pool: all workers.
            beside: (n,) int64 figures that travel in the same message.

        Returns:
            The sums, and the sums of `beside`.

        Collective: all workers call it.
        """
        first = self._tables[0]
        for other in self._tables[1:]:
            first += other
            other.zero_()
        return pool_beside(first, self._term, pool, beside)


def grid_weights(weights: Tensor, max_weight: float, n_points: int) -> Tensor:
    """Round (n_points,) float64 weights to a grid on which their sums are exact."""
    term = rounding_term(max_weight, n_points)
    return (weights + term) - term


def exact_total(values: Tensor, term: float) -> Tensor:
    """Return the (1,) float64 sum of values, each rounded to the grid of `term`."""
    return ((values + term) - term).sum().reshape(1)


def pool_exact(sums: Tensor, term: float, pool: Pool) -> Tensor:
    """Return float64 sums over all workers of exact sums on the grid of `term`.

    As integers, so that any transport may add them in any order.

    Collective: all workers call it.
    """
    return pool_beside(sums, term, pool, torch.empty(0, dtype=torch.int64))[0]


def pool_beside(sums: Tensor, term: float, pool: Pool, beside: Tensor) -> tuple[Tensor, Tensor]:
    """As `pool_exact`, with int64 figures that travel in the same message; returns both sums.

    Collective: all workers call it.
    """
    unit = term / 1.5 * 2.0**-52
    # numpy counts nothing as integers, so a worker without rows may bring another dtype.
    out = torch.empty_like(sums, dtype=torch.float64)
    flat, given = out.view(-1), sums.reshape(-1)
    for begin in range(0, max(given.numel(), 1), _POOL_ELEMENTS):
        # In parts, since integers, their sum and the result would triple the memory of a large table.
        part = slice(begin, begin + _POOL_ELEMENTS)
        numbers = (given[part] / unit).long()
        if begin == 0 and len(beside):
            both = pool(torch.cat([beside, numbers]))
            beside, numbers = both[: len(beside)], both[len(beside) :]
        else:
            numbers = pool(numbers)
        flat[part] = numbers.double().mul_(unit)
    return out, beside
