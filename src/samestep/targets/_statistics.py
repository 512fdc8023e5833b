"""Mean and standard deviation of each feature over all workers' rows."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.kmeans._points import together
from samestep.pooling import Pool, alone
from samestep.targets._exact import checked, moments

__all__ = ["RunningNormalizer", "act_norm", "normalizer"]


def normalizer(points: object, pool: Pool = alone) -> dict[str, Tensor]:
    """Return each feature's mean and standard deviation over the rows of all workers.

    Args:
        points: (n_points, dim) float rows of this worker, may be none; any form that `kmeans.fit` takes.
        pool: all workers.

    Returns:
        ``mean`` and ``std``, (dim,) float32; std divides by the number of rows and is 0 for a constant feature.
        ``count``, int64 rows of all workers.

    Raises:
        SpecError: on all workers: no row at all, dims that differ, a row that is not finite.

    Collective: all workers of `pool` call it.
    Numerics: order-free; two-grid fixed-point sums of values, then of squared deviations from their mean.

    Example:
        >>> found = normalizer(torch.tensor([[0.0], [0.0], [10.0], [10.0]]))
        >>> found["mean"].item(), found["std"].item(), found["count"].item()
        (5.0, 5.0, 4)
    """
    source, rows = checked(points, pool)
    mean, squares = moments(source, rows, pool)
    return {
        "mean": mean.float(),
        "std": (squares / rows.n_points).sqrt().float(),
        "count": torch.tensor(rows.n_points),
    }


class RunningNormalizer:
    """Mean and standard deviation of all rows seen so far, from batches of all workers.

    Each update pools the batch alone and merges it by the difference of means, so nothing is counted twice and no
    large squares cancel.

    Args:
        dim: features of a row.
        pool: all workers.

    Attributes:
        count: int64 rows of all workers and updates.
        mean: (dim,) float64.
        squares: (dim,) float64 sums of squared deviations from the mean.

    Numerics: order-free within a batch; batches merge in float64 in the order of updates.

    Example:
        >>> running = RunningNormalizer(1)
        >>> running.update(torch.tensor([[0.0], [0.0]]))
        >>> running.update(torch.tensor([[10.0], [10.0]]))
        >>> running.values()["mean"].item(), running.values()["std"].item()
        (5.0, 5.0)

    Reference: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm, 1979, equation 2.1.
    """

    def __init__(self, dim: int, pool: Pool = alone) -> None:
        if dim < 1:
            raise ValueError(f"`dim`: expected at least 1, got {dim}.")
        self.count = torch.tensor(0)
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.squares = torch.zeros(dim, dtype=torch.float64)
        self._pool = pool

    def update(self, points: object) -> None:
        """Merge one batch.

        Args:
            points: (batch_rows, dim) float rows of this worker, may be none.

        Raises:
            SpecError: on all workers, as `normalizer`.

        Collective: all workers of the pool.
        """
        source, rows = checked(points, self._pool)
        dim = self.mean.shape[0]
        if rows.dim != dim:
            raise SpecError(f"`points`: expected dim {dim}, got {rows.dim}.", name="points")
        mean, squares = moments(source, rows, self._pool)
        total = int(self.count) + rows.n_points
        delta = mean - self.mean
        self.squares = self.squares + squares + delta.square() * (int(self.count) * rows.n_points / total)
        self.mean = self.mean + delta * (rows.n_points / total)
        self.count = torch.tensor(total)

    def values(self) -> dict[str, Tensor]:
        """Return what `normalizer` returns.

        Raises:
            ValueError: before the first update.
        """
        if int(self.count) == 0:
            raise ValueError("`values`: expected an update first, got no rows so far.")
        std = (self.squares / int(self.count)).sqrt()
        return {"mean": self.mean.float(), "std": std.float(), "count": self.count.clone()}


def act_norm(activations: Tensor, pool: Pool = alone, *, eps: float = 1e-6) -> dict[str, Tensor]:
    """Return the location and scale that give each channel mean 0 and deviation 1: ``(x + loc) * scale``.

    Args:
        activations: (n, channels, ...) float, of this worker; n may be 0.
        pool: all workers.
        eps: added to the standard deviation.

    Returns:
        ``loc`` = -mean and ``scale`` = 1 / (std + eps), (channels,) float32.

    Raises:
        SpecError: on all workers, as `normalizer`.

    Collective: all workers of `pool` call it.
    Numerics: as `normalizer`.

    Example:
        >>> start = act_norm(torch.tensor([[0.0], [4.0]]), eps=0.0)
        >>> start["loc"].item(), start["scale"].item()
        (-2.0, 0.5)

    Reference: Kingma & Dhariwal, Glow, 2018, section 3.1.
    """

    def check() -> None:
        if activations.dim() < 2:
            raise ValueError(
                f"`activations`: expected (n, channels, ...), got shape {tuple(activations.shape)}."
            )

    together(pool, check)
    source, rows = checked(activations.movedim(1, -1).reshape(-1, activations.shape[1]), pool)
    mean, squares = moments(source, rows, pool)
    return {"loc": -mean.float(), "scale": ((squares / rows.n_points).sqrt() + eps).reciprocal().float()}
