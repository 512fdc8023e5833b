"""The folder of a run's checkpoints: names, publication in one step, and which of them are whole.

::

    checkpoints/
        step-0000000200/        complete: it got this name after its last byte was safe
            manifest.json       written last
            tensors-0-of-2.safetensors
            tensors-1-of-2.safetensors
        step-0000000200.1/      step 200, saved again; the higher number counts
        .saving-3f9c01ab/       a save that goes on, or was cut off; never read, removed by the next save
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint._manifest import NAME, Manifest
from samestep.errors import CheckpointError

__all__ = ["ASIDE", "Found", "clean", "find", "prune", "publish", "read_manifest"]

ASIDE = ".saving-"
_PATTERN = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True)
class Found:
    """A checkpoint in the folder.

    Attributes:
        step: updates applied when it was saved.
        path: its folder.
        problem: what is damaged, in words; empty when nothing is, as far as was looked.
        foreign: whether it is whole, but of another format version; it is then never passed over, nor removed.
    """

    step: int
    path: Path
    problem: str = ""
    foreign: bool = False


def find(folder: Path) -> list[Found]:
    """Return the checkpoints of a folder, newest first, after a look at manifests and file lengths only.

    Raises:
        OSError: when the folder is there and cannot be read.
    """
    if not folder.exists():
        return []
    numbered = [(match, path) for path in folder.iterdir() if (match := _PATTERN.fullmatch(path.name))]
    numbered.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)), reverse=True)
    found = []
    for match, path in numbered:
        step, problem, foreign = int(match[1]), "", False
        try:
            manifest = read_manifest(path)
            if manifest.step != step:
                problem = f"{NAME}: it is of step {manifest.step}, its folder is called {path.name}."
        except CheckpointError as error:
            problem, foreign = error.message, error.name == "format_version"
        found.append(Found(step, path, problem, foreign))
    return found


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are there and have their lengths.

    Raises:
        CheckpointError: what is missing or damaged.
    """
    try:
        text = (path / NAME).read_bytes().decode()
        manifest = Manifest.from_text(text)
        for name, facts in manifest.files.items():
            n_bytes = (path / name).stat().st_size
            if n_bytes != facts["n_bytes"]:
                raise CheckpointError(f"{name}: expected {facts['n_bytes']} bytes, got {n_bytes}.", name=name)
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise CheckpointError(f"{name}: missing.", name=name) from error
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror or error}.", name=path.name) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{NAME}: not text ({error}).", name=NAME) from error
    return manifest


def publish(aside: Path, manifest: Manifest) -> Path:
    """Write the manifest into a folder whose files are safe, and give the folder its name.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: as the disk says; nothing of that name is then there.
    """
    with open(aside / NAME, "xb") as file:
        file.write(manifest.to_text().encode())
        file.flush()
        os.fsync(file.fileno())
    _sync(aside)
    folder = aside.parent
    name = f"step-{manifest.step:010d}"
    taken = [match for path in folder.iterdir() if (match := _PATTERN.fullmatch(path.name))]
    numbers = [int(match[2] or 0) for match in taken if int(match[1]) == manifest.step]
    target = folder / (f"{name}.{max(numbers) + 1}" if numbers else name)
    os.rename(aside, target)
    _sync(folder)
    return target


def prune(folder: Path, keep: int) -> None:
    """Remove what is older than the newest `keep` usable checkpoints, and earlier saves of the same steps.

    Raises:
        OSError: as the disk says.
    """
    steps: list[int] = []
    for found in find(folder):
        if found.foreign:
            continue
        if len(steps) >= keep or found.step in steps:
            remove(found.path)
        elif not found.problem:
            steps.append(found.step)


def remove(path: Path) -> None:
    """Remove a checkpoint; it stops to be one before its first byte goes."""
    gone = path.with_name(f"{ASIDE}{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def clean(folder: Path) -> None:
    """Remove what saves that were cut off have left.

    Raises:
        OSError: as the disk says.
    """
    for path in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
