"""Residual quantization that a network trains through: level k codes what the levels before it left over.

::

    latent ──┬─ nearest in codebook 0 ─> code 0        quantized = sum of the chosen centroids
             └─ minus it = residual ─┬─ nearest in codebook 1 ─> code 1
                                     └─ minus it = residual ─ ...

The choice of a centroid has no gradient. So the quantized latent passes its gradient on to the latent unchanged
(straight-through), and two squared distances tie the tables and the latents together: the codebook error moves
centroids towards the residuals that chose them, the commitment error moves the residuals towards their centroids.
Both are sums over the samples, never means, so that shards of any size add up. Moving averages of the centroids are
left out on purpose: they would be a second update, next to the optimizer, that had to be summed over all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Quantized", "ResidualQuantizer"]


class Quantized(NamedTuple):
    """What quantizing some latents gives.

    Attributes:
        latents: (n_samples, latent_dim) sums of the chosen centroids; the gradient goes straight to the input.
        codes: (n_samples, n_levels) int64.
        codebook_error: sum over samples and levels of ``|sg(residual) - centroid|^2``, scalar.
        commitment_error: the same number as ``|residual - sg(centroid)|^2``, scalar.
    """

    latents: Tensor
    codes: Tensor
    codebook_error: Tensor
    commitment_error: Tensor


class ResidualQuantizer(nn.Module):
    """One table of centroids per level, each choosing the nearest for what is left of a latent.

    The tables start random and small; set them from data before training (`model.compute_codebooks`), since a
    centroid that nobody chooses gets no gradient and stays where it is.

    Args:
        n_centroids: size of each level's table, each at least 1.
        latent_dim: columns of the latents and of every table.

    Example:
        >>> quantizer = ResidualQuantizer((2, 2), latent_dim=1)
        >>> with torch.no_grad():
        ...     _ = quantizer.codebooks[0].copy_(torch.tensor([[0.0], [10.0]]))
        ...     _ = quantizer.codebooks[1].copy_(torch.tensor([[-1.0], [1.0]]))
        >>> codes = quantizer.encode(torch.tensor([[8.7], [0.6]]))
        >>> codes.tolist(), quantizer.decode(codes).tolist()
        ([[1, 0], [0, 1]], [[9.0], [1.0]])

    Reference: van den Oord et al., "Neural discrete representation learning", 2017, eq. 3; Zeghidour et al.,
    "SoundStream", 2021, algorithm 1.
    """

    def __init__(self, n_centroids: Sequence[int], latent_dim: int) -> None:
        super().__init__()
        if len(n_centroids) == 0 or min(n_centroids) < 1:
            raise ValueError(
                f"`n_centroids`: expected one number, at least 1, per level, got {tuple(n_centroids)}."
                " Give for example (256, 256, 256)."
            )
        self.codebooks = nn.ParameterList(
            nn.Parameter(torch.randn(n, latent_dim) / latent_dim) for n in n_centroids
        )

    def forward(self, latents: Tensor) -> Quantized:
        """Quantize latents for training.

        Args:
            latents: (n_samples, latent_dim) float; may have no rows.

        Returns:
            The quantized latents with their codes and the two error sums, at least in float32.

        Numerics: distances in float32 or wider, also under autocast; ties go to the lowest code.
        """
        # Half precision would overflow in squared norms and confuse near neighbours.
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.to(torch.promote_types(latents.dtype, torch.float32))
            residual, quantized, codes = latents, torch.zeros_like(latents), []
            codebook_error = commitment_error = latents.new_zeros(())
            for codebook in self.codebooks:
                code = _nearest(residual.detach(), codebook.detach())
                centroid = functional.embedding(code, codebook)  # (n_samples, latent_dim)
                codebook_error = codebook_error + (residual.detach() - centroid).square().sum()
                residual = residual - centroid.detach()
                commitment_error = commitment_error + residual.square().sum()
                quantized = quantized + centroid.detach()
                codes.append(code)
            straight_through = latents + (quantized - latents).detach()
        return Quantized(straight_through, torch.stack(codes, dim=1), codebook_error, commitment_error)

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Return the codes, (n_samples, n_levels) int64, of (n_samples, latent_dim) latents."""
        codes: Tensor = self(latents).codes
        return codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return the quantized latents of codes.

        Args:
            codes: (n_samples, n) int64 with n at most n_levels; the first n levels are summed.

        Returns:
            (n_samples, latent_dim) float tensor.

        Raises:
            ValueError: more columns than levels.
        """
        if codes.shape[1] > len(self.codebooks):
            raise ValueError(
                f"`codes`: expected at most {len(self.codebooks)} columns, one per level, got {codes.shape[1]}."
                " Leave out what does not come from this quantizer."
            )
        latents: Tensor = self.codebooks[0].new_zeros(codes.shape[0], self.codebooks[0].shape[1])
        for code, codebook in zip(codes.unbind(1), self.codebooks):
            latents = latents + functional.embedding(code, codebook)
        return latents


def _nearest(rows: Tensor, centroids: Tensor) -> Tensor:
    """Return each row's nearest centroid; |c|^2 / 2 - x c orders the centroids as the distance does."""
    scores: Tensor = centroids.square().sum(1) / 2 - rows @ centroids.T
    return scores.argmin(dim=1)
