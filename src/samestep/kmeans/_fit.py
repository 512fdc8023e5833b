"""The public fit: checks, seeds, Lloyd, and the figures of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._assign import assign_pieces, thread_count
from samestep.kmeans._balanced import balanced_codes
from samestep.kmeans._frame import Frame, Survey, frame_of, rounding_term, survey
from samestep.kmeans._lloyd import Acceleration, Empty, Problem, Progress, lloyd
from samestep.kmeans._points import Points, as_points, together
from samestep.kmeans._residual import keep_small
from samestep.kmeans._seeding import SEEDINGS, given_seeds, seeds
from samestep.kmeans._update import exact_total, grid_weights, pool_exact
from samestep.pooling import Pool, alone

__all__ = ["KMeans", "Settings", "fit", "fit_codes"]

Seeding = Literal["k-means++", "random", "k-means||"]


@dataclass(frozen=True)
class KMeans:
    """What a fit found; equal bit for bit on all workers.

    Attributes:
        centroids: (n_centroids, dim) float32, in the units of the points.
        counts: (n_centroids,) int64, points of all workers in each cell.
        inertia: sum of weight times squared distance to the own centroid.
        n_iterations: passes done.
        n_used: centroids with points; fewer than n_centroids when there are fewer distinct rows.
    """

    centroids: Tensor
    counts: Tensor
    inertia: float
    n_iterations: int
    n_used: int


@dataclass(frozen=True)
class Settings:
    """The options of `fit`, checked."""

    n_centroids: int
    seeding: Seeding | Tensor = "k-means++"
    weights: Tensor | None = None
    max_iterations: int = 25
    tolerance: float = 1e-4
    seed: int = 0
    spherical: bool = False
    balanced: bool = False
    empty: Empty = "farthest"
    acceleration: Acceleration = "none"
    n_threads: int | None = None
    progress: Progress | None = None
    seed_scale: float = 1.0

    def __post_init__(self) -> None:
        _check("n_centroids", self.n_centroids >= 1, "at least 1", self.n_centroids)
        _check("max_iterations", self.max_iterations >= 1, "at least 1", self.max_iterations)
        _check("tolerance", self.tolerance >= 0, "at least 0", self.tolerance)
        _check("empty", self.empty in ("farthest", "keep"), "'farthest' or 'keep'", self.empty)
        _check("seed_scale", 0 < self.seed_scale <= 1, "above 0 and at most 1", self.seed_scale)
        known = ("none", "overrelaxed")
        _check("acceleration", self.acceleration in known, f"one of {known}", self.acceleration)
        if not isinstance(self.seeding, Tensor):
            _check("seeding", self.seeding in SEEDINGS, f"one of {SEEDINGS} or a tensor", self.seeding)
        if self.balanced and self.weights is not None:
            raise ValueError(
                "`balanced`: expected points of equal weight, got `weights`. Leave one of them out."
            )
        thread_count(self.n_threads)


def fit(
    points: object,
    n_centroids: int,
    *,
    seeding: Seeding | Tensor = "k-means++",
    weights: Tensor | None = None,
    max_iterations: int = 25,
    tolerance: float = 1e-4,
    seed: int = 0,
    pool: Pool = alone,
    spherical: bool = False,
    balanced: bool = False,
    empty: Empty = "farthest",
    acceleration: Acceleration = "none",
    n_threads: int | None = None,
    progress: Progress | None = None,
    seed_scale: float = 1.0,
) -> KMeans:
    """Return the k-means of the rows of all workers, the same bits however the rows are split.

    Minimises the sum over rows of weight * |x - c|^2, with c the row's nearest centroid, by Lloyd's algorithm.
    Sums are exact, draws depend on global row numbers (worker 0's rows first), and every distance depends on its
    row alone; so 1 or n workers, empty ones included, any threads and any chunks give the same result.

    Args:
        points: (n_points, dim) float rows on this worker, may be empty: a tensor, an array, a memmap, or an
            iterable of such chunks that can be iterated again. Half precision is computed in float32.
        n_centroids: cells to find.
        seeding: "k-means++", "random", "k-means||", or (n_centroids, dim) seeds equal on all workers.
        weights: (n_points,) non-negative finite weights of this worker's rows; all workers or none.
        max_iterations: passes at most.
        tolerance: relative descent of the inertia in one pass below which to stop.
        seed: of all draws.
        pool: all workers; `reduce.pool(group)`, or `alone`.
        spherical: rows are divided by their norms and centroids have norm 1.
        balanced: cells of equal size; when it does not divide, the first cells take one more.
        empty: "farthest" moves a centroid without points to the farthest point, "keep" leaves it.
        acceleration: "overrelaxed" needs about half the passes; "none" is plain Lloyd.
        n_threads: threads on this worker; torch's number by default.
        progress: called on the main worker with (iterations, inertia) after each pass.
        seed_scale: drawn seeds are moved towards the mean of all rows, to this share of their distance. Where rows
            are nearly at right angles to each other, as residuals in many dimensions are, the seed of least norm is
            the nearest to nearly all rows and keeps them; 0.25 lets directions decide.

    Returns:
        Centroids, counts and inertia, which belong to the centroids returned.

    Raises:
        SpecError: on all workers alike, before long work: fewer points than centroids, a row that is not
            finite (named), dim or dtype that differ between workers.
        ValueError: when a setting is out of range.

    Collective: all workers of `pool` call it, with the same settings.
    Numerics: order-free; float32 distances, exact fixed-point sums.

    Example:
        >>> found = fit(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), 2)
        >>> sorted(found.centroids[:, 0].tolist()), found.inertia
        ([0.5, 10.5], 1.0)

    Reference: Lloyd, Least squares quantization in PCM, 1982.
    """
    settings = Settings(
        n_centroids, seeding, weights, max_iterations, tolerance, seed, spherical, balanced, empty,
        acceleration, n_threads, progress, seed_scale,
    )  # fmt: skip
    return fit_codes(as_points(points), settings, pool)[0]


def fit_codes(points: Points, settings: Settings, pool: Pool) -> tuple[KMeans, Tensor]:
    """Return the fit and the (n_points,) int32 codes of this worker's rows.

    Collective: all workers call it.
    """
    n_threads = thread_count(settings.n_threads)
    weights = _check_weights(settings.weights, pool)
    rows = survey(points, weights, pool, n_threads, nonzero=settings.spherical)
    k = settings.n_centroids
    if rows.n_points < k:
        raise SpecError(
            f"`points`: expected at least n_centroids={k} rows over all workers, got {rows.n_points}. "
            "Give more rows or ask for fewer centroids.",
            name="points",
        )
    frame = frame_of(rows, spherical=settings.spherical)
    problem = _problem(points, rows, frame, weights, pool, n_threads)
    if isinstance(settings.seeding, Tensor):
        start = given_seeds(settings.seeding, k, rows.dim, frame, pool)
    else:
        start = seeds(
            problem.points, rows, k, settings.seeding, settings.seed, problem.weights, pool, n_threads
        )
        if settings.seed_scale != 1.0:
            mean = frame.prepare(rows.mean.unsqueeze(0))
            start = mean + (start - mean) * settings.seed_scale
    assign = None
    if settings.balanced:
        assign = lambda table: balanced_codes(problem, table)  # noqa: E731
    table, n_iterations = lloyd(
        problem, start, max_iterations=settings.max_iterations, tolerance=settings.tolerance,
        empty=settings.empty, acceleration=settings.acceleration, progress=settings.progress, assign=assign,
    )  # fmt: skip
    return _result(points, problem, frame.restore(table).float(), n_iterations, settings.balanced)


def _problem(
    points: Points, rows: Survey, frame: Frame, weights: Tensor | None, pool: Pool, n_threads: int
) -> Problem:
    max_weight, term = 1.0, 0.0
    if weights is not None:
        largest = torch.tensor([float(weights.max()) if len(weights) else 0.0], dtype=torch.float64)
        max_weight = float(pool(largest, "max")[0])
        term = rounding_term(max_weight, rows.n_points)
        weights = grid_weights(weights, max_weight, rows.n_points)
    prepared = points.mapped(lambda _, part: frame.prepare(part))
    if not (frame.is_plain and rows.dtype is torch.float32):
        # Preparing rows again in each pass gives the same bits and costs time; keep them when they are few.
        prepared = keep_small(prepared, rows.n_local, rows.dim, pool, n_threads)
    return Problem(prepared, rows, frame, weights, term, max_weight, pool, n_threads)


def _result(
    points: Points, problem: Problem, centroids: Tensor, n_iterations: int, balanced: bool
) -> tuple[KMeans, Tensor]:
    """Measure the centroids: one more pass, since counts and inertia must belong to what is returned."""
    pool, frame = problem.pool, problem.frame
    if frame.normalize:
        points = problem.points
    found: list[tuple[Tensor, Tensor, Frame]] = []
    given = problem.codes if balanced else None
    together(pool, lambda: found.append(assign_pieces(points, centroids, problem.n_threads, given)))
    codes, distances, frame = found[0]
    if problem.weights is not None:
        distances = distances * problem.weights
    largest = torch.tensor([float(distances.max()) if len(distances) else 0.0], dtype=torch.float64)
    term = rounding_term(float(pool(largest, "max")[0]), problem.rows.n_points)
    inertia = float(pool_exact(exact_total(distances, term), term, pool)[0]) / frame.scale / frame.scale
    counts = pool(torch.from_numpy(np.bincount(codes.numpy(), minlength=centroids.shape[0])))
    return KMeans(centroids, counts, inertia, n_iterations, int((counts > 0).sum())), codes


def _check_weights(weights: Tensor | None, pool: Pool) -> Tensor | None:
    given = torch.tensor([0 if weights is None else 1])
    if int(pool(given, "max")[0]) != int(pool(given, "min")[0]):
        raise SpecError("`weights`: expected them on all workers or on none, got both.", name="weights")
    if weights is None:
        return None
    checked = weights.detach().cpu().double()
    fine = checked.ndim == 1 and bool((checked.isfinite() & (checked >= 0)).all())
    pool.agree(fine, "`weights`: expected (n_points,) finite values of at least 0. Give one for each row.")
    return checked + 0.0


def _check(name: str, fine: bool, expected: str, got: object) -> None:
    if not fine:
        raise ValueError(f"`{name}`: expected {expected}, got {got!r}.")
