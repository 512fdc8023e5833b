"""``samestep audit``: what the audits of a run found, and whether its last checkpoint is as it was written."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli._speak import spoken
from samestep.errors import CheckpointError, SpecError

if TYPE_CHECKING:
    from samestep.checkpoint import Found

__all__ = ["audit"]

_LOG = "audit.jsonl"
_FILES = (_LOG, "manifest.json", "config.yaml")


def audit(
    run: Annotated[Path, typer.Argument(help="Run folder, finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say whether the replicas of a run agreed, and check every byte of its last checkpoint.

    Example: samestep audit runs/mine

    Exit codes: 0 agreed, 1 replicas differed, 2 not a run, nothing audited, or a damaged log or checkpoint.
    """
    with spoken():
        found = _read(run)
        _check_last(run / "checkpoints", found)
        found.results = _check_results(run, found.problems)
        print(json.dumps(found.to_json()) if as_json else "\n".join(found.lines()))
    raise typer.Exit(found.exit_code)


@dataclass
class _Audited:
    """What a run folder says of its replicas.

    Attributes:
        finished: whether the run wrote its manifest.
        workers: of the run, None where the manifest does not say.
        records: of the log, in order.
        problems: what is damaged, in words.
        checkpoint: the newest whole one, None where there is none.
        results: files whose tensors have the digests of the manifest.
    """

    finished: bool = False
    workers: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checkpoint: Path | None = None
    results: list[str] = field(default_factory=list)

    @property
    def first(self) -> dict[str, Any] | None:
        """The first audit that found a difference."""
        return next((record for record in self.records if record["verdict"] == "differ"), None)

    @property
    def exit_code(self) -> int:
        """A difference that was found stays one, whatever else is damaged."""
        return 1 if self.first is not None else 2 if self.problems else 0

    def to_json(self) -> dict[str, Any]:
        """Return everything, as JSON data."""
        steps = [record["step"] for record in self.records]
        return {
            "exit_code": self.exit_code,
            "verdict": {0: "agree", 1: "differ", 2: "unproven"}[self.exit_code],
            "finished": self.finished,
            "workers": self.workers,
            "audits": len(steps),
            "steps": [min(steps), max(steps)] if steps else [],
            "differing": sum(record["verdict"] == "differ" for record in self.records),
            "first_difference": self.first,
            "left_out": self.left_out(),
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "results": self.results,
            "problems": self.problems,
        }

    def left_out(self) -> dict[str, list[str]]:
        """Return the names that the last audit did not cover, by reason."""
        return dict(self.records[-1].get("left_out", {})) if self.records else {}

    def lines(self) -> list[str]:
        """Return what to print."""
        found = [self._audits(), *(_told(self.first) if self.first is not None else [])]
        if self.workers == 1 and self.records:
            found.append("note: the run had one worker, so its audits had nothing to compare")
        elif not self.finished:
            found.append("note: the run has no manifest.json: it did not come to its end, or still goes on")
        for reason, names in self.left_out().items():
            found.append(f"not covered, {reason}: {', '.join(names)}")
        if self.checkpoint is not None:
            found.append(f"checkpoint {self.checkpoint.name}: every byte is as it was written")
        found += [f"{name}: every tensor has the digest of the manifest" for name in self.results]
        return [*found, *(f"problem: {text}" for text in self.problems)]

    def _audits(self) -> str:
        number, differing = len(self.records), sum(r["verdict"] == "differ" for r in self.records)
        steps = [record["step"] for record in self.records]
        which = f"{number} audit{'s' * (number != 1)}"
        if steps:
            which += (
                f", steps {min(steps)} to {max(steps)}" if min(steps) < max(steps) else f", step {steps[0]}"
            )
        if differing:
            return f"{which}: {differing} found replicas that differ"
        return f"{which}: replicas agree bit for bit" if steps else which


def _told(record: dict[str, Any]) -> list[str]:
    """Return a difference in words."""
    held = zip(record["ranks"], record["values"])
    values = [f"  rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {value}" for r, value in held]
    counted = ", ".join(f"{number} of {phase}" for phase, number in record["differing"].items())
    return [
        f"first difference: step {record['step']}, {record['phase']}, `{record['tensor']}`",
        *values,
        f"  tensors that differ: {counted}",
        *(f"  likely cause: {cause}" for cause in record["causes"]),
    ]


