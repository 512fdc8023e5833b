"""Residual codebooks that follow mini-batches, level by level, straight from the embeddings.

::

    sample of rows ── k-means ─> level k ─┬─ batch: codebook = average of the rows that chose each code lately ─┐
                                          ├─ codes that hardly any row chooses: rows of the batch instead       │
                                          └─ next batch <───────────────────────────────────────────────────────┘
    last quarter of the batches: nothing is forgotten or restarted, so that the codes settle on means of many rows

Each batch is drawn from the rows of all workers by the seed alone; a worker takes those of its rows that are in it,
and counts and sums are those of all workers. So the codebooks do not depend on how many workers there are.

The averages start with what the sample's k-means has counted. Started at zero, the first batch would throw the
means of the sample away for those of a few rows, and codes with short lives would lose most of their rows for good.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep import codebooks, kmeans, targets
from samestep.pooling import Pool
from samestep.recipes.semantic_ids.data import Items
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec

__all__ = ["Follower"]

_BLOCK_ROWS = 8192
_KEPT_BYTES = 1 << 29
_SAMPLE_PER_CODE = 32
_SETTLING = 0.25
_SEED_SCALE = 0.1  # less than the default: batches widen what the start leaves uneven


class Follower:
    """Codebooks under way, one batch at a time; what `state_dict` gives is all that a later run needs.

    Args:
        spec: ``n_centroids``, ``seed``, ``global_batch_size``, ``steps``, ``decay``, ``dead_share``, and
            ``kmeans_iterations`` and ``sample_size`` for the start of each level.
        part: this worker's rows; may be none.
        pool: all workers.

    Attributes:
        step: batches so far, over all levels.
        total: batches of the whole job.

    Numerics: order-free; exact sums, see `targets.ema_update`.

    Reference: van den Oord et al., Neural discrete representation learning, 2017, appendix A.1; the levels as Juang
    & Gray, Multiple stage vector quantization for speech coding, 1982.
    """

    def __init__(self, spec: SemanticIdsSpec, part: Items, pool: Pool) -> None:
        self.step = 0
        self.total = spec.steps * len(spec.n_centroids)
        self._spec, self._part, self._pool = spec, part, pool
        self._offset: Tensor | None = None
        self._levels: list[Tensor] = []
        self._running: dict[str, Tensor] | None = None
        self._left: _Left | None = None
        self._order: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def advance(self) -> tuple[int, int]:
        """Take one batch; return (level, codes of it in use).

        Raises:
            SpecError: on all workers, when rows are fewer than the level's codes.

        Collective: all workers of the pool.
        """
        spec = self._spec
        level, done = divmod(self.step, spec.steps)
        books = self.books()
        left = self._left = self._left or _Left(self._part, books)
        if self._running is None:
            self._running = self._start(level, left)
        settling = done - math.ceil((1 - _SETTLING) * spec.steps)
        # From the window's own length on, each batch counts as much as any before it.
        decay = max(spec.decay, 1 - 1 / (1 / (1 - spec.decay) + max(settling, 0)))
        batch = left[self._batch(len(spec.n_centroids) + level, done, spec.global_batch_size)]
        running = targets.ema_update(self._running, batch, self._pool, decay=decay)
        threshold = spec.dead_share * self._batch_rows / spec.n_centroids[level]
        dead = running["counts"] < threshold
        if settling < 0 and bool(dead.any()):
            running = targets.restart_dead(
                running, batch, self._pool, threshold=threshold, seed=spec.seed, step=self.step
            )
        self._running, self.step = running, self.step + 1
        if done + 1 == spec.steps:
            self._levels.append(running["codebook"])
            self._running = self._left = None
        return level, len(dead) - int(dead.sum())

    def books(self) -> codebooks.Codebooks:
        """Return the levels that are done.

        Collective: all workers of the pool, before the first batch.
        """
        if self._offset is None:
            # One centroid for all rows is their mean, and an exact one.
            self._offset = kmeans.fit(self._part.embeddings, 1, max_iterations=1, pool=self._pool).centroids[
                0
            ]
        return codebooks.Codebooks(tuple(self._levels), self._offset)

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on: levels that are done, and the averages of the one under way."""
        return {
            "step": self.step, "offset": self._offset, "levels": list(self._levels), "running": self._running,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.step, self._offset = state["step"], state["offset"]
        self._levels, self._running = list(state["levels"]), state["running"]
        self._left = None

    @property
    def _batch_rows(self) -> int:
        return min(self._spec.global_batch_size, self._part.n_total)

    def _start(self, level: int, left: _Left) -> dict[str, Tensor]:
        """Return the averages after k-means over a sample, as if batches had brought it."""
        spec = self._spec
        n_centroids = spec.n_centroids[level]
        n_rows = spec.sample_size or max(_SAMPLE_PER_CODE * n_centroids, spec.global_batch_size)
        sample = left[self._batch(level, 0, n_rows)]
        start = kmeans.fit(
            sample, n_centroids,
            max_iterations=spec.kmeans_iterations, seed=spec.seed + level, pool=self._pool,
            seed_scale=_SEED_SCALE if level else 1.0,
        )  # fmt: skip
        state = targets.ema_start(start.centroids, sample, self._pool)
        share = self._batch_rows / min(n_rows, self._part.n_total)
        return {**state, "sums": state["sums"] * share, "counts": state["counts"] * share}

    def _batch(self, stream: int, number: int, n_rows: int) -> NDArray[np.int64]:
        """Return this worker's rows of a global batch, in ascending order; every pass over the data is complete."""
        part = self._part
        epoch, at = divmod(number, -(-part.n_total // n_rows))
        if self._order is None or self._order[0] != (stream, epoch):
            draw = np.random.Generator(np.random.PCG64([self._spec.seed, stream, epoch]))
            self._order = (stream, epoch), draw.permutation(part.n_total)
        mine = np.sort(self._order[1][at * n_rows : (at + 1) * n_rows]) - part.first_row
        return mine[(mine >= 0) & (mine < len(part))]


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
