"""What all rows have in common: how many, how large, where their mean is; and the frame to compute in.

Distances by |x|^2 + |c|^2 - 2 x c lose all digits when the rows sit far from the origin, and squares leave the
range of float32 beyond 1e19. So rows are moved to their mean when it matters, and scaled by a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._points import Points, each_piece, together
from samestep.pooling import Pool

__all__ = ["Frame", "Survey", "centroid_frame", "frame_of", "rounding_term", "survey"]

_SAFE_EXPONENT = 30
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Frame:
    """Where distances are computed: row -> (row - mean) * scale in float32, after division by its norm if asked."""

    mean: Tensor | None  # (dim,) float64
    scale: float = 1.0
    normalize: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether rows are used as they are, so that float32 needs no copy."""
        return self.mean is None and self.scale == 1.0 and not self.normalize

    def prepare(self, rows: Tensor) -> Tensor:
        """Return (n_rows, dim) float32 rows in this frame; each row's bits depend on that row alone."""
        if self.is_plain:
            return rows.float().contiguous()
        exact = rows.double()
        if self.normalize:
            exact = exact / exact.abs().amax(1, keepdim=True)
            exact = exact / exact.square().cumsum(1)[:, -1:].sqrt()
        if self.mean is not None:
            exact = exact - self.mean
        return exact.mul_(self.scale).float() if exact is not rows else (exact * self.scale).float()

    def restore(self, prepared: Tensor) -> Tensor:
        """Return float64 rows in the user's units."""
        rows = prepared.double() / self.scale
        return rows if self.mean is None else rows + self.mean


@dataclass(frozen=True)
class Survey:
    """Figures over the rows of all workers; equal on all of them."""

    n_points: int
    n_local: int
    offset: int
    dim: int
    dtype: torch.dtype
    max_abs: float
    total_weight: float
    mean: Tensor  # (dim,) float64, weighted
    spread: float  # sum of weight * |x - mean|^2


def survey(
    points: Points, weights: Tensor | None, pool: Pool, n_threads: int, *, nonzero: bool = False
) -> Survey:
    """Read all rows twice, check them, and return what the workers hold together.

    Args:
        points: this worker's rows, may be none.
        weights: (n_points,) float64, checked already, or None for 1 each.
        pool: all workers.
        n_threads: threads for the passes.
        nonzero: refuse rows that are all zero, which have no direction.

    Raises:
        SpecError: on all workers, when the rows differ in dim or dtype or are not finite; names the row.

    Collective: all workers call it.
    """
    local = _Local()
    together(pool, lambda: local.read(points, n_threads, nonzero))
    dim, dtype = _common_shape(local, pool)
    offset = pool.offset(local.n_rows)
    bad = local.first_bad
    fault = "a value that is not finite" if not local.bad_is_zero else "only zeros, which have no direction"
    pool.agree(
        bad is None,
        f"`points`: expected finite rows, got {fault} in row {offset + (bad or 0)} "
        f"(row {bad} on this worker). Remove or repair it.",
    )
    if weights is not None:
        together(pool, lambda: _check_length(weights, local.n_rows))
    n_points = int(pool(torch.tensor([local.n_rows]))[0])
    max_weight = 0.0 if weights is None or weights.numel() == 0 else float(weights.max())
    extremes = pool(torch.tensor([local.max_abs, max_weight], dtype=torch.float64), "max")
    max_abs, max_weight = float(extremes[0]), 1.0 if weights is None else float(extremes[1])
    exponent = math.frexp(max_abs)[1] if max_abs > 0 else 0
    moments = _Moments(dim, n_points, max_weight, exponent, n_threads)
    together(pool, lambda: each_piece(points, moments.reader(weights), n_threads))
    first, second, weight = (pool(part) for part in moments.totals())
    total = float(weight[0])
    if weights is not None and n_points > 0 and total <= 0:
        raise SpecError("`weights`: expected a positive sum, got 0 over all workers.", name="weights")
    mean = first / max(total, math.ulp(0.0)) if total else first
    spread = float(np.maximum((second - total * mean.square()).numpy(), 0.0).sum())
    unit = math.ldexp(1.0, exponent)
    return Survey(
        n_points, local.n_rows, offset, dim, dtype, max_abs, total, mean * unit, _product(spread, unit, unit)
    )


def frame_of(rows: Survey, *, spherical: bool = False) -> Frame:
    """Choose the frame from figures that all workers share: centre when the mean outweighs the spread."""
    if spherical:
        return Frame(None, 1.0, normalize=True)
    variance = rows.spread / rows.total_weight if rows.total_weight > 0 else 0.0
    return _choose(rows.mean, variance, rows.max_abs)


def centroid_frame(centroids: Tensor) -> Frame:
    """Choose the frame from centroids alone, so that a point's code depends on them and on that point only."""
    table = centroids.double().numpy()
    mean = table.mean(0)
    variance = float(np.square(table - mean).sum(1).mean()) if np.isfinite(np.square(table).sum()) else 0.0
    return _choose(torch.from_numpy(mean), variance, float(np.abs(table).max(initial=0.0)))


def rounding_term(max_abs: float, n_terms: int) -> float:
    """Return a float64 number whose addition and subtraction rounds values onto a grid where sums are exact.

    With values up to `max_abs`, any sum of up to four times `n_terms` rounded values is exact in float64, so it
    does not depend on the order of its terms.

    Example:
        >>> term = rounding_term(1.0, 1 << 20)
        >>> a, b = (0.1 + term) - term, (0.2 + term) - term
        >>> (a + b) - b == a
        True
    """
    exponent = math.frexp(max_abs)[1] if max_abs > 0 else 0
    bits = max(n_terms, 1).bit_length() + 2
    return 1.5 * math.ldexp(1.0, exponent + bits)


