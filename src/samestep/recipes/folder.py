"""The folder of a run: what is in it, who may write it, and when it is complete.

::

    runs/semantic-ids-20260101-120000/
      config.yaml          all settings, defaults included; written first
      environment.json     what else decides the bits: threads, torch build, instruction set
      job.json             of the elastic job that wrote last: its restarts go on by themselves
      metrics.jsonl        one line per logged step
      audit.jsonl          one line per audit
      checkpoints/         see `samestep.checkpoint`
      ...                  what the recipe makes
      report.html          the page to look at
      manifest.json        written last: its presence means that the run is complete

Only the main worker writes.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import CheckpointError, SpecError
from samestep.recipes.atomic import replacing
from samestep.recipes.spec import RunSpec, to_yaml

if TYPE_CHECKING:  # the command line looks at folders before it loads torch
    from samestep.group import Group
    from samestep.recipes.display import Display

__all__ = ["RunFolder", "default_path"]


def default_path(recipe: str) -> Path:
    """Return where a run goes when nobody says: ``runs/<recipe>-<time>``."""
    return Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


class RunFolder:
    """A run's folder.

    Args:
        path: of the folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[str, list[str]] = {}  # lines that the disk did not take yet

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def is_complete(self) -> bool:
        """Whether the run that wrote it came to its end."""
        return (self.path / "manifest.json").exists()

    @property
    def is_ours(self) -> bool:
        """Whether this worker belongs to the elastic job that began the run here: it was started again.

        torchrun counts restarts after a failure, but not those after a node has come or gone; so the job's id is
        looked at too, where it is one (``none`` is what torchrun calls a job without).
        """
        if not (self.path / "config.yaml").exists():
            return False
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
            return True
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        try:
            return bool(job != "none" and json.loads((self.path / "job.json").read_text()).get("id") == job)
        except (OSError, ValueError, AttributeError):
            return False

    def check_free(self, resume: bool) -> None:
        """Refuse a folder that holds another run, before anything starts.

        Raises:
            SpecError: the folder is in use and `resume` is off, or there is nothing to resume.
        """
        if resume and not (self.path / "config.yaml").exists():
            raise SpecError(
                f"{self.path}: expected a run to resume, got no config.yaml there. "
                "Name its folder with --out, or leave --resume out.",
                name="out",
            )
        if (
            not resume
            and self.path.exists()
            and (not self.path.is_dir() or any(map(_counts, self.path.iterdir())))
        ):
            raise SpecError(
                f"{self.path}: there is a run (or something else) already. Pass --resume to go on with it, or "
                "another --out.",
                name="out",
            )

    def open(self, spec: RunSpec, group: Group, display: Display) -> None:
        """Make the folder and write settings and environment; in one that is there, say what differs now.

        Raises:
            CheckpointError: on all workers, when the folder cannot be written to.

        Collective: all ranks of `group`.
        """
        problem = ""
        if group.is_main:
            try:
                self._write_start(spec, group, display)
            except OSError as error:
                problem = (
                    f"{self.path}: cannot be written to ({error.strerror}). Name another folder with --out."
                )
        group.agree(not problem, problem, CheckpointError)

    def _write_start(self, spec: RunSpec, group: Group, display: Display) -> None:
        from samestep import environment

        self.path.mkdir(parents=True, exist_ok=True)
        for stacks in self.path.glob("stacks-rank*.txt"):
            if stacks.stat().st_size == 0:  # of a worker that was killed
                stacks.unlink()
        job = {"id": os.environ.get("TORCHELASTIC_RUN_ID", "none")}
        with replacing(self.path / "job.json") as file:
            file.write(json.dumps(job).encode())
        if not (self.path / "config.yaml").exists():
            with replacing(self.path / "config.yaml") as file:
                file.write(to_yaml(spec).encode())
        now, path = environment.fingerprint(group.device), self.path / "environment.json"
        if path.exists():
            for difference in environment.differences(json.loads(path.read_text()), now):
                display.say(f"not as when the run began, its bits may change: {difference}")
        else:
            with replacing(path) as file:
                file.write((json.dumps(now, indent=2) + "\n").encode())

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a line to a JSON-lines file; one that the disk does not take is held back for the next time."""
        self._held.setdefault(name, []).append(json.dumps(row) + "\n")
        self._write_held(name)

    def flush(self) -> str:
        """Write the lines that are held back; return what is wrong when the disk still does not take them."""
        return next(filter(None, map(self._write_held, self._held)), "")

    def _write_held(self, name: str) -> str:
        lines, path = self._held[name], self.path / name
        if not lines:
            return ""
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a") as file:
                file.write("".join(lines))
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, size)  # no half lines
            return f"{path}: cannot be written to ({error.strerror}); {len(lines)} lines are held back. Make room."
        lines.clear()
        return ""

    def forget_after(self, name: str, step: int) -> None:
        """Drop lines of steps after `step` from a JSON-lines file: a resumed run writes them again."""
        path = self.path / name
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line).get("step", 0) <= step:
                    kept.append(line)
            except (json.JSONDecodeError, AttributeError):
                continue  # a line that a kill cut in two
        with replacing(path) as file:
            file.write("".join(line + "\n" for line in kept).encode())

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest: from now on the run is complete."""
        with replacing(self.path / "manifest.json") as file:
            file.write((json.dumps(manifest, indent=2) + "\n").encode())


def _counts(path: Path) -> bool:
    """Tell whether a file shows that a folder is in use; what a start that was cut off has left does not."""
    return path.name != "job.json" and not (path.name.startswith(".") and path.suffix == ".tmp")
