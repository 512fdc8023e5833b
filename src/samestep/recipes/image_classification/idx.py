"""IDX files, the format of MNIST and its successors, packed by gzip or not.

::

    0 0 dtype n_dims │ n_dims sizes, 4 bytes each, big-endian │ the elements, row by row, big-endian

A folder of them holds images and labels in separate files: ``train-images-idx3-ubyte[.gz]``,
``train-labels-idx1-ubyte[.gz]`` and the test's ``t10k-images-...`` and ``t10k-labels-...``.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.recipes.image_classification.source import Part, as_images, refuse

__all__ = ["is_idx", "labels_beside", "parts", "read"]

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def is_idx(path: Path) -> bool:
    """Return whether a file's name is that of an IDX file.

    Example:
        >>> is_idx(Path("train-images-idx3-ubyte.gz")), is_idx(Path("train.idx3-ubyte")), is_idx(Path("a.npz"))
        (True, True, False)
    """
    name = path.name.removesuffix(".gz")
    return any(mark in name for mark in ("-idx", ".idx"))


def read(path: Path) -> NDArray[Any]:
    """Return the array in an IDX file.

    Args:
        path: the file; unpacked on the way if it begins as gzip does.

    Returns:
        Array of the sizes in the header, in the machine's byte order.

    Raises:
        SpecError: the file is missing, no IDX file, damaged, or shorter or longer than its header says.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        refuse(
            path, f"expected a whole gzip file, got one that is cut off or damaged ({error}). Get it again"
        )
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror or error}). Check the path")
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES or not content[3]:
        refuse(
            path,
            f"expected an IDX file, which begins with 0, 0, dtype, dimensions; got {content[:4]!r}. Check it",
        )
    dtype, start = np.dtype(_DTYPES[content[2]]), 4 + 4 * content[3]
    if len(content) < start:
        refuse(
            path,
            f"expected a header of {start} bytes, got {len(content)} bytes. The file is cut off: get it again",
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", content[3], 4))
    wanted, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if wanted != found:
        fault = "The file is cut off" if found < wanted else "Something else is in it"
        refuse(path, f"expected {wanted:,} bytes for shape {shape}, got {found:,}. {fault}: get it again")
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def parts(folder: Path) -> tuple[Part, Part | None]:
    """Return what a folder of IDX files holds for training and, if it is there, for the test.

    Args:
        folder: with one set of training files, and at most one set of test files.

    Raises:
        SpecError: images or labels are missing, a file fits twice, or a file cannot be used.
    """
    files: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir()):
        kind = next((kind for kind in ("images", "labels") if kind in path.name), None)
        if not is_idx(path) or kind is None:
            continue
        key = ("train" if "train" in path.name else "test", kind)
        # Some tools leave the packed file beside the unpacked one.
        if key in files and path.name.removesuffix(".gz") != files[key].name:
            refuse(
                folder,
                f"expected one file of {key[0]} {kind}, got {files[key].name} and {path.name}. Keep one",
            )
        files.setdefault(key, path)
    for kind in ("images", "labels"):
        if ("train", kind) not in files:
            names = ", ".join(sorted(path.name for path in files.values())) or "no IDX file"
            refuse(folder, f"expected train-{kind}-idx*-ubyte, got {names}. Add it")
    train = _part(files["train", "images"], files["train", "labels"])
    missing = [kind for kind in ("images", "labels") if ("test", kind) not in files]
    if len(missing) == 1:
        refuse(
            folder,
            f"expected images and labels for the test, got no {missing[0]}. Add them, or drop the other",
        )
    return train, None if missing else _part(files["test", "images"], files["test", "labels"])


def labels_beside(images: Path) -> Path:
    """Return where the labels of a single file of images should be: ``labels`` for ``images``, one dimension.

    Example:
        >>> labels_beside(Path("train-images-idx3-ubyte.gz")).name
        'train-labels-idx1-ubyte.gz'
    """
    return images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))


def _part(images: Path, labels: Path) -> Part:
    return Part(as_images(images, read(images)), read(labels), str(images))