class _Local:
    """First pass over this worker's rows: shape, dtype, largest value, first row that cannot be used."""

    def __init__(self) -> None:
        self.n_rows = 0
        self.dim = -1
        self.dtype: torch.dtype | None = None
        self.max_abs = 0.0
        self.first_bad: int | None = None
        self.bad_is_zero = False

    def read(self, points: Points, n_threads: int, nonzero: bool) -> None:
        found: list[tuple[int, int, torch.dtype, int, float, int | None, bool]] = []

        def look(_: int, start: int, rows: Tensor) -> None:
            low, high = rows.aminmax() if rows.numel() else (torch.zeros(()), torch.zeros(()))
            largest = max(abs(float(low)), abs(float(high)))
            bad, zero = None, False
            if not math.isfinite(largest):
                bad, largest = start + int((~rows.isfinite().all(1)).nonzero()[0, 0]), 0.0
            elif nonzero and rows.shape[0] and not bool((rows != 0).any(1).all()):
                bad, zero = start + int((~(rows != 0).any(1)).nonzero()[0, 0]), True
            found.append((start, rows.shape[0], rows.dtype, rows.shape[1], largest, bad, zero))

        each_piece(points, look, n_threads)
        found.sort(key=lambda item: item[0])
        self.n_rows = sum(item[1] for item in found)
        for _, _, dtype, dim, largest, bad, zero in found:
            if self.dim not in (-1, dim) or self.dtype not in (None, dtype):
                raise ValueError(
                    f"`points`: expected chunks alike, got dim {self.dim} {self.dtype} and dim {dim} {dtype}."
                )
            self.dim, self.dtype = dim, dtype
            self.max_abs = max(self.max_abs, largest)
            if self.first_bad is None and bad is not None:
                self.first_bad, self.bad_is_zero = bad, zero


class _Moments:
    """Second pass: exact weighted sums of the rows and of their squares, in units of 2**exponent."""

    def __init__(self, dim: int, n_points: int, max_weight: float, exponent: int, n_threads: int) -> None:
        self.term = rounding_term(max(max_weight, 1.0), n_points)
        self.unit = math.ldexp(1.0, -exponent) if exponent > -1000 else math.ldexp(1.0, 1000)
        self.parts = [
            (torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64),
             torch.zeros(1, dtype=torch.float64))
            for _ in range(n_threads)
        ]  # fmt: skip

    def reader(self, weights: Tensor | None):  # type: ignore[no-untyped-def]
        def read(thread: int, start: int, rows: Tensor) -> None:
            first, second, total = self.parts[thread]
            for begin in range(0, rows.shape[0], 256):
                part = rows[begin : begin + 256].double().mul_(self.unit) if rows.dtype != torch.float64 else (
                    rows[begin : begin + 256] * self.unit
                )  # fmt: skip
                at = start + begin
                mass = None if weights is None else weights[at : at + part.shape[0]].unsqueeze(1)
                value = part if mass is None else part * mass
                square = value * part
                first += (value + self.term).sub_(self.term).sum(0)
                second += square.add_(self.term).sub_(self.term).sum(0)
                total += part.shape[0] if mass is None else mass.add(self.term).sub_(self.term).sum()

        return read

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        first, second, total = zip(*self.parts)
        return sum(first[1:], first[0]), sum(second[1:], second[0]), sum(total[1:], total[0])


def _common_shape(local: _Local, pool: Pool) -> tuple[int, torch.dtype]:
    # A worker without rows states a dim, but its dtype says nothing.
    empty = local.n_rows == 0 or local.dtype is None
    kind = -1 if empty or local.dtype is None else _DTYPES.index(local.dtype)
    dim, number = (int(value) for value in pool(torch.tensor([local.dim, kind]), "max"))
    dtype = _DTYPES[max(number, 0)]
    alike = local.dim in (-1, dim) and (empty or local.dtype is dtype)
    pool.agree(
        alike,
        f"`points`: expected (n_points, {dim}) {dtype} as on another worker, got dim {local.dim} {local.dtype}. "
        "Give all workers rows of the same kind.",
    )
    if dim == 0:
        raise SpecError("`points`: expected dim of at least 1, got rows without columns.", name="points")
    return max(dim, 1), dtype


def _check_length(weights: Tensor, n_rows: int) -> None:
    if weights.shape[0] != n_rows:
        raise ValueError(f"`weights`: expected one for each of {n_rows} rows, got {weights.shape[0]}.")


def _choose(mean: Tensor, variance: float, max_abs: float) -> Frame:
    exponent = math.frexp(max_abs)[1] if max_abs > 0 else 0
    # A power of two changes no digit, so it costs nothing but the copy; most data need none.
    scale = 1.0 if abs(exponent) <= _SAFE_EXPONENT else math.ldexp(1.0, max(min(-exponent, 1000), -1000))
    offset = float(np.square((mean * scale).numpy()).sum())
    spread = _product(variance, scale, scale)
    return Frame(mean if offset > spread else None, scale)


def _product(value: float, first: float, second: float) -> float:
    # Python raises on overflow in ** but not here: the result is inf, which the callers can compare.
    return value * first * second
