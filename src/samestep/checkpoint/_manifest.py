"""The manifest of a checkpoint: what is in which file, with a digest of everything, itself included."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from samestep.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "NAME", "Manifest", "TensorEntry", "dtype_name", "dtype_of"]

NAME = "manifest.json"
FORMAT_VERSION = 1
_FORMAT = "samestep checkpoint"
# Names of dtypes in the safetensors format.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_BY_DTYPE = {getattr(torch, name): code for code, name in _DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies and what it must be.

    Attributes:
        file: name of a file in the folder.
        dtype: in the words of safetensors, such as "F32".
        shape: its sizes.
        offset: of its first byte in the file.
        n_bytes: its length there.
        digest: 32 hexadecimal digits, `fingerprint.hexdigest` of it.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint knows but the values of its tensors.

    Attributes:
        step: updates applied.
        samples_consumed: of the loader's epoch, or None without a loader.
        world_size: workers that saved it; says nothing about who may load it.
        versions: of samestep and torch.
        files: length in bytes and digest by file name. The digest covers the file's header and the digests of its
            tensors, so that each byte is under exactly one.
        tensors: by name, ``<thing>.<name in its state>``.
        aliases: names of tensors that share memory with one in `tensors`.
        states: by thing, what is not a tensor.
    """

    step: int
    samples_consumed: int | None
    world_size: int
    versions: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    states: Mapping[str, Any]

    def to_text(self) -> str:
        """Return the manifest as the text of its file; the last entry is a digest of the others."""
        content = {"format": _FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return _signed(content)

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """Return the manifest that `to_text` wrote.

        Raises:
            CheckpointError: when it is of another format version, or a single byte is not as it was written.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{NAME}: not JSON ({error}).", name=NAME) from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise CheckpointError(f"{NAME}: not the manifest of a samestep checkpoint.", name=NAME)
        content.pop("digest", None)
        if text != _signed(content):
            raise CheckpointError(f"{NAME}: its digest is not that of its content.", name=NAME)
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{NAME}: expected format_version {FORMAT_VERSION}, got {version!r}. No option allows this: go on "
                f"with the samestep that wrote it ({content.get('versions', {}).get('samestep')}).",
                name="format_version",
            )
        del content["format"]
        content["tensors"] = {
            name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
            for name, entry in content["tensors"].items()
        }
        return cls(**content)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor, also under its second names."""
        return self.tensors[self.aliases.get(name, name)]

    def names(self, thing: str) -> list[str]:
        """Return the names of the tensors that belong to a thing."""
        return [name for name in (*self.tensors, *self.aliases) if name.startswith(f"{thing}.")]


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return a dtype in the words of safetensors.

    Raises:
        CheckpointError: when the format has none for it.
    """
    if dtype not in _BY_DTYPE:
        raise CheckpointError(
            f"`{name}`: expected a dtype that safetensors files can hold, got {dtype}. Save it as another one.",
            name=name,
        )
    return _BY_DTYPE[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Return the dtype of a word of safetensors."""
    dtype = getattr(torch, _DTYPES[code])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _signed(content: dict[str, Any]) -> str:
    # One line per tensor would be kinder to the eye, but json knows only all or nothing.
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "digest": digest}, indent=1) + "\n"
