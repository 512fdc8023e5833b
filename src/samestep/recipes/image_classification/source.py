"""What opened images look like, whatever they were read from, and how a file that cannot be used is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from samestep.errors import SpecError

__all__ = ["ArrayImages", "Images", "Part", "as_images", "refuse"]


class Images(Protocol):
    """Images of one shape that can be read in any order."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        ...

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def read(self, rows: Sequence[int]) -> NDArray[Any]:
        """Return (n_rows, channels, height, width) uint8 or float32."""
        ...

    def facts(self) -> str:
        """Return a text that is another one for other images, to tell data sets apart."""
        ...


@dataclass(frozen=True)
class Part:
    """Images with their labels as found in the data, for training or for the test.

    Attributes:
        images: the images.
        labels: (n,) integers or strings.
        path: where they come from, for messages and the manifest.
        note: what was found besides, or "".
    """

    images: Images
    labels: NDArray[Any]
    path: str
    note: str = ""


class ArrayImages:
    """Images in memory.

    Args:
        array: (n, channels, height, width) uint8 or float32.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self._array.shape[1:]
        return channels, height, width

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._array)

    def read(self, rows: Sequence[int]) -> NDArray[Any]:
        """Return (n_rows, channels, height, width) in the array's dtype."""
        found: NDArray[Any] = self._array[np.asarray(rows, dtype=np.int64)]
        return found

    def facts(self) -> str:
        """Return a digest of all pixels."""
        import hashlib

        return hashlib.sha256(np.ascontiguousarray(self._array).data).hexdigest()


def refuse(path: str | Path, finding: str, member: str = "") -> NoReturn:
    """Raise the error for data that cannot be used.

    Args:
        path: file or folder, named first in the message.
        finding: what was expected, what was found and what to do, without the last full stop.
        member: name of an array inside the file, if it has several.

    Raises:
        SpecError: always; its `name` is the path.
    """
    where = f"`{path}`, array `{member}`" if member else f"`{path}`"
    raise SpecError(f"{where}: {finding}.", name=str(path))


def as_images(path: str | Path, array: NDArray[Any], member: str = "") -> ArrayImages:
    """Return an array as images: channels moved to the front, floats checked.

    Args:
        path: where it comes from, for messages.
        array: (n, height, width), (n, height, width, channels) or (n, channels, height, width), with 1, 3 or 4
            channels; unsigned bytes, or floats, which become float32.
        member: name of the array inside the file, if it has several.

    Raises:
        SpecError: another shape or dtype, no image, or a value that is not finite.

    Example:
        >>> as_images("here", np.zeros((5, 8, 8, 3), dtype=np.uint8)).shape
        (3, 8, 8)
    """
    if array.ndim == 3:
        # Not array[:, None]: its new axis has stride 0, from which torch concludes that channels stand last.
        array = array.reshape(len(array), 1, *array.shape[1:])
    elif array.ndim == 4 and array.shape[3] in (1, 3, 4):
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim != 4 or array.shape[1] not in (1, 3, 4):
        refuse(
            path,
            "expected images of shape (n, height, width), (n, height, width, channels) or (n, channels, height, "
            f"width) with 1, 3 or 4 channels, got {array.shape}. Reshape them",
            member,
        )
    if 0 in array.shape:
        refuse(
            path, f"expected at least one image with pixels, got shape {array.shape}. Give other data", member
        )
    if array.dtype == np.uint8:
        return ArrayImages(np.ascontiguousarray(array))
    if array.dtype.kind != "f":
        refuse(path, f"expected images of uint8 or floats, got {array.dtype}. Convert them", member)
    bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
    if len(bad):
        refuse(
            path, f"expected finite pixels, got NaN or infinity in image {bad[0]}. Mend or drop it", member
        )
    return ArrayImages(np.ascontiguousarray(array, dtype=np.float32))
