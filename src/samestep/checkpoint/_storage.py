"""The tensors of a checkpoint on disk: torch's distributed checkpoint (DCP) over safetensors files, without pickle.

DCP's planner says which worker writes what: every tensor once, the bytes spread evenly. Its own storage keeps that
plan in a pickle, which loading would have to run. Here each worker streams its part into one safetensors file, and
what the plan says stands in our manifest instead. A second thread takes the digests meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from samestep import fingerprint
from samestep.checkpoint._manifest import Manifest, TensorEntry, dtype_name, dtype_of
from samestep.errors import CheckpointError

__all__ = ["file_digest", "plan_parts", "read_tensors", "verify", "write_part"]

_ALIGNMENT = 64
_BATCH_BYTES = 1 << 26
_VERIFY_BYTES = 1 << 28  # held in memory at a time by a mere check
_CHUNK = 1 << 30  # the kernel moves at most 2 GiB at a time


def plan_parts(tensors: Mapping[str, Tensor], world_size: int) -> list[list[str]]:
    """Return the names of the tensors that each worker writes, by rank.

    Every worker holds every tensor, so that each can work out the common plan alone and nothing need be sent.

    Args:
        tensors: by name, the same names and shapes on all workers.
        world_size: number of workers.
    """
    if world_size == 1:
        return [list(tensors)]
    # Imported here because DTensor and sympy come with it: seconds that a restart need not pay.
    from torch.distributed.checkpoint import DefaultSavePlanner

    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    local = planner.create_local_plan()
    shared, _ = planner.create_global_plan([local] * world_size)
    return [[item.index.fqn for item in plan.items] for plan in shared]


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """Write tensors as one safetensors file that lasts through a power cut.

    Args:
        path: of the file; must not exist.
        tensors: by name.

    Returns:
        Entries of the tensors, and the file's entry of the manifest.

    Raises:
        OSError: as the disk says.
    """
    header, offsets = _header(tensors)
    with _Digests() as taking, open(path, "xb", buffering=0) as file:
        _write(file.fileno(), memoryview(header))
        for name, tensor in tensors.items():
            on_host = tensor.cpu().contiguous()
            taking.add(name, on_host)
            _write(file.fileno(), _bytes(on_host))
        os.fsync(file.fileno())
        digests = taking.result()
    entries = {
        name: TensorEntry(
            path.name, dtype_name(t.dtype, name), tuple(t.shape), offsets[name], _n_bytes(t), digests[name]
        )
        for name, t in tensors.items()
    }
    n_bytes = len(header) + sum(map(_n_bytes, tensors.values()))
    return entries, {"n_bytes": n_bytes, "digest": file_digest(header, digests.values())}


def read_tensors(folder: Path, manifest: Manifest, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return tensors of a checkpoint as new CPU tensors, after a check of every digest on the way.

    Args:
        folder: of the checkpoint.
        manifest: its own.
        wanted: names of the tensors to return; files without any are left alone.

    Raises:
        CheckpointError: when a file is missing, cut short, or not what was written; says which.
    """
    found: dict[str, Tensor] = {}
    entries = manifest.tensors
    for name, facts in manifest.files.items():
        mine = {key: entries[key] for key in wanted if entries[key].file == name}
        if mine:
            all_digests = [entry.digest for entry in entries.values() if entry.file == name]
            found.update(_read_file(folder / name, facts, mine, all_digests))
    return found


def verify(folder: Path, manifest: Manifest) -> None:
    """Check every byte of a checkpoint's tensors.

    Raises:
        CheckpointError: what is damaged.
    """
    batch: list[str] = []
    n_bytes = 0
    for name, entry in manifest.tensors.items():
        if batch and n_bytes + entry.n_bytes > _VERIFY_BYTES:
            read_tensors(folder, manifest, batch)
            batch, n_bytes = [], 0
        batch.append(name)
        n_bytes += entry.n_bytes
    read_tensors(folder, manifest, batch)


def file_digest(header: bytes, digests: Any) -> str:
    """Return the digest of a file from its header and its tensors' digests, in order."""
    return hashlib.blake2b(header + "".join(digests).encode(), digest_size=16).hexdigest()


def _read_file(
    path: Path,
    facts: Mapping[str, Any],
    entries: Mapping[str, TensorEntry],
    all_digests: Sequence[str],
) -> dict[str, Tensor]:
    try:
        with _Digests() as taking, open(path, "rb", buffering=0) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes != facts["n_bytes"]:
                raise _damaged(path, f"expected {facts['n_bytes']} bytes, got {n_bytes}")
            length = int.from_bytes(_read(file.fileno(), bytearray(8), path), "little")
            if length > n_bytes:
                raise _damaged(path, f"its header says {length} bytes of {n_bytes}")
            rest = _read(file.fileno(), bytearray(length), path)
            if file_digest(length.to_bytes(8, "little") + rest, all_digests) != facts["digest"]:
                raise _damaged(path, "its header is not the one that was written")
            found: dict[str, Tensor] = {}
            for name, entry in sorted(entries.items(), key=lambda pair: pair[1].offset):
                found[name] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
                file.seek(entry.offset)
                _read(file.fileno(), _bytes(found[name]), path)
                taking.add(name, found[name])
            for name, digest in taking.result().items():
                if digest != entries[name].digest:
                    raise _damaged(path, f"the values of `{name}` are not those that were written", name)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    return found


class _Digests:
    """Takes the digests of tensors in a second thread, many at a time, which is faster than one by one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._futures: list[Future[dict[str, str]]] = []
        self._batch: dict[str, Tensor] = {}
        self._n_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one more; it must not change until `result`."""
        self._batch[name] = tensor
        self._n_bytes += _n_bytes(tensor)
        if self._n_bytes >= _BATCH_BYTES:
            self._send()

    def result(self) -> dict[str, str]:
        """Return all digests by name, in the order in which the tensors came."""
        self._send()
        return {name: digest for future in self._futures for name, digest in future.result().items()}

    def _send(self) -> None:
        self._futures.append(self._thread.submit(fingerprint.state, self._batch))
        self._batch, self._n_bytes = {}, 0

    def __enter__(self) -> _Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a safetensors file, and where each tensor begins in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        begins[name] = end
        end += _n_bytes(tensor)
        table[name] = {
            "dtype": dtype_name(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + at for name, at in begins.items()}


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, for reading or writing in place."""
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def _write(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data[:_CHUNK]) :]


def _read(file: int, into: Any, path: Path) -> Any:
    rest = memoryview(into)
    while len(rest):
        got = os.readv(file, [rest[:_CHUNK]])
        if not got:
            raise _damaged(path, f"ends {len(rest)} bytes too early")
        rest = rest[got:]
    return into


def _damaged(path: Path, what: str, tensor: str | None = None) -> CheckpointError:
    return CheckpointError(f"{path.name}: {what}.", name=tensor or path.name)
