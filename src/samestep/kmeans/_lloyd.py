"""Lloyd's algorithm over the rows of all workers.

::

    worker 0: codes of its rows ── exact sums ─┐
    worker 1: codes of its rows ── exact sums ─┼─ integer sum ── means ── the same centroids on every worker
    worker 2: no rows           ── zeros      ─┘

Sums are exact, so neither the split of the rows nor the number of workers or threads changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._assign import row_distances
from samestep.kmeans._frame import Frame, Survey
from samestep.kmeans._points import Points, each_piece, raise_together, together
from samestep.kmeans._search import Codes, Nearest
from samestep.kmeans._select import gather_rows, pick_smallest
from samestep.kmeans._update import ExactSums, pool_exact
from samestep.pooling import Pool

__all__ = ["Acceleration", "Empty", "Problem", "Progress", "lloyd"]

Empty = Literal["farthest", "keep"]
Acceleration = Literal["none", "overrelaxed"]
Progress = Callable[[int, float], None]

_OVERSHOOT = 0.5


@dataclass
class Problem:
    """What a run works on: the rows of this worker in their frame, and what all workers share."""

    points: Points  # prepared, float32
    rows: Survey
    frame: Frame
    weights: Tensor | None  # (n_local,) float64 on the grid
    weight_term: float
    max_weight: float
    pool: Pool
    n_threads: int
    codes: Codes = field(init=False)

    def __post_init__(self) -> None:
        self.codes = np.full(self.rows.n_local, -1, dtype=np.int32)

    def max_value(self) -> float:
        """Return a bound of |weight * prepared value| that all workers share."""
        if self.frame.normalize:
            return self.max_weight
        reach = self.rows.max_abs * (2.0 if self.frame.mean is not None else 1.0)
        return reach * self.frame.scale * self.max_weight


@dataclass(frozen=True)
class _Means:
    table: Tensor  # (n_centroids, dim) float64
    counts: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float64]  # weight of each centroid's rows
    explained: float  # sum over centroids of |weighted sum|^2 / weight
    n_moved: int

    def distance(self, centroids: Tensor) -> float:
        """Return the weighted squared distance of the means from centroids: what a step to the means takes off."""
        gaps = (self.table - centroids.double()).square().sum(1)
        return float((torch.from_numpy(self.mass) * gaps).sum())


def lloyd(
    problem: Problem, centroids: Tensor, *, max_iterations: int, tolerance: float, empty: Empty,
    acceleration: Acceleration, progress: Progress | None, assign: Callable[[Tensor], Codes] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Improve centroids until the descent falls below `tolerance`, no row moves, or `max_iterations` are done.

    Args:
        problem: rows and workers.
        centroids: (n_centroids, dim) float32 in the frame.
        max_iterations: passes at most.
        tolerance: relative descent of the inertia below which to stop.
        empty: rule for centroids without rows.
        acceleration: "overrelaxed" steps beyond each mean by half the way.
        progress: called by the main worker with (iterations done, inertia before the update).
        assign: codes of this worker's rows by another rule than the nearest; collective.

    Returns:
        (n_centroids, dim) float32 centroids in the frame, and the iterations done.

    Collective: all workers call it.
    """
    n_centroids, dim = centroids.shape
    sums = ExactSums(n_centroids, dim, problem.max_value(), problem.rows.n_points, problem.n_threads)
    spread = problem.rows.total_weight if problem.frame.normalize else _spread(problem)
    last = np.inf
    for iteration in range(1, max_iterations + 1):
        means = _pass(problem, sums, centroids, assign)
        inertia = max(spread - means.explained, 0.0)
        if acceleration == "overrelaxed" and not problem.frame.normalize:
            # What descends here is the inertia around the centroids as they are, not around their rows' means.
            inertia += means.distance(centroids)
        if progress is not None and problem.pool.is_main:
            progress(iteration, inertia / problem.frame.scale**2)
        final = iteration == max_iterations or means.n_moved == 0 or last - inertia <= tolerance * inertia
        last = inertia
        used = means.counts > 0
        fresh = means.table
        if acceleration == "overrelaxed" and not final:
            # For fixed codes this changes the inertia by n (b^2 - 1) |c - mean|^2 <= 0: a descent for |b| <= 1.
            fresh = fresh + _OVERSHOOT * (fresh - centroids.double())
        if problem.frame.normalize:
            fresh = _unit_rows(fresh, used)
        updated = torch.where(torch.from_numpy(used).unsqueeze(1), fresh.float(), centroids)
        n_refilled = 0
        if empty == "farthest" and not used.all():
            updated, n_refilled = _refill(problem, centroids, updated, np.flatnonzero(~used))
        centroids = updated
        if final and n_refilled == 0:
            return centroids, iteration
    return centroids, max_iterations


