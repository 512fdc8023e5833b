"""Sums over the rows of all workers that do not depend on their order, so neither on how the rows are split."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._frame import Survey, survey
from samestep.kmeans._points import Points, as_points, each_piece, together
from samestep.pooling import Pool

__all__ = ["checked", "column_sums", "cross_moments", "moments"]

_MOMENT_ROWS = 8192


def checked(points: object, pool: Pool) -> tuple[Points, Survey]:
    """Return rows that were found fit on all workers, and their figures.

    Raises:
        SpecError: on all workers: no row at all, dims or dtypes that differ, a row that is not finite.

    Collective: all workers call it.
    """
    found: list[Points] = []
    together(pool, lambda: found.append(as_points(points)))
    rows = survey(found[0], None, pool, 1)
    if rows.n_points == 0:
        raise SpecError("`points`: expected at least one row, got 0 on all workers.", name="points")
    return found[0], rows


def column_sums(
    points: Points, value: Callable[[Tensor], Tensor], dim: int, n_points: int, pool: Pool
) -> Tensor:
    """Return (dim,) float64 sums over all workers of `value(rows)`, in two grids: about 70 bits below the largest.

    Args:
        points: this worker's rows.
        value: (n_rows, n_columns) float64 rows to (n_rows, dim) float64 terms, each from its row alone.
        dim: columns of the terms.
        n_points: rows of all workers.
        pool: all workers.

    Collective: all workers call it.
    """
    largest = torch.zeros(dim, dtype=torch.float64)

    def look(_: int, start: int, rows: Tensor) -> None:
        if rows.shape[0]:
            torch.maximum(largest, value(rows.double()).abs().amax(0), out=largest)

    together(pool, lambda: each_piece(points, look, 1))
    exponent = np.maximum(np.frexp(pool(largest, "max").numpy())[1], -800)
    n_bits = n_points.bit_length() + 2
    # A sum of up to 4 * n_points multiples of the unit is exact; what was cut off is summed in a second grid.
    exponents = np.stack([exponent + (n_bits - 52), exponent + 2 * (n_bits - 52)])
    units = torch.from_numpy(np.ldexp(1.0, exponents))
    sums = torch.zeros(2, dim, dtype=torch.int64)

    def add(_: int, start: int, rows: Tensor) -> None:
        rest = value(rows.double())
        for grid, unit in enumerate(units):
            whole = (rest / unit).round()
            sums[grid] += whole.sum(0).long()
            rest = rest - whole * unit

    together(pool, lambda: each_piece(points, add, 1))
    both: Tensor = pool(sums).double() * units
    return both[0] + both[1]


def moments(points: Points, rows: Survey, pool: Pool) -> tuple[Tensor, Tensor]:
    """Return (dim,) float64 mean and sum of squared deviations from it, over all workers.

    Collective: all workers call it.
    """
    mean = column_sums(points, lambda part: part, rows.dim, rows.n_points, pool) / rows.n_points
    squares = column_sums(points, lambda part: (part - mean).square(), rows.dim, rows.n_points, pool)
    return mean, squares


def cross_moments(points: object, center: Tensor, n_points: int, pool: Pool) -> tuple[Tensor, Tensor, float]:
    """Return int64 sums of rows - center and of their outer products, over all workers, and the grid's unit.

    Args:
        points: this worker's rows, finite; any form that `kmeans.fit` takes; may be none.
        center: (dim,) float64, equal on all workers.
        n_points: rows of all workers.
        pool: all workers.

    Returns:
        (dim,) sums in units, (dim, dim) sums of products in units squared, and the unit.

    Collective: all workers call it.
    Numerics: order-free; the unit is at most 2**-20 of the largest entry.

    Example:
        >>> from samestep.pooling import alone
        >>> total, products, unit = cross_moments(
        ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2).double(), 2, alone
        ... )
        >>> (total * unit).tolist(), (products * unit**2).tolist()
        ([4.0, 6.0], [[10.0, 14.0], [14.0, 20.0]])
    """
    source = as_points(points)
    largest = torch.zeros(1, dtype=torch.float64)

    def look(_: int, start: int, rows: Tensor) -> None:
        if rows.numel():
            torch.maximum(largest, (rows.double() - center).abs().max(), out=largest)

    together(pool, lambda: each_piece(source, look, 1))
    # Products of two grid values, summed over a block in float64 and over all rows in int64, must stay exact.
    bits = min((53 - _MOMENT_ROWS.bit_length()) // 2, (62 - n_points.bit_length()) // 2)
    unit = math.ldexp(1.0, math.frexp(float(pool(largest, "max")))[1] - bits)
    dim = center.shape[0]
    total = torch.zeros(dim, dtype=torch.int64)
    products = torch.zeros(dim, dim, dtype=torch.int64)

    def add(_: int, start: int, rows: Tensor) -> None:
        nonlocal total, products
        for begin in range(0, len(rows), _MOMENT_ROWS):
            whole = ((rows[begin : begin + _MOMENT_ROWS].double() - center) / unit).round()
            total += whole.sum(0).long()
            products += (whole.T @ whole).long()

    together(pool, lambda: each_piece(source, add, 1))
    return pool(total), pool(products), unit
