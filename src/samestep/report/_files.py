"""Read what a run folder holds, and note what in it is damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import SpecError
from samestep.jsonlines import json_lines

__all__ = ["FILES", "Run", "read"]

FILES = ("manifest.json", "config.yaml", "metrics.jsonl", "audit.jsonl", "quality.json", "comparison.json")


@dataclass
class Run:
    """What a run folder says; None or empty for a file that is absent or cannot be read at all."""

    name: str
    manifest: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    config_text: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    audit: list[dict[str, Any]] = field(default_factory=list)
    quality: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


def read(folder: Path) -> Run:
    """Return what a run folder holds.

    Args:
        folder: of the run.

    Raises:
        SpecError: when it is no folder, or holds none of a run's files.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise SpecError(
            f"`run_folder`: expected a folder, got {found} at {folder}. Give the folder of a run.",
            name="run_folder",
        )
    if not any((folder / name).is_file() for name in FILES):
        raise SpecError(
            f"`run_folder`: expected one of {', '.join(FILES)} in {folder}, got none. Give the folder of a run.",
            name="run_folder",
        )
    run = Run(name=folder.resolve().name)
    run.manifest = _mapping(folder / "manifest.json", json.loads, run.notes)
    run.quality = _mapping(folder / "quality.json", json.loads, run.notes)
    run.comparison = _mapping(folder / "comparison.json", json.loads, run.notes)
    run.config_text = _text(folder / "config.yaml", run.notes) or ""
    run.config = _mapping(folder / "config.yaml", _yaml, run.notes)
    run.metrics = _by_step(_lines(folder / "metrics.jsonl", run.notes), "metrics.jsonl", run.notes)
    run.audit = _lines(folder / "audit.jsonl", run.notes)
    return run


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _text(path: Path, notes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        note = f"{path.name} cannot be read: {error}"
        if note not in notes:
            notes.append(note)
        return None


def _mapping(path: Path, parse: Callable[[str], object], notes: list[str]) -> dict[str, Any] | None:
    text = _text(path, notes)
    if text is None:
        return None
    try:
        found = parse(text)
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} is damaged and left out: {error}")
        return None
    if not isinstance(found, Mapping):
        notes.append(f"{path.name} is left out: expected a mapping, got {type(found).__name__}")
        return None
    return {str(key): value for key, value in found.items()}


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file that carry a step, in the order of the file."""
    found = json_lines(path, lambda entry: _is_step(entry.get("step")))
    if found.problem:
        notes.append(f"{path.name} cannot be read: {found.problem}")
    if found.damaged:
        notes.append(
            f"{path.name}: damaged and left out: {len(found.damaged)} of {found.n_lines} lines "
            f"({found.where()}), not a JSON object with a step"
        )
    return found.entries


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _by_step(entries: list[dict[str, Any]], name: str, notes: list[str]) -> list[dict[str, Any]]:
    """Return entries sorted by step; of two for one step the later line, which a resumed run wrote, counts."""
    latest = {entry["step"]: entry for entry in entries}
    if len(latest) < len(entries):
        again = len(entries) - len(latest)
        notes.append(
            f"{name}: lines that repeat a step, as after a resume, of which the last counts: {again}"
        )
    return [latest[step] for step in sorted(latest)]