def _pass(
    problem: Problem, sums: ExactSums, centroids: Tensor, assign: Callable[[Tensor], Codes] | None
) -> _Means:
    moved = [0] * problem.n_threads
    given = assign(centroids) if assign is not None else None

    def local() -> None:
        search = Nearest(centroids, problem.n_threads) if given is None else None

        def work(thread: int, start: int, rows: Tensor) -> None:
            here = slice(start, start + rows.shape[0])
            fresh = search.codes(rows, thread) if search is not None else given[here]  # type: ignore[index]
            weights = None if problem.weights is None else problem.weights[here]
            moved[thread] += sums.move(rows, problem.codes[here], fresh, weights, thread)
            problem.codes[here] = fresh

        each_piece(problem.points, work, problem.n_threads)

    n_centroids, failure = centroids.shape[0], None
    try:
        local()
    except Exception as error:  # told to the others in the same message as the sums
        failure = error
    counts = np.bincount(np.maximum(problem.codes, 0), minlength=n_centroids)
    table, beside = sums.total_beside(
        problem.pool, torch.tensor([*counts, sum(moved), int(failure is not None)])
    )
    counts = beside.numpy()[:-1]
    if beside[-1]:
        raise_together(problem.pool, failure)
    mass = _masses(problem, n_centroids, counts[:-1])
    squares = np.einsum("kd,kd->k", table.numpy(), table.numpy())
    safe = np.where(mass > 0, mass, 1.0)
    explained = float(np.sum(squares / safe)) if not problem.frame.normalize else 0.0
    if problem.frame.normalize:
        # For unit rows, sum |x - c|^2 = 2 (W - sum |s|); halved scale keeps one formula for the caller.
        explained = float(np.sum(2.0 * np.sqrt(squares)) - problem.rows.total_weight)
    table /= torch.from_numpy(safe).unsqueeze(1)
    return _Means(table, np.where(mass > 0, counts[:-1], 0), mass, explained, int(counts[-1]))


def _masses(problem: Problem, n_centroids: int, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    if problem.weights is None:
        return counts.astype(np.float64)
    local = np.bincount(problem.codes, weights=problem.weights.numpy(), minlength=n_centroids)
    return pool_exact(torch.from_numpy(local), problem.weight_term, problem.pool).numpy()


def _refill(
    problem: Problem, centroids: Tensor, updated: Tensor, empty: npt.NDArray[np.int64]
) -> tuple[Tensor, int]:
    """Put empty centroids on the rows farthest from their own, distinct, ties to the lower global row."""
    distances = np.zeros(problem.rows.n_local)

    def measure() -> None:
        def work(_: int, start: int, rows: Tensor) -> None:
            here = slice(start, start + rows.shape[0])
            gaps = row_distances(rows, centroids, problem.codes[here])
            distances[here] = gaps.numpy()

        each_piece(problem.points, work, problem.n_threads)

    together(problem.pool, measure)
    if problem.weights is not None:
        distances[problem.weights.numpy() == 0] = 0.0
    # Keys ascend, so the largest distance gets the smallest key; positive floats order as their bits do.
    keys = np.float64(np.inf).view(np.int64) - distances.view(np.int64)
    n_apart = int(problem.pool(torch.tensor([np.count_nonzero(distances)]))[0])
    n = min(len(empty), n_apart)
    if n == 0:
        return updated, 0
    picked = pick_smallest(keys, n, problem.pool)
    rows = gather_rows(problem.points, picked, n, centroids.shape[1], problem.pool, problem.n_threads)
    _, first = np.unique(rows.numpy(), axis=0, return_index=True)
    chosen = rows[torch.from_numpy(np.sort(first))]
    updated = updated.clone()
    updated[torch.from_numpy(empty[: len(chosen)])] = chosen
    return updated, len(chosen)


def _spread(problem: Problem) -> float:
    """Return the sum of weight * |prepared row|^2."""
    mean = problem.rows.mean
    offset = 0.0
    if problem.frame.mean is None:
        offset = float(np.square((mean * problem.frame.scale).numpy()).sum()) * problem.rows.total_weight
    return problem.rows.spread * problem.frame.scale * problem.frame.scale + offset


def _unit_rows(table: Tensor, used: npt.NDArray[np.bool_]) -> Tensor:
    lengths = torch.from_numpy(np.sqrt(np.einsum("kd,kd->k", table.numpy(), table.numpy()))).unsqueeze(1)
    if bool((lengths[torch.from_numpy(used)] == 0).any()):
        raise SpecError("`spherical`: expected groups with a direction, got one whose rows cancel to zero.")
    return table / lengths.clamp_min(1e-300)
