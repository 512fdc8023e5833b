"""Take tensors out of a checkpoint for those who do not have samestep."""

from __future__ import annotations

import os
from pathlib import Path

from samestep.checkpoint._folder import read_manifest
from samestep.checkpoint._storage import read_tensors, write_part
from samestep.errors import SpecError

__all__ = ["to_safetensors"]


def to_safetensors(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], *, thing: str | None = None
) -> Path:
    """Write the tensors of a checkpoint as one safetensors file, after a check of their digests.

    The checkpoint's own files are safetensors too, one per worker that wrote it; torch's
    ``HuggingFaceStorageReader`` and the safetensors library read them in place. This makes one file of them, in
    which tensors with two names (tied weights) stand under both.

    Args:
        folder: of one checkpoint, such as ``Checkpointer.latest()``.
        out: file to write; replaced if it is there.
        thing: "model" for its tensors alone, under the names of its state_dict(); None for all tensors of all
            things, under ``<thing>.<name>``.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: when the checkpoint is damaged.
        SpecError: when it has no tensors of `thing`.
        OSError: when `out` cannot be written; it is then as it was.
    """
    source, target = Path(folder), Path(out)
    manifest = read_manifest(source)
    names = manifest.names(thing) if thing is not None else [*manifest.tensors, *manifest.aliases]
    if not names:
        raise SpecError(
            f"`thing`: expected one with tensors, of {sorted(manifest.states)}, got {thing!r}.", name="thing"
        )
    first = {name: manifest.aliases.get(name, name) for name in names}
    tensors = read_tensors(source, manifest, list(dict.fromkeys(first.values())))
    prefix = "" if thing is None else f"{thing}."
    named = {name.removeprefix(prefix): tensors[key] for name, key in first.items()}
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write_part(aside, named)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return target