def _read(run: Path) -> _Audited:
    if not run.is_dir() or not any((run / name).is_file() for name in _FILES):
        what = "none of these" if run.is_dir() else "a file" if run.exists() else "nothing"
        raise SpecError(
            f"`run`: expected a run folder with one of {', '.join(_FILES)}, got {what} at {run}. Give the folder "
            "of a run.",
            name="run",
        )
    found = _Audited(finished=(run / "manifest.json").exists())
    found.workers = _workers(run / "manifest.json", found.problems)
    found.records = _records(run / _LOG, found.problems)
    if not found.records and not found.problems:
        found.problems.append(
            f"{_LOG}: expected at least one audit, got none. Nothing was proven: a run without update steps has "
            "nothing to audit; a run that goes on will get its first at its next audit."
        )
    return found


def _workers(path: Path, problems: list[str]) -> int | None:
    if not path.exists():
        return None
    try:
        workers = json.loads(path.read_text(encoding="utf-8"))["workers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.name}: damaged ({type(error).__name__}: {error}). Bring a good copy back.")
        return None
    if type(workers) is not int or workers < 1:
        problems.append(f"{path.name}: `workers`: expected a number of at least 1, got {workers!r}.")
        return None
    return workers


def _records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    from samestep.jsonlines import json_lines

    found = json_lines(path, _is_record)
    if found.problem:
        problems.append(f"{path.name}: cannot be read: {found.problem}.")
    if found.damaged:
        advice = (
            "It was cut off in the middle, as by a kill: going on with --resume removes it."
            if found.cut
            else "The file was changed after it was written: bring a good copy back."
        )
        problems.append(
            f"{path.name}: expected an audit in each of {found.n_lines} lines, got something else in "
            f"{found.where()}. {advice}"
        )
    return found.entries


def _is_record(record: dict[str, Any]) -> bool:
    """Return whether it has all that an audit writes."""
    step, phase = record.get("step"), record.get("phase")
    left_out = record.get("left_out", {})
    if type(step) is not int or step < 0 or not isinstance(phase, str) or not _is_lists(left_out):
        return False
    if record.get("verdict") == "agree":
        return True
    ranks, values = record.get("ranks"), record.get("values")
    return (
        record.get("verdict") == "differ"
        and isinstance(record.get("tensor"), str)
        and isinstance(ranks, list)
        and all(isinstance(r, list) and r and all(type(n) is int for n in r) for r in ranks)
        and isinstance(values, list)
        and len(values) == len(ranks)
        and isinstance(record.get("causes"), list)
        and isinstance(record.get("differing"), dict)
    )


def _is_lists(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in value.values()
    )


def _check_last(folder: Path, found: _Audited) -> None:
    """Read the newest checkpoint again and compare it with its digests."""
    if not folder.is_dir():
        return
    logging.getLogger("samestep.checkpoint").addHandler(
        logging.NullHandler()
    )  # what it passes over is told below
    from samestep.checkpoint import Checkpointer
    from samestep.group import Group

    try:
        with Checkpointer(folder, group=Group.single()) as checkpointer:
            found.checkpoint = checkpointer.latest()
    except CheckpointError as error:
        found.problems.append(f"checkpoints: {error.message}")
        return
    found.problems += [_damaged(skipped) for skipped in checkpointer.skipped]


def _damaged(skipped: Found) -> str:
    return f"checkpoint {skipped.path.name}: damaged: {skipped.problem} --resume would pass over it."


def _check_results(run: Path, problems: list[str]) -> list[str]:
    """Compare the tensors that the run ended with with the digests in its manifest; return the files that hold."""
    try:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
        levels, whole = manifest.get("codebooks"), manifest.get("digest")
    except (OSError, ValueError, AttributeError):
        return []  # a damaged manifest is told already
    held = []
    for name, wanted, digest in (
        ("codebooks.safetensors", levels, _levels),
        ("model.safetensors", whole, _whole),
    ):
        if wanted is None:
            continue
        path = run / name
        try:
            got = digest(path, wanted)
        except Exception as error:  # safetensors has no class of its own that is worth its import here
            text = "is missing" if not path.exists() else f"cannot be read ({type(error).__name__}: {error})"
            problems.append(f"{name}: {text}, but the manifest has its digests. Bring a good copy back.")
            continue
        if got == wanted:
            held.append(name)
        else:
            problems.append(
                f"{name}: its tensors are not those of the manifest: expected {wanted}, got {got}. The file was "
                "changed after the run: bring a good copy back."
            )
    return held


def _levels(path: Path, wanted: list[str]) -> list[str]:
    from safetensors.torch import load_file

    from samestep.fingerprint import hexdigest

    tensors = load_file(path)
    return [hexdigest(tensors[f"level_{level}"]) for level in range(len(wanted))]


def _whole(path: Path, wanted: str) -> str:
    from safetensors.torch import load_file

    from samestep.fingerprint import hexdigest

    digests = {name: hexdigest(tensor) for name, tensor in load_file(path).items()}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
