"""Image files in one folder per class, decoded when they are needed.

::

    data/cat/1.png  data/cat/2.jpg  data/dog/1.png          test samples are held out of these
    data/train/cat/1.png  ...       data/test/cat/7.png     or have a folder of their own (test, val or valid)
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.recipes.image_classification.source import Part, refuse

__all__ = ["FolderImages", "parts"]

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_TEST_FOLDERS = ("test", "val", "valid")


class FolderImages:
    """Image files of one shape.

    Args:
        paths: the files.
        root: folder that the names in `facts` are relative to.
        channels: 1 for grey, 3 for colour; every image is converted.
        size: height and width that every image is brought to, by its shorter side and a cut around the middle;
            None when all have one size already.
    """

    def __init__(self, paths: Sequence[Path], root: Path, channels: int, size: int | None) -> None:
        self._paths, self._root = list(paths), root
        self._channels, self._resize = channels, size
        self._height, self._width = (size, size) if size is not None else _size_of(self._paths[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self._channels, self._height, self._width

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._paths)

    def read(self, rows: Sequence[int]) -> NDArray[Any]:
        """Return (n_rows, channels, height, width) uint8.

        Raises:
            SpecError: a file cannot be decoded, or has another size than the first and `size` is None.
        """
        return np.stack([self._decode(self._paths[row]) for row in rows])

    def facts(self) -> str:
        """Return a digest of the names and sizes in bytes of all files."""
        digest = hashlib.sha256(repr((self.shape, self._resize)).encode())
        for path in self._paths:
            digest.update(f"{path.relative_to(self._root)} {path.stat().st_size}\n".encode())
        return digest.hexdigest()

    def _decode(self, path: Path) -> NDArray[Any]:
        from PIL import Image

        try:
            with warnings.catch_warnings(), Image.open(path) as image:
                # A picture of absurd size is refused, whatever the caller does with warnings.
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image.load()
                plain = image.convert("RGBA") if "transparency" in image.info else image
                plain = plain.convert("L" if self._channels == 1 else "RGB")
                if self._resize is not None:
                    plain = _fit(plain, self._resize)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Warning) as error:
            refuse(
                path, f"expected an image, got one that cannot be decoded ({error}). Mend or drop the file"
            )
        if plain.size != (self._width, self._height):
            got = f"{plain.size[0]} x {plain.size[1]}"
            wanted = f"{self._width} x {self._height} pixels as in {self._paths[0].name}"
            refuse(path, f"expected {wanted}, got {got}. Set image_size to bring all images to one size")
        pixels = np.asarray(plain, dtype=np.uint8)
        return pixels[None] if self._channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def parts(folder: Path, channels: int, size: int | None) -> tuple[Part, Part | None]:
    """Return the images under a folder for training and, if they have a folder of their own, for the test.

    Args:
        folder: holds a folder per class, or the folders train and test (or val, valid), which do.
        channels: 1 for grey, 3 for colour.
        size: see `FolderImages`.

    Raises:
        SpecError: no classes, a class without images, or the first image cannot be read.
    """
    if not (folder / "train").is_dir():
        return _part(folder, channels, size), None
    tests = [folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()]
    if len(tests) > 1:
        names = " and ".join(path.name for path in tests)
        refuse(
            folder, f"expected one folder of test images, got {names}. Set data to train and test_data to one"
        )
    return _part(folder / "train", channels, size), _part(tests[0], channels, size) if tests else None


def _part(folder: Path, channels: int, size: int | None) -> Part:
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not classes:
        refuse(folder, "expected IDX files or a folder of images per class, got neither. Check the path")
    paths: list[Path] = []
    labels: list[str] = []
    ignored = 0
    for each in classes:
        files = sorted(path for path in each.rglob("*") if path.is_file())
        images = [path for path in files if path.suffix.lower() in _SUFFIXES]
        if not images:
            refuse(
                each,
                f"expected images ({', '.join(sorted(_SUFFIXES))}), got {len(files)} other files. Add some",
            )
        ignored += len(files) - len(images)
        paths += images
        labels += [each.name] * len(images)
    note = f"{ignored} files that are no images were left out" if ignored else ""
    return Part(FolderImages(paths, folder, channels, size), np.array(labels), str(folder), note)


def _size_of(path: Path) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError) as error:
        refuse(path, f"expected an image, got one that cannot be decoded ({error}). Mend or drop the file")


def _fit(image: Any, size: int) -> Any:
    """Return an image scaled so that its shorter side is `size`, and cut around the middle to a square."""
    from PIL import Image

    short = min(image.size)
    width, height = (max(size, round(side * size / short)) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return scaled.crop((left, top, left + size, top + size))
