"""First centroids. All workers hold the same sample of rows and reach the same seeds by themselves.

Rules (in the frame of the rows):

- ``random``: distinct rows, drawn in proportion to their weights.
- ``k-means++``: greedy D^2 sampling on a sample of the rows (Arthur & Vassilvitskii 2007, section 2.2; the greedy
  form draws 2 + log(n_centroids) candidates and keeps the best).
- ``k-means||``: five rounds of 2 * n_centroids expected draws, then k-means++ on what was drawn, weighted by the
  rows each stands for (Bahmani et al. 2012, algorithm 2). Cheaper for many centroids.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._assign import check_centroids
from samestep.kmeans._frame import Frame, Survey
from samestep.kmeans._points import Points
from samestep.kmeans._search import Nearest
from samestep.kmeans._select import draw_keys, gather_rows, pick_smallest, uniform
from samestep.pooling import Pool

__all__ = ["SEEDINGS", "given_seeds", "seeds"]

SEEDINGS = ("k-means++", "random", "k-means||")
_SAMPLE_BYTES = 1 << 25
_ROWS_PER_CENTROID = 32
_DRAW, _PICK, _ROUND = 1, 2, 3

Array = npt.NDArray[np.float32]


def seeds(
    points: Points, rows: Survey, n_centroids: int, rule: str, seed: int,
    weights: Tensor | None, pool: Pool, n_threads: int,
) -> Tensor:  # fmt: skip
    """Return (n_centroids, dim) float32 seeds in the frame, equal on all workers.

    Collective: all workers call it.
    """
    keys = draw_keys(rows.offset, rows.n_local, seed, _DRAW, weights)

    def sample(n: int) -> tuple[Array, npt.NDArray[np.int64]]:
        picked = pick_smallest(keys, n, pool)
        drawn = gather_rows(points, picked, n, rows.dim, pool, n_threads)
        offset, order = pool.offset(len(picked)), torch.zeros(n, dtype=torch.int64)
        order[offset : offset + len(picked)] = torch.from_numpy(keys[picked])
        by_key = np.argsort(pool(order).numpy(), kind="stable")
        return drawn.numpy()[by_key], by_key

    most = max(_SAMPLE_BYTES // (4 * rows.dim), 2 * n_centroids)
    if rule == "random":
        size = min(2 * n_centroids, rows.n_points)
        while True:
            drawn, _ = sample(size)
            firsts = _first_rows(drawn)
            if len(firsts) >= n_centroids or size == rows.n_points or size >= most:
                return torch.from_numpy(_fill(drawn, firsts[:n_centroids], n_centroids))
            size = min(4 * size, rows.n_points, most)
    size = min(_ROWS_PER_CENTROID * n_centroids, rows.n_points, most)
    drawn, _ = sample(size)
    grower = _Grower(drawn, n_threads)
    if rule == "k-means||":
        chosen = _oversample(grower, n_centroids, seed)
    else:
        chosen = grower.grow(n_centroids, np.ones(size), uniform(n_centroids * 32, seed, _PICK))
    return torch.from_numpy(_fill(drawn, chosen, n_centroids))


def given_seeds(table: Tensor, n_centroids: int, dim: int, frame: Frame, pool: Pool) -> Tensor:
    """Return the user's seeds in the frame, after a check that all workers gave the same.

    Collective: all workers call it.
    """
    message, seed_rows = "", torch.zeros(n_centroids, dim)
    try:
        seed_rows = check_centroids(table, "seeding")
        if seed_rows.shape != (n_centroids, dim):
            message = (
                f"`seeding`: expected seeds of shape {(n_centroids, dim)}, got {tuple(seed_rows.shape)}."
            )
            seed_rows = torch.zeros(n_centroids, dim)
    except ValueError as error:
        message = str(error)
    pool.agree(not message, message)
    bits = seed_rows.double().view(torch.int64)
    if not torch.equal(pool(bits, "max"), pool(bits, "min")):
        raise SpecError(
            "`seeding`: expected the same seeds on all workers, got different ones. Broadcast them.",
            name="seeding",
        )
    return frame.prepare(seed_rows)


class _Grower:
    """D^2 sampling on a sample that every worker holds; work in fixed blocks, so threads change no bit."""

    def __init__(self, drawn: Array, n_threads: int) -> None:
        self.rows = torch.from_numpy(drawn)
        self.norms = self.rows.double().square().cumsum(1)[:, -1].float()
        self.n_threads = n_threads

    def distances(self, picks: npt.NDArray[np.int64]) -> Array:
        """Return (n_picks, n_rows) squared distances; 0 where the rounding error would be most of it."""
        chosen = self.rows[torch.from_numpy(picks)]
        size = self.norms[torch.from_numpy(picks)].unsqueeze(1)
        out = torch.empty(len(picks), self.rows.shape[0])
        n_torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for begin in range(0, out.shape[1], 4096):
                part = slice(begin, begin + 4096)
                reach = size + self.norms[part]
                gaps = torch.addmm(reach, chosen, self.rows[part].t(), alpha=-2)
                out[:, part] = torch.where(gaps > reach * 2.0**-20, gaps, torch.zeros(()))
        finally:
            torch.set_num_threads(n_torch_threads)
        return out.numpy()

    def grow(
        self, n: int, weights: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        """Return up to n rows by greedy D^2 sampling; fewer when no row is left apart from those chosen."""
        n_tries = 2 + int(math.log(n))
        first = int(np.searchsorted(np.cumsum(weights), draws[0] * weights.sum()))
        chosen = [min(first, len(weights) - 1)]
        closest = self.distances(np.array(chosen))[0]
        for step in range(1, n):
            potential = np.cumsum(closest * weights)
            if potential[-1] <= 0:
                break
            aims = draws[step * 32 : step * 32 + n_tries] * potential[-1]
            tries = np.minimum(np.searchsorted(potential, aims), len(weights) - 1)
            gaps = np.minimum(self.distances(tries), closest)
            best = int(np.argmin((gaps * weights).sum(axis=1)))
            chosen.append(int(tries[best]))
            closest = gaps[best]
        return np.array(chosen, dtype=np.int64)


def _oversample(grower: _Grower, n_centroids: int, seed: int) -> npt.NDArray[np.int64]:
    n_rows = grower.rows.shape[0]
    chosen = [np.zeros(1, dtype=np.int64)]
    closest = grower.distances(chosen[0])[0]
    for number in range(5):
        total = float(np.sum(closest, dtype=np.float64))
        if total <= 0:
            break
        draws = uniform(n_rows, seed, _ROUND + 1 + number)
        fresh = np.flatnonzero(draws < 2.0 * n_centroids * closest / total)
        for begin in range(0, len(fresh), 64):
            gaps = grower.distances(fresh[begin : begin + 64]).min(axis=0)
            closest = np.minimum(closest, gaps)
        chosen.append(fresh)
    candidates = np.unique(np.concatenate(chosen))
    table = grower.rows[torch.from_numpy(candidates)]
    mass = np.bincount(Nearest(table, 1).codes(grower.rows), minlength=len(candidates)).astype(np.float64)
    inner = _Grower(table.numpy(), grower.n_threads)
    picked = inner.grow(n_centroids, mass, uniform(n_centroids * 32, seed, _PICK))
    return candidates[picked]


def _first_rows(drawn: Array) -> npt.NDArray[np.int64]:
    """Return the rows that equal no earlier one; by digests, since sorting rows copies the table several times."""
    first: dict[bytes, int] = {}
    for number, row in enumerate(drawn):
        first.setdefault(hashlib.blake2b(row.tobytes(), digest_size=16).digest(), number)
    return np.array(list(first.values()), dtype=np.int64)


def _fill(drawn: Array, chosen: npt.NDArray[np.int64], n: int) -> Array:
    """Return n rows: the chosen ones, then rows that differ from them, then, when there are none, copies."""
    if len(chosen) < n:
        firsts = _first_rows(drawn)
        taken = {drawn[row].tobytes() for row in chosen}
        others = [row for row in firsts if drawn[row].tobytes() not in taken]
        chosen = np.concatenate([chosen, np.array(others, dtype=np.int64)])[:n]
    return drawn[np.resize(chosen, n)]
