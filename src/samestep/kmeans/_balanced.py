"""Codes with cells of equal size: the stable matching of points and centroids.

Every point prefers near centroids, every centroid prefers near points and has room for its share. Points claim
their nearest centroid; an overfull one keeps its nearest claims and turns the others away, who claim the next
(Gale & Shapley 1962, section 3). The outcome does not depend on the order of claims, so it is the same for any
split of the rows. n_points / n_centroids points share a cell; when that leaves a rest, the first centroids by
index take one more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.kmeans._lloyd import Problem
from samestep.kmeans._points import BLOCK_ROWS, each_piece, together
from samestep.kmeans._search import Codes

__all__ = ["balanced_codes"]

Keys = npt.NDArray[np.int64]


def balanced_codes(problem: Problem, centroids: Tensor) -> Codes:
    """Return (n_local,) codes that fill all cells of all workers alike.

    Args:
        problem: rows and workers.
        centroids: (n_centroids, dim) float32 in the frame.

    Collective: all workers call it.
    """
    n_centroids, n_points = centroids.shape[0], problem.rows.n_points
    room = np.full(n_centroids, n_points // n_centroids)
    room[: n_points % n_centroids] += 1
    n_local = problem.rows.n_local
    codes, keys = np.full(n_local, -1, dtype=np.int32), np.zeros(n_local, dtype=np.int64)
    # A centroid takes a claim below its limit: (distance, then global row number).
    limit = np.full(n_centroids, np.iinfo(np.int64).max)
    limit_row = np.full(n_centroids, np.iinfo(np.int64).max)
    rows = problem.rows.offset + np.arange(n_local)
    while True:
        together(problem.pool, lambda: _claim(problem, centroids, codes, keys, rows, limit, limit_row))
        counts = problem.pool(torch.from_numpy(np.bincount(codes, minlength=n_centroids))).numpy()
        over = np.flatnonzero(counts > room)
        if len(over) == 0:
            return codes
        _tighten(problem, over, room, codes, keys, rows, limit, limit_row)
        late = (keys > limit[codes]) | ((keys == limit[codes]) & (rows > limit_row[codes]))
        codes[late] = -1


def _claim(
    problem: Problem, centroids: Tensor, codes: Codes, keys: Keys, rows: Keys, limit: Keys, limit_row: Keys
) -> None:
    """Give each free row its nearest centroid among those that would not turn it away."""
    half = centroids.double().square().sum(1).mul_(0.5).float()
    panel = centroids.t().neg().contiguous()

    def work(_: int, start: int, piece: Tensor) -> None:
        free = np.flatnonzero(codes[start : start + piece.shape[0]] < 0)
        block = torch.zeros(BLOCK_ROWS, piece.shape[1])
        for begin in range(0, len(free), BLOCK_ROWS):
            part = free[begin : begin + BLOCK_ROWS]
            block.zero_()
            block[: len(part)] = piece[torch.from_numpy(part)]
            lengths = block.square().sum(1, keepdim=True)
            gaps = torch.addmm(half, block, panel).mul_(2.0).add_(lengths).clamp_min_(0.0)
            here = gaps[: len(part)].numpy()
            # Non-negative floats order as their bits do.
            bits = here.view(np.int32)
            number = rows[start + part][:, None]
            closed = (bits > limit) | ((bits == limit) & (number > limit_row))
            here[closed] = np.inf
            nearest = here.argmin(axis=1)
            codes[start + part] = nearest
            keys[start + part] = bits[np.arange(len(part)), nearest]

    each_piece(problem.points, work, problem.n_threads)


def _tighten(
    problem: Problem,
    over: Keys,
    room: Keys,
    codes: Codes,
    keys: Keys,
    rows: Keys,
    limit: Keys,
    limit_row: Keys,
) -> None:
    """Lower the limits of overfull centroids to their last claim that fits, all of them at once, by bisection."""
    place = np.full(len(limit), -1)
    place[over] = np.arange(len(over))
    mine = np.flatnonzero(place[codes] >= 0)
    cell, key, row = place[codes[mine]], keys[mine], rows[mine]
    want = room[over]
    limit[over] = _bisect(problem, lambda at: key <= at[cell], cell, want, 31)
    reached = limit[over][cell]
    fits = key < reached
    below = problem.pool(torch.from_numpy(np.bincount(cell[fits], minlength=len(over)))).numpy()
    tied = key == reached
    bits = max(int(problem.rows.n_points).bit_length(), 1)
    limit_row[over] = _bisect(problem, lambda at: tied & (row <= at[cell]), cell, want - below, bits)


def _bisect(problem: Problem, inside, cell: Keys, want: Keys, bits: int) -> Keys:  # type: ignore[no-untyped-def]
    """Return for each cell the smallest value at which at least `want` claims are inside."""
    low = np.full(len(want), -1)
    high = np.full(len(want), (1 << bits) - 1)
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        counts = problem.pool(
            torch.from_numpy(np.bincount(cell[inside(middle)], minlength=len(want)))
        ).numpy()
        enough = counts >= want
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    return high
