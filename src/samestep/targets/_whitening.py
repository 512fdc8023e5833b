"""Whitening of all workers' rows, along principal axes or back in the features' own directions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from samestep.pooling import Pool, alone
from samestep.targets._exact import checked, column_sums, cross_moments

__all__ = ["whitening"]


def whitening(
    points: object, pool: Pool = alone, *, kind: Literal["pca", "zca"] = "pca", eps: float = 1e-5
) -> dict[str, Tensor]:
    """Return the affine map after which features are uncorrelated with variance 1: ``(x - mean) @ weight.T``.

    With covariance V diag(s) V^T, the weight is ``diag(1 / sqrt(s + eps)) V^T`` for PCA, largest s first, and
    ``V diag(1 / sqrt(s + eps)) V^T`` for ZCA. The largest entry of each axis is positive.

    Args:
        points: (n_points, dim) float rows of this worker, may be none; any form that `kmeans.fit` takes.
        pool: all workers.
        kind: "pca" or "zca".
        eps: variance added to each axis, in squared units of the data; keeps an axis without spread finite.

    Returns:
        ``mean`` (dim,), ``weight`` (dim, dim) and ``variance`` (dim,), largest first; float32.

    Raises:
        ValueError: for another kind, or an eps that is not positive.
        SpecError: on all workers, as `normalizer`.

    Collective: all workers of `pool` call it.
    Numerics: order-free sums; the covariance is rounded to a grid of at most 2**-20 of the largest deviation. The
        decomposition runs in float64 on one thread, the same on all workers of one hardware and torch build.

    Example:
        >>> line = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
        >>> whitening(line)["mean"].tolist()
        [2.0, 1.0]
    """
    if kind not in ("pca", "zca"):
        raise ValueError(f"`kind`: expected 'pca' or 'zca', got {kind!r}.")
    if not eps > 0:
        raise ValueError(f"`eps`: expected a positive number, got {eps}.")
    source, rows = checked(points, pool)
    mean = column_sums(source, lambda part: part, rows.dim, rows.n_points, pool) / rows.n_points
    _, products, unit = cross_moments(source, mean, rows.n_points, pool)
    values, axes = _decompose(products.double() * (unit * unit / rows.n_points))
    scaled = axes * (values + eps).rsqrt()  # (dim, dim), an axis in each column
    weight = scaled.T if kind == "pca" else scaled @ axes.T
    return {"mean": mean.float(), "weight": weight.float().contiguous(), "variance": values.float()}


def _decompose(covariance: Tensor) -> tuple[Tensor, Tensor]:
    n_threads = torch.get_num_threads()
    try:
        # Workers may run different numbers of threads, and these add in different orders.
        torch.set_num_threads(1)
        values, axes = torch.linalg.eigh(covariance)
    finally:
        torch.set_num_threads(n_threads)
    values, axes = values.flip(0).clamp(min=0.0), axes.flip(1)
    return values, axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
