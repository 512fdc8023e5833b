"""Residual codebooks that follow mini-batches, level by level, straight from the embeddings.

::

    sample of rows ── k-means ─> start of level k ── batch, batch, … ─> level k ── what it leaves ─> level k+1

Each batch is drawn from the rows of all workers by the seed alone; a worker takes those of its rows that are in it,
and counts and sums are those of all workers. So the codebooks do not depend on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep import codebooks, kmeans
from samestep.pooling import Pool
from samestep.recipes.semantic_ids.data import Items
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec

__all__ = ["fit", "relative_errors"]

_BLOCK_ROWS = 8192
_KEPT_BYTES = 1 << 29
_SAMPLE_PER_CODE = 32


def fit(
    spec: SemanticIdsSpec, part: Items, pool: Pool, progress: Callable[[int, int, float], None] | None = None
) -> codebooks.Codebooks:
    """Return codebooks that followed ``spec.steps`` batches per level.

    Args:
        spec: sizes, seed, ``global_batch_size``, ``steps`` and ``kmeans_iterations`` (for the start).
        part: this worker's rows; may be none.
        pool: all workers.
        progress: called with (level, step, inertia of the batch) after each step.

    Raises:
        SpecError: on all workers, when rows are fewer than a level's codes.

    Collective: all workers of `pool` call it.
    Numerics: order-free, see `kmeans.MiniBatch`.

    Reference: Sculley, Web-scale k-means clustering, 2010; the levels as Juang & Gray, 1982.
    """
    # One centroid for all rows is their mean, and an exact one.
    offset = kmeans.fit(part.embeddings, 1, max_iterations=1, pool=pool).centroids[0]
    books = codebooks.Codebooks((), offset)
    for level, n_centroids in enumerate(spec.n_centroids):
        sample = next(
            _batches(part, max(_SAMPLE_PER_CODE * n_centroids, spec.global_batch_size), spec.seed, level)
        )
        left = _Left(part, books)
        start = kmeans.fit(
            left[sample], n_centroids,
            max_iterations=spec.kmeans_iterations, seed=spec.seed + level, pool=pool,
        )  # fmt: skip
        running = kmeans.MiniBatch(start.centroids, pool=pool)
        batches = _batches(part, spec.global_batch_size, spec.seed, len(spec.n_centroids) + level)
        for step in range(1, spec.steps + 1):
            inertia = running.step(left[next(batches)])
            if progress is not None:
                progress(level, step, inertia)
        books = codebooks.Codebooks((*books.levels, running.centroids), offset)
    return books


def relative_errors(part: Items, codes: Tensor, books: codebooks.Codebooks, pool: Pool) -> list[float]:
    """Return, after each level, the squared error of all rows over that of their mean.

    Args:
        part: this worker's rows.
        codes: (n_items, n_levels) of these rows.
        books: what the codes were made with.
        pool: all workers.

    Collective: all workers of `pool` call it.
    Numerics: order-free; a row's error is rounded to 2**-32 of the largest squared distance from the mean.
    """
    n_levels = codes.shape[1]
    errors = torch.zeros(len(part), n_levels + 1, dtype=torch.float64)
    for first in range(0, len(part), _BLOCK_ROWS):
        here = slice(first, first + _BLOCK_ROWS)
        rows = torch.from_numpy(np.array(part.embeddings[here], dtype=np.float64))
        guesses = [codebooks.decode(codes[here, : level + 1], books) for level in range(n_levels)]
        for place, guess in enumerate([*guesses, books.offset]):
            errors[here, place] = (rows - guess.double()).square().sum(1)
    largest = errors.max().reshape(1) if len(part) else torch.zeros(1, dtype=torch.float64)
    unit = 2.0**32 / max(float(pool(largest, "max")[0]), 1e-300)
    sums = pool((errors * unit).round().long().sum(0))
    return [int(total) / max(int(sums[-1]), 1) for total in sums[:-1]]


def _batches(part: Items, n_rows: int, seed: int, stream: int) -> Iterator[NDArray[np.int64]]:
    """Yield this worker's rows of each global batch, in ascending order; every pass over the data is complete."""
    n_total = part.n_total
    draw = np.random.Generator(np.random.PCG64([seed, stream]))
    while True:
        order = draw.permutation(n_total)
        for first in range(0, n_total, n_rows):
            mine = np.sort(order[first : first + n_rows]) - part.first_row
            yield mine[(mine >= 0) & (mine < len(part))]


class _Left:
    """What the levels so far leave of this worker's rows; kept while they are few, for each is read many times."""

    def __init__(self, part: Items, books: codebooks.Codebooks) -> None:
        self._part, self._books = part, books
        self._kept: Tensor | None = None
        if len(part) * part.dim * 4 <= _KEPT_BYTES:
            blocks = [np.arange(i, min(i + _BLOCK_ROWS, len(part))) for i in range(0, len(part), _BLOCK_ROWS)]
            self._kept = torch.cat([torch.empty(0, part.dim), *(self._left(rows) for rows in blocks)])

    def __getitem__(self, rows: NDArray[np.int64]) -> Tensor:
        return self._left(rows) if self._kept is None else self._kept[torch.from_numpy(rows)]

    def _left(self, rows: NDArray[np.int64]) -> Tensor:
        points = torch.from_numpy(np.array(self._part.embeddings[rows], dtype=np.float32))
        if not self._books.levels:
            return points - self._books.offset
        return points - codebooks.decode(codebooks.encode(points, self._books), self._books)
