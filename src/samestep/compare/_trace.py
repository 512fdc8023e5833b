"""The files of a trace: what a worker writes, and how they are read.

::

    trace/
      rank-0.jsonl                 a header, then one line per record: loss, samples, digest and sketch per tensor
      rank-0-step-00000008.safetensors     the tensors themselves, at chosen steps
      rank-1.jsonl ...             each worker writes its own, alone

The last line of a run that was killed may be cut; it is left out, visibly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.compare import _sketch
from samestep.errors import SpecError
from samestep.jsonlines import json_lines

__all__ = ["FORMAT_VERSION", "PHASES", "RUN_TRACE", "Entry", "Trace", "log_file", "read", "tensor_file"]

FORMAT_VERSION = 1
RUN_TRACE = "trace"
"""Where in a run's folder its trace is looked for."""

PHASES = ("samples", "gradients", "options", "optimizer", "parameters", "buffers")
"""In the order in which a fault of one shows in the next."""


def log_file(folder: Path, rank: int) -> Path:
    """Return where a worker writes its lines."""
    return folder / f"rank-{rank}.jsonl"


def tensor_file(folder: Path, rank: int, step: int) -> Path:
    """Return where a worker writes its tensors of a step."""
    return folder / f"rank-{rank}-step-{step:08d}.safetensors"


