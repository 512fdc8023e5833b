"""The samples of a run: open what the settings name, check labels, split off the test, measure the pixels.

Where the test samples come from: `test_data` if it is set, else the data's own test part, else `test_share` of the
samples, the same ones for every seed and number of workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep import targets
from samestep.pooling import Pool
from samestep.recipes.image_classification import arrays, idx, image_folder
from samestep.recipes.image_classification.source import Images, Part, as_images, refuse
from samestep.recipes.image_classification.spec import ImageClassificationSpec
from samestep.sharding import sample_order

__all__ = ["Data", "Samples", "pixel_statistics", "read"]

_BLOCK_IMAGES = 1024
_DIGITS = "the built-in digits"


@dataclass(frozen=True)
class Samples:
    """Some of the images with their classes, as a dataset that gives one sample or many at once.

    Attributes:
        images: all images.
        rows: (n,) int64, which of them.
        labels: (n,) int64, class number of each.
    """

    images: Images
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...
    @overload
    def __getitem__(self, index: list[int]) -> tuple[Tensor, Tensor]: ...
    def __getitem__(self, index: int | list[int]) -> tuple[Tensor, int | Tensor]:
        """Return the image (channels, height, width) and class of one sample, or those of several."""
        if isinstance(index, int):
            return torch.from_numpy(self.images.read([int(self.rows[index])])[0]), int(self.labels[index])
        pixels = self.images.read(self.rows[index].tolist())
        return torch.from_numpy(pixels), torch.from_numpy(self.labels[index])

    def fingerprint(self) -> str:
        """Return a digest of images and labels; a run does not go on with other ones."""
        digest = hashlib.sha256(self.images.facts().encode())
        digest.update(self.rows.tobytes() + self.labels.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Data:
    """What a run learns from and is tested on.

    Attributes:
        train: samples to train on.
        test: samples to test on.
        classes: names by class number.
        sources: where they come from, for the manifest.
    """

    train: Samples
    test: Samples
    classes: tuple[str, ...]
    sources: tuple[dict[str, Any], ...]


def read(spec: ImageClassificationSpec) -> Data:
    """Return the samples that the settings name, labels checked; image files are not decoded yet.

    Args:
        spec: settings.

    Raises:
        SpecError: data is missing, damaged, of an unknown kind, or does not fit together. Names the file.
    """
    train, test = _open_digits() if spec.data is None else _open(spec.data, spec.labels, spec)
    if spec.test_data is not None:
        test = _open(spec.test_data, spec.test_labels, spec)[0]
    classes, numbers = np.unique(_checked_labels(train), return_inverse=True)
    if len(classes) < 2:
        refuse(train.path, f"expected labels of at least 2 classes, got only {classes[0]!s}. Give other data")
    names = tuple(str(name) for name in classes)
    everything = Samples(train.images, np.arange(len(numbers)), numbers.astype(np.int64))
    if test is None:
        learned, held_out = _split(everything, spec.test_share, train.path)
        return Data(learned, held_out, names, (_describe(train, "train and test"),))
    return Data(
        everything, _test(train, test, classes), names, (_describe(train, "train"), _describe(test, "test"))
    )


def pixel_statistics(
    samples: Samples, part: tuple[int, int], pool: Pool, each_block: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every channel over all workers' images; decodes each image once.

    Args:
        samples: the same ones on all workers.
        part: rank and world size; a worker reads its part only.
        pool: all workers.
        each_block: called now and then, to show that work goes on.

    Returns:
        (channels,) float32 each, in units of the pixels.

    Raises:
        SpecError: on all workers, when one of them cannot read an image.

    Collective: all workers of `pool`.
    Numerics: exact counts of every value for bytes, two-grid sums for floats; order-free either way.
    """
    first, stop = (len(samples) * (part[0] + more) // part[1] for more in (0, 1))
    channels = samples.images.shape[0]
    counts, floats, problem = torch.zeros(channels, 256, dtype=torch.int64), [], ""
    try:
        for start in range(first, stop, _BLOCK_IMAGES):
            each_block()
            block, _ = samples[list(range(start, min(start + _BLOCK_IMAGES, stop)))]
            if block.dtype != torch.uint8:
                floats.append(block.movedim(1, -1).reshape(-1, channels))
                continue
            for channel in range(channels):
                counts[channel] += torch.bincount(block[:, channel].reshape(-1), minlength=256)
    except Exception as error:
        problem = str(error)
    pool.agree(not problem, problem)
    if samples.images.read([0]).dtype != np.uint8:
        found = targets.normalizer(torch.cat(floats) if floats else torch.zeros(0, channels), pool)
        return found["mean"], found["std"]
    counts = pool(counts)
    values = torch.arange(256, dtype=torch.float64)
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = (shares * values).sum(1)
    variance = (shares * (values - mean[:, None]).square()).sum(1)
    return mean.float(), variance.sqrt().float()


def _open_digits() -> tuple[Part, Part | None]:
    with as_file(files("samestep.recipes.image_classification") / "digits.npz") as path:
        train, test = arrays.parts(path)
    return Part(train.images, train.labels, _DIGITS), test


def _open(name: str, labels: str | None, spec: ImageClassificationSpec) -> tuple[Part, Part | None]:
    """Return the train part and, where the data have one, the test part."""
    path = Path(name)
    if not path.exists():
        refuse(path, "expected a file or folder, got nothing there. Check the path")
    if path.is_dir():
        if any(idx.is_idx(file) for file in path.iterdir()):
            return idx.parts(path)
        return image_folder.parts(path, 1 if spec.grey else 3, spec.image_size)
    if path.suffix == ".npz":
        return arrays.parts(path)
    if path.suffix == ".npy":
        if labels is None:
            refuse(path, "expected a file of labels beside one of images, got none. Set labels=FILE.npy")
        return Part(as_images(path, arrays.load_array(path)), _load_labels(Path(labels)), name), None
    if not idx.is_idx(path):
        refuse(
            path,
            "expected .npz, .npy, an IDX file (-idx3-ubyte, also .gz), or a folder of IDX files or images",
        )
    beside = Path(labels) if labels is not None else idx.labels_beside(path)
    return Part(as_images(path, idx.read(path)), _load_labels(beside), name), None


def _load_labels(path: Path) -> NDArray[Any]:
    return idx.read(path) if idx.is_idx(path) else arrays.load_array(path)


def _checked_labels(part: Part) -> NDArray[Any]:
    labels = part.labels
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (len(part.images),):
        refuse(
            part.path, f"expected {len(part.images):,} labels, one per image, got shape {part.labels.shape}"
        )
    if labels.dtype.kind not in "iuU":
        refuse(part.path, f"expected labels that are integers or strings, got {labels.dtype}. Convert them")
    return labels


def _split(everything: Samples, share: float, path: str) -> tuple[Samples, Samples]:
    n_samples = len(everything)
    n_test = round(share * n_samples)
    if not 0 < n_test < n_samples:
        refuse(
            path,
            f"expected samples for training and test with test_share={share}, got {n_samples}. Set test_data",
        )
    # A fixed order, so that runs with other seeds are tested on the same samples.
    order = sample_order(n_samples, 0, 0)
    chosen = [np.sort(order[n_test:]), np.sort(order[:n_test])]
    learned, held_out = (Samples(everything.images, rows, everything.labels[rows]) for rows in chosen)
    missing = set(everything.labels.tolist()) - set(learned.labels.tolist())
    if missing:
        refuse(
            path,
            f"expected samples of every class for training, got none of {len(missing)} classes. Set test_data",
        )
    return learned, held_out


def _test(train: Part, test: Part, classes: NDArray[Any]) -> Samples:
    labels = _checked_labels(test)
    if labels.dtype.kind.replace("u", "i") != classes.dtype.kind.replace("u", "i"):
        refuse(test.path, f"expected labels like those of {train.path}, {classes.dtype}, got {labels.dtype}")
    unknown = np.setdiff1d(labels, classes)
    if len(unknown):
        refuse(test.path, f"expected only classes of {train.path}, got {unknown[0]!s}. Drop those samples")
    shapes = [(part.images.shape, str(part.images.read([0]).dtype)) for part in (train, test)]
    if shapes[0] != shapes[1]:
        wanted, got = (f"{dtype} of {' x '.join(map(str, shape))}" for shape, dtype in shapes)
        refuse(test.path, f"expected images as in {train.path}, {wanted}, got {got}. Bring them to one shape")
    return Samples(test.images, np.arange(len(labels)), np.searchsorted(classes, labels).astype(np.int64))


def _describe(part: Part, used_for: str) -> dict[str, Any]:
    channels, height, width = part.images.shape
    facts = {
        "path": part.path,
        "for": used_for,
        "images": len(part.images),
        "shape": [channels, height, width],
    }
    return {**facts, "note": part.note} if part.note else facts
