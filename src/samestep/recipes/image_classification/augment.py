"""Random shifts and mirror images of single samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Augment"]


@dataclass(frozen=True)
class Augment:
    """Moves an image and mirrors it, as a generator of the sample's own decides.

    Attributes:
        shift: pixels, up to which an image is moved along each axis; what comes in is black (0).
        flip: whether every other image is mirrored left and right.

    Example:
        >>> image = torch.arange(4.0).reshape(1, 2, 2)
        >>> augment = Augment(shift=0, flip=True)
        >>> images = [augment((image, 0), torch.Generator().manual_seed(seed))[0] for seed in range(8)]
        >>> {tuple(image.flatten().tolist()) for image in images} == {(0.0, 1.0, 2.0, 3.0), (1.0, 0.0, 3.0, 2.0)}
        True
    """

    shift: int
    flip: bool

    def __call__(self, sample: tuple[Tensor, int], generator: torch.Generator) -> tuple[Tensor, int]:
        """Return the sample changed.

        Args:
            sample: image (channels, height, width) and class.
            generator: decides; drawn from in the same order for every image.

        Returns:
            Image of the same shape and dtype, and the class.
        """
        image, label = sample
        if self.shift:
            down, right = torch.randint(-self.shift, self.shift + 1, (2,), generator=generator).tolist()
            image = _moved(image, down, right)
        if self.flip and bool(torch.rand((), generator=generator) < 0.5):
            image = image.flip(-1)
        return image, label


def _moved(image: Tensor, down: int, right: int) -> Tensor:
    height, width = image.shape[-2:]
    result = torch.zeros_like(image)
    to_rows, from_rows = _overlap(height, down)
    to_columns, from_columns = _overlap(width, right)
    result[..., to_rows, to_columns] = image[..., from_rows, from_columns]
    return result


def _overlap(size: int, offset: int) -> tuple[slice, slice]:
    """Return where what stays inside goes, and where it comes from."""
    kept = max(0, size - abs(offset))
    start = max(0, offset)
    source = max(0, -offset)
    return slice(start, start + kept), slice(source, source + kept)
