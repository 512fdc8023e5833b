"""What all workers' data give the network before its first step: a linear autoencoder and full codebooks.

`compute_axes` lays the lines of encoder and decoder along the principal axes of the data; `compute_codebooks` then
puts centroids into the latents that come out. So the first step already stands on a good quantizer with every
code in use. Started at random instead, latents mean nothing yet when the centroids begin to pull on them: within
a hundred steps most codes are left by their items for good, and rounding has a say in which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samestep import codebooks
from samestep.errors import SpecError
from samestep.pooling import Pool, alone
from samestep.recipes.semantic_ids.model import RQVAE, Rows
from samestep.targets import cross_moments

__all__ = ["compute_axes", "compute_codebooks"]


@torch.no_grad()
def compute_axes(model: RQVAE, points: Rows, pool: Pool = alone) -> dict[str, Tensor]:
    """Return the start of everything in front of the codebooks: mean, scale and principal axes of all data.

    With V the `latent_dim` first principal axes, the encoder's line becomes ``V^T`` and the decoder's ``V``: as
    long as the curves are zero, the model is the best linear autoencoder of the data.

    Args:
        model: whose shapes to fill; left as it is.
        points: (n_points, dim) this worker's rows, finite; may be none.
        pool: all workers.

    Returns:
        Tensors by parameter or buffer name, equal bit for bit on all workers, for `start.initialize`.

    Raises:
        SpecError: on all workers, when there is no row at all or all rows are equal.

    Collective: all workers of `pool` call it.
    Numerics: order-free; moments are integer sums on a grid of at most 2**-20 of the largest value.

    Example:
        >>> line = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
        >>> start = compute_axes(RQVAE(dim=2, n_centroids=(2,), latent_dim=1), line)
        >>> start["center"].tolist(), start["encoder.line.weight"].tolist()
        ([2.0, 1.0], [[1.0, 0.0]])
    """
    n_points = int(pool(torch.tensor([len(points)]))[0])
    if n_points == 0:
        raise SpecError("`points`: expected at least one row, got 0 on all workers.", name="points")
    zero = torch.zeros(model.dim, dtype=torch.float64)
    total, _, unit = cross_moments(points, zero, n_points, pool)
    center = (total.double() * unit / n_points).float()
    # Moments around the mean as float32 holds it, since that is what the model subtracts.
    _, products, unit = cross_moments(points, center.double(), n_points, pool)
    covariance = products.double() * (unit * unit / n_points)
    variance = float(covariance.trace()) / model.dim
    if variance <= 0.0:
        raise SpecError("`points`: expected rows that differ, got equal ones on all workers.", name="points")
    latent_dim = model.encoder.line.out_features
    axes = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :latent_dim]  # (dim, latent_dim)
    # An axis may point either way; its largest entry is made positive.
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign() + 0.0
    line = axes.float()
    return {
        "center": center,
        "scale": torch.tensor(variance**-0.5, dtype=torch.float64).float(),
        "encoder.line.weight": line.T.contiguous(),
        "decoder.line.weight": line.contiguous(),
    }


def compute_codebooks(
    model: RQVAE, points: Rows, pool: Pool = alone, *,
    max_iterations: int = 25, seed: int = 0, sample_size: int | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the codebooks that residual k-means finds in the latents of all workers' data.

    Args:
        model: with the start of `compute_axes` in place; left as it is.
        points: (n_points, dim) this worker's rows; may be none.
        pool: all workers.
        max_iterations: of k-means, per level.
        seed: of k-means.
        sample_size: rows to fit on, drawn evenly over all workers; all by default.

    Returns:
        (n_centroids, latent_dim) tensors by parameter name, equal on all workers, for `start.initialize`.

    Raises:
        SpecError: on all workers, when the data have fewer rows than a level has codes.

    Collective: all workers of `pool` call it.
    Numerics: as `codebooks.fit`.
    """
    sizes = [len(codebook) for codebook in model.quantizer.codebooks]
    latents = model.latents(points).cpu()
    # The quantizer takes no offset off: the first level holds the latents' mean itself.
    books = codebooks.fit(
        latents, sizes,
        max_iterations=max_iterations, seed=seed, pool=pool, center=False, sample_size=sample_size,
    )  # fmt: skip
    return {f"quantizer.codebooks.{level}": table for level, table in enumerate(books.levels)}
