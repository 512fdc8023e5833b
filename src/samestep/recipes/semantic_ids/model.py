"""The network of the recipe: a residual-quantized autoencoder.

::

    x ─ standardize ─ encoder ─> latent ─ quantizer ─> quantized latent ─ decoder ─> x again
                                             └─> codes, one per level

Encoder and decoder are each a straight line plus a curve, an MLP that starts at zero. `initial` lays the lines
along the principal axes of the data and puts the centroids into the latents that come out; training then bends the
curves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samestep.recipes.semantic_ids.quantizer import ResidualQuantizer

__all__ = ["RQVAE", "RQVAEOutput", "Rows", "as_tensor", "loss_sums"]

Rows: TypeAlias = Tensor | NDArray[Any]

_BLOCK_ROWS = 1024


class RQVAEOutput(NamedTuple):
    """What a forward pass gives; the scalars are sums over the samples.

    Attributes:
        reconstruction: (n_samples, dim) in the units of the input.
        codes: (n_samples, n_levels) int64.
        loss: ``reconstruction_error + codebook_error + beta * commitment_error``, with gradient.
        reconstruction_error: squared error relative to the data's variance, 1.0 per sample for guessing the mean.
        commitment_error: squared distance from the residuals to their centroids over all levels, same units. The
            codebook error is the same number; the two differ in what they move.
    """

    reconstruction: Tensor
    codes: Tensor
    loss: Tensor
    reconstruction_error: Tensor
    commitment_error: Tensor


class RQVAE(nn.Module):
    """Autoencoder with residual quantization between encoder and decoder: items in, short codes out.

    The defaults suit some ten thousand items with three levels of 256 codes.

    Args:
        dim: columns of the input.
        n_centroids: size of each level's codebook.
        latent_dim: columns of the latents, at most `dim`. Fewer give evener use of the codes, more give a
            smaller reconstruction error.
        hidden: widths of the curves' layers, from the input to the latents; the decoder mirrors them.
        beta: weight of the commitment error in the loss.

    Raises:
        ValueError: latent_dim not in 1 … dim, or no codebook.

    Example:
        >>> model = RQVAE(dim=8, n_centroids=(4, 4), latent_dim=2, hidden=(16,))
        >>> codes = model.encode(torch.randn(10, 8))
        >>> tuple(codes.shape), tuple(model.decode(codes).shape)
        ((10, 2), (10, 8))

    Reference: Rajput et al., "Recommender systems with generative retrieval", 2023, section 3.1.
    """

    center: Tensor
    scale: Tensor

    def __init__(
        self,
        dim: int,
        n_centroids: Sequence[int] = (256, 256, 256),
        latent_dim: int = 64,
        hidden: Sequence[int] = (512,),
        beta: float = 0.15,
    ) -> None:
        super().__init__()
        if not 1 <= latent_dim <= dim:
            raise ValueError(
                f"`latent_dim`: expected 1 to {dim}, the input's dim, got {latent_dim}. Choose one in between."
            )
        self.beta = beta
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(()))
        self.encoder = _LinePlusCurve([dim, *hidden, latent_dim])
        self.quantizer = ResidualQuantizer(n_centroids, latent_dim)
        self.decoder = _LinePlusCurve([latent_dim, *reversed(hidden), dim])

    @property
    def dim(self) -> int:
        """Columns of the input."""
        return self.center.shape[0]

    def forward(self, x: Tensor) -> RQVAEOutput:
        """Encode, quantize and reconstruct samples.

        Args:
            x: (n_samples, dim) float, as in the file; standardized in here. May have no rows.

        Returns:
            Reconstruction, codes, loss and its parts, all sums over the samples.

        Reference: van den Oord et al., "Neural discrete representation learning", 2017, eq. 3.
        """
        standard = self.standardize(x)
        quantized = self.quantizer(self.encoder(standard))
        decoded = self.decoder(quantized.latents)
        reconstruction_error = (decoded - standard).square().sum() / self.dim
        commitment_error = quantized.commitment_error / self.dim
        loss = reconstruction_error + quantized.codebook_error / self.dim + self.beta * commitment_error
        return RQVAEOutput(
            decoded / self.scale + self.center, quantized.codes, loss, reconstruction_error, commitment_error
        )

    def standardize(self, x: Tensor) -> Tensor:
        """Return x around the data's mean, scaled to a mean square of 1; one scale for all columns."""
        return (x.to(self.center.dtype) - self.center) * self.scale

    def latents(self, x: Rows) -> Tensor:
        """Return the latents of many rows, without gradient, in blocks of one fixed shape.

        Args:
            x: (n_samples, dim) float tensor or array (a memory map is read block by block).

        Returns:
            (n_samples, latent_dim) float tensor; a row's bits do not depend on the rows around it.
        """
        return self._in_blocks(x, lambda block: self.encoder(self.standardize(block)))

    def encode(self, x: Rows) -> Tensor:
        """Return the codes, (n_samples, n_levels) int64, of rows as `latents` takes them."""
        return self._in_blocks(x, lambda block: self.quantizer.encode(self.encoder(self.standardize(block))))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, in the units of the input.

        Args:
            codes: (n_samples, n) int64; with n below n_levels, what the first n levels say.

        Returns:
            (n_samples, dim) float tensor.
        """
        decoded: Tensor = self.decoder(self.quantizer.decode(codes))
        return decoded / self.scale + self.center

    @torch.no_grad()
    def _in_blocks(self, x: Rows, function: Callable[[Tensor], Tensor]) -> Tensor:
        # A matrix product may add in another order when its shape changes: every block is full.
        parts = []
        for start in range(0, max(len(x), 1), _BLOCK_ROWS):
            rows = as_tensor(x[start : start + _BLOCK_ROWS], self.center)
            block = rows.new_zeros(_BLOCK_ROWS, self.dim)
            block[: len(rows)] = rows
            parts.append(function(block)[: len(rows)])
        return torch.cat(parts)


def loss_sums(model: nn.Module, x: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Return the loss of one shard as sums over its samples, for `step.TrainStep`.

    Args:
        model: an `RQVAE`, or a wrapper with the same forward, such as DDP.
        x: (n_samples, dim) the shard's rows.

    Returns:
        loss_sum: scalar with gradient.
        count: n_samples.
        sums: further sums by name, without gradient: reconstruction_error, commitment_error.

    Example:
        >>> loss_sum, count, sums = loss_sums(RQVAE(dim=4, n_centroids=(2,), latent_dim=1), torch.zeros(3, 4))
        >>> count, sorted(sums)
        (3, ['commitment_error', 'reconstruction_error'])
    """
    output: RQVAEOutput = model(x)
    sums = {
        "commitment_error": output.commitment_error.detach(),
        "reconstruction_error": output.reconstruction_error.detach(),
    }
    return output.loss, x.shape[0], sums


class _LinePlusCurve(nn.Module):
    """A linear map plus an MLP whose last layer starts at zero, so that the line alone acts at first."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.line = nn.Linear(widths[0], widths[-1], bias=False)
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out), nn.SiLU()]
        last = nn.Linear(widths[-2], widths[-1])
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.curve = nn.Sequential(*layers[:-2], last)

    def forward(self, x: Tensor) -> Tensor:
        line: Tensor = self.line(x)
        curve: Tensor = self.curve(x)
        return line + curve


def as_tensor(rows: Rows, like: Tensor) -> Tensor:
    """Return some rows of a tensor, an array or a memory map in the dtype and on the device of `like`.

    Args:
        rows: (n_rows, dim) tensor or array; an array is copied.
        like: any tensor.

    Returns:
        (n_rows, dim) tensor.

    Example:
        >>> as_tensor(np.ones((1, 2), dtype=np.float16), torch.zeros(()))
        tensor([[1., 1.]])
    """
    tensor = rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))
    return tensor.to(like)
