"""Images and labels in numpy's files: one .npz with both, or one .npy each."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.recipes.image_classification.source import Part, as_images, refuse

__all__ = ["load_array", "parts"]

_TRAIN = (("images", "labels"), ("x_train", "y_train"), ("train_images", "train_labels"), ("x", "y"))
_TEST = (("test_images", "test_labels"), ("x_test", "y_test"))


def parts(path: Path) -> tuple[Part, Part | None]:
    """Return what a .npz file holds for training and, if it is there, for the test.

    Args:
        path: file with the arrays ``images`` and ``labels`` (or ``x_train`` and ``y_train``, ``train_images`` and
            ``train_labels``, ``x`` and ``y``), and perhaps ``test_images`` and ``test_labels`` (or ``x_test``,
            ``y_test``).

    Raises:
        SpecError: the file is missing or damaged, lacks a pair, or has arrays that do not do.
    """
    arrays = _load(path)
    if not isinstance(arrays, dict):
        refuse(path, "expected a .npz file of several arrays, got a single one. Name it .npy and set labels")
    train, test = _pair(arrays, _TRAIN), _pair(arrays, _TEST)
    if train is None:
        pairs = "; ".join(" and ".join(pair) for pair in _TRAIN)
        refuse(path, f"expected the arrays {pairs}; got {', '.join(sorted(arrays)) or 'none'}. Rename them")
    return _part(path, arrays, train), None if test is None else _part(path, arrays, test)


def load_array(path: Path) -> NDArray[Any]:
    """Return the one array of a .npy file.

    Raises:
        SpecError: the file is missing, damaged, or holds several arrays.
    """
    array = _load(path)
    if isinstance(array, dict):
        refuse(path, f"expected one array, got {', '.join(sorted(array)) or 'none'}. Give a .npy file")
    return array


def _load(path: Path) -> NDArray[Any] | dict[str, NDArray[Any]]:
    try:
        # Opened here: numpy leaves a damaged file open.
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return content
            return {name: content[name] for name in content.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        refuse(
            path, f"expected a whole .npy or .npz file without pickled objects, got: {reason}. Write it anew"
        )
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror or error}). Check the path")


def _pair(arrays: dict[str, NDArray[Any]], pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if all(name in arrays for name in pair)), None)


def _part(path: Path, arrays: dict[str, NDArray[Any]], pair: tuple[str, str]) -> Part:
    images, labels = pair
    return Part(as_images(path, arrays[images], images), arrays[labels], f"{path} ({images})")