@dataclass
class Entry:
    """What one worker recorded after one step.

    Attributes:
        step: updates applied.
        loss: as passed to `record`, or None.
        samples: a digest per sample of this worker, in order, or None.
        local: digest of one parameter's gradient before it was reduced, or None.
        momentum: the largest of the param groups.
        lr: the largest of the param groups.
        spread: by parameter, how far rounding alone may move an adaptive optimizer's update.
        marks: by phase and tensor name, the digest and the sketch.
        file: of the whole tensors, or None.
    """

    step: int
    loss: float | None
    samples: list[str] | None
    local: str | None
    momentum: float
    lr: float
    spread: dict[str, float]
    marks: dict[str, dict[str, tuple[str, str]]]
    file: Path | None

    def names(self, phase: str) -> list[str]:
        """Return the tensors of a phase, in registration order."""
        return list(self.marks.get(phase, {}))

    def digest(self, phase: str, name: str) -> str:
        """Return the digest of a tensor."""
        return self.marks[phase][name][0]

    def sketch(self, phase: str, name: str) -> np.ndarray:
        """Return the sketch of a tensor, (17,) float64."""
        return _sketch.decode(self.marks[phase][name][1])

    def norm(self, phase: str, name: str) -> float:
        """Return the norm of a tensor."""
        return float(self.sketch(phase, name)[_sketch.WIDTH])

    @property
    def has_gradients(self) -> bool:
        """Whether an update was recorded, not only a state."""
        return bool(self.marks.get("gradients"))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The whole tensors by ``<phase>/<name>``; empty where none were kept."""
        if self.file is None or not self.file.is_file():
            return {}
        from safetensors.torch import load_file

        return dict(load_file(self.file))


@dataclass
class Trace:
    """What all workers of a run recorded.

    Attributes:
        folder: where it was read from.
        world_size: number of workers.
        ranks: by rank, the entries by step.
        kinds: dtype and shape by ``<phase>/<name>``.
        compute_dtype: the least exact dtype of the run, as recorded.
        environment: what decides bits beside the program, from `environment.fingerprint`; empty if not recorded.
        notes: what is damaged or missing, in words.
    """

    folder: Path
    world_size: int
    ranks: list[dict[int, Entry]]
    kinds: dict[str, tuple[str, tuple[int, ...]]]
    compute_dtype: torch.dtype
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The last part of the folder's path; of a trace inside a run folder, the run's."""
        folder = self.folder.resolve()
        return folder.parent.name if folder.name == RUN_TRACE else folder.name

    def dtype(self, phase: str, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        found = getattr(torch, self.kinds[f"{phase}/{name}"][0])
        assert isinstance(found, torch.dtype)
        return found

    def shapes(self, phase: str) -> list[tuple[int, ...]]:
        """Return the shapes of a phase's tensors."""
        return [shape for key, (_, shape) in self.kinds.items() if key.startswith(f"{phase}/")]


def read(folder: str | Path) -> Trace:
    """Return the trace that the workers of a run wrote.

    Args:
        folder: of the trace, or a run's folder with the trace in it.

    Raises:
        SpecError: when the folder holds no trace, a worker's file is missing or damaged, or the format is a
            newer one.
    """
    folder = Path(folder)
    if log_file(folder / RUN_TRACE, 0).is_file():
        folder = folder / RUN_TRACE
    first = log_file(folder, 0)
    if not first.is_file():
        raise SpecError(
            f"`trace`: expected a folder with {first.name}, got {folder}. Record a run with "
            "samestep.compare.record, under `samestep compare` or with SAMESTEP_TRACE=<run>/trace set.",
            name="trace",
        )
    header = _lines(first, [])[0]
    dtype = getattr(torch, header["compute_dtype"])
    trace = Trace(folder, int(header["world_size"]), [], {}, dtype, header.get("environment", {}))
    for rank in range(trace.world_size):
        trace.ranks.append(_rank(trace, rank, header))
    common = set.intersection(*(set(entries) for entries in trace.ranks))
    last = max(max(entries, default=-1) for entries in trace.ranks)
    if last not in common:
        trace.notes.append(f"{trace.name}: not all workers recorded step {last}; it is left out")
    trace.ranks = [{step: e for step, e in entries.items() if step in common} for entries in trace.ranks]
    return trace


def _rank(trace: Trace, rank: int, first: dict[str, Any]) -> dict[int, Entry]:
    path = log_file(trace.folder, rank)
    if not path.is_file():
        raise SpecError(
            f"`trace`: expected {path.name} of world_size={trace.world_size} in {trace.folder}, got none. "
            "Call record on every worker, not on rank 0 only.",
            name="trace",
            rank=rank,
        )
    header, *lines = _lines(path, trace.notes)
    if header["world_size"] != first["world_size"] or header["format_version"] != FORMAT_VERSION:
        raise SpecError(
            f"{path}: expected world_size={first['world_size']} and format_version={FORMAT_VERSION}, got "
            f"{header['world_size']} and {header['format_version']}. Record the run again.",
            name="trace",
            rank=rank,
        )
    entries = {}
    for line in lines:
        for key, (dtype, shape) in line.get("kinds", {}).items():
            trace.kinds.setdefault(key, (dtype, tuple(shape)))
        entries[line["step"]] = _entry(trace.folder, rank, line)
    return entries


def _entry(folder: Path, rank: int, line: dict[str, Any]) -> Entry:
    marks: dict[str, dict[str, tuple[str, str]]] = {}
    for key, (digest, sketch) in line["tensors"].items():
        phase, name = key.split("/", 1)
        marks.setdefault(phase, {})[name] = (digest, sketch)
    return Entry(
        step=line["step"],
        loss=line["loss"],
        samples=line["samples"],
        local=line["local"],
        momentum=line["momentum"],
        lr=line["lr"],
        spread=line["spread"],
        marks=marks,
        file=tensor_file(folder, rank, line["step"]) if line["whole"] else None,
    )


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    found = json_lines(path, lambda entry: True)
    if found.problem:
        raise SpecError(f"{path}: cannot be read: {found.problem}.", name="trace")
    if found.cut:
        # Only the end of a file can be cut by a run that was stopped.
        notes.append(f"{path.name}: the last line is cut and left out")
    elif found.damaged:
        where = f"{found.where()} {'is' if len(found.damaged) == 1 else 'are'} damaged"
        raise SpecError(f"{path}: {where}. Record the run again.", name="trace")
    if not found.entries or "world_size" not in found.entries[0]:
        raise SpecError(f"{path}: expected a header in line 1, got none. Record the run again.", name="trace")
    return found.entries
