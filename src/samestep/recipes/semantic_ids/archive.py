"""Read rows of a matrix in an ``.npz`` archive without holding the whole matrix."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.recipes.semantic_ids.source import refuse

__all__ = ["Member"]

_CHUNK_BYTES = 1 << 20


class Member:
    """A float matrix inside an archive, of which slices of rows can be read.

    Args:
        path: the archive.
        name: key of the matrix.

    Attributes:
        shape: of the array.
        dtype: of the array.
        ndim: its dimensions.

    Raises:
        ValueError: the entry is no array of numbers or text, or is damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez_compressed(f"{folder}/a.npz", x=np.arange(8.0).reshape(4, 2))
        ...     Member(Path(folder) / "a.npz", "x")[1:2]
        array([[2., 3.]])
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            self.shape, self._fortran, self.dtype = read(file)
            self._start = file.tell()
        self.ndim = len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        with np.load(self._path, allow_pickle=False) as archive:
            whole: NDArray[Any] = archive[self._name]
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        try:
            return self._read(*rows.indices(self.shape[0])[:2])
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            refuse(self._path, f"expected a readable .npz file, got: {error}. Write the file again")

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        if self._fortran or self.ndim != 2 or self.dtype.hasobject:
            return np.asarray(self)[start:stop]  # rows do not lie side by side
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        found = np.empty((max(stop - start, 0), *self.shape[1:]), dtype=self.dtype)
        target: NDArray[np.uint8] = found.reshape(-1).view(np.uint8)
        with zipfile.ZipFile(self._path) as archive, archive.open(f"{self._name}.npy") as file:
            # Seeking is quick where nothing is compressed, and unpacks into a small buffer elsewhere.
            file.seek(self._start + start * row_bytes)
            done = 0
            while done < len(target):
                chunk = file.read(min(_CHUNK_BYTES, len(target) - done))
                if not chunk:
                    raise ValueError(f"{self._name} ends after {done} of {len(target)} bytes")
                target[done : done + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
                done += len(chunk)
            if stop == self.shape[0] and file.read(1):
                raise ValueError(f"{self._name} is longer than its header says")
        return found
