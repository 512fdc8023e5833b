"""k-means from batches: each batch moves the centroids by its share of all points seen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._assign import assign_pieces, check_centroids, thread_count
from samestep.kmeans._frame import Frame, rounding_term, survey
from samestep.kmeans._points import as_points, each_piece, together
from samestep.kmeans._update import ExactSums, exact_total, pool_exact
from samestep.pooling import Pool, alone

__all__ = ["MiniBatch"]


class MiniBatch:
    """Centroids that follow batches of all workers, as if each batch had come to one worker.

    A centroid that n points of the batch chose, of N it has had before, moves by n / (N + n) of the way to their
    mean. Counts and sums are those of all workers, so the result does not depend on how a batch was split.

    Args:
        centroids: (n_centroids, dim) float tensor to start from, equal on all workers; copied.
        pool: all workers; `reduce.pool(group)`, or `alone`.
        n_threads: threads on this worker; torch's number by default.

    Attributes:
        centroids: (n_centroids, dim) float32, replaced by each step.
        counts: (n_centroids,) int64, points of all workers and batches.

    Numerics: order-free; exact fixed-point sums.

    Example:
        >>> running = MiniBatch(torch.tensor([[5.0], [100.0]]))
        >>> _ = running.step(torch.tensor([[0.0]] + 9 * [[10.0]]))
        >>> running.centroids[:, 0].tolist(), running.counts.tolist()
        ([9.0, 100.0], [10, 0])

    Reference: Sculley, Web-scale k-means clustering, 2010, algorithm 1.
    """

    def __init__(self, centroids: Tensor, *, pool: Pool = alone, n_threads: int | None = None) -> None:
        self.centroids = check_centroids(centroids).float().clone()
        self.counts = torch.zeros(centroids.shape[0], dtype=torch.int64)
        self._pool = pool
        self._n_threads = thread_count(n_threads)

    def step(self, points: object) -> float:
        """Move the centroids by one batch; return its inertia before the move.

        Args:
            points: (batch_rows, dim) float rows of this worker, may be none; any form that `fit` takes.

        Returns:
            Sum over the batch of all workers of squared distances to the old centroids.

        Raises:
            SpecError: on all workers alike, when a row is not finite or does not fit.

        Collective: all workers of the pool.
        """
        source, pool = as_points(points), self._pool
        rows = survey(source, None, pool, self._n_threads)
        if rows.dim != self.centroids.shape[1]:
            dim = self.centroids.shape[1]
            raise SpecError(
                f"`points`: expected dim {dim} as the centroids have, got {rows.dim}.", name="points"
            )
        found: list[tuple[Tensor, Tensor, Frame]] = []
        together(pool, lambda: found.append(assign_pieces(source, self.centroids, self._n_threads)))
        codes, distances, frame = found[0]
        reach = rows.max_abs + (0.0 if frame.mean is None else float(frame.mean.abs().max()))
        sums = ExactSums(
            len(self.counts), rows.dim, reach * frame.scale, max(rows.n_points, 1), self._n_threads
        )
        none = np.full(rows.n_local, -1, dtype=np.int32)

        def add(thread: int, start: int, part: Tensor) -> None:
            here = slice(start, start + part.shape[0])
            sums.move(frame.prepare(part), none[here], codes.numpy()[here], None, thread)

        together(pool, lambda: each_piece(source, add, self._n_threads))
        counts = pool(torch.from_numpy(np.bincount(codes.numpy(), minlength=len(self.counts))))
        largest = torch.tensor([float(distances.max()) if len(distances) else 0.0], dtype=torch.float64)
        term = rounding_term(float(pool(largest, "max")[0]), max(rows.n_points, 1))
        inertia = float(pool_exact(exact_total(distances, term), term, pool)[0])
        self._move(frame.prepare(self.centroids).double(), sums.total(pool), counts, frame)
        return inertia / frame.scale / frame.scale

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a later run needs to go on: centroids and counts."""
        return {"centroids": self.centroids.clone(), "counts": self.counts.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state; raises ValueError when its shapes do not fit."""
        centroids, counts = state["centroids"], state["counts"]
        if centroids.shape != self.centroids.shape or counts.shape != self.counts.shape:
            got = (tuple(centroids.shape), tuple(counts.shape))
            raise ValueError(f"`state`: expected centroids {tuple(self.centroids.shape)}, got shapes {got}.")
        self.centroids, self.counts = check_centroids(centroids).float().clone(), counts.long().clone()

    def _move(self, old: Tensor, sums: Tensor, counts: Tensor, frame: Frame) -> None:
        total = self.counts + counts
        share = counts.double().div(total.clamp_min(1)).unsqueeze(1)
        mean = sums / counts.clamp_min(1).unsqueeze(1)
        moved = frame.restore(old + share * (mean - old)).float()
        self.centroids = torch.where((counts > 0).unsqueeze(1), moved, self.centroids)
        self.counts = total
