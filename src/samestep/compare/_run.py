"""Run a script at several numbers of workers, each leaving a trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samestep import agent
from samestep.compare._record import STEPS_VARIABLE, TRACE_VARIABLE
from samestep.compare._trace import log_file
from samestep.errors import SpecError, WorkerError

__all__ = ["run_script"]


def run_script(arguments: Sequence[str], n_workers: int, folder: Path, *, steps: int | None = None) -> Path:
    """Run ``python arguments...`` under torch's elastic agent, one thread per worker, and return its trace.

    Args:
        arguments: the script and its arguments, or ``-m`` and a module.
        n_workers: workers on this machine.
        folder: that the trace goes into; must not hold one.
        steps: leave after as many updates; None lets the script end by itself.

    Returns:
        The folder.

    Raises:
        WorkerError: when a worker fails; `rank` says which one where that is known.
        SpecError: when the script ends without having recorded anything.
        KeyboardInterrupt: when it is stopped by a signal.
    """
    folder = folder.resolve()
    asked = {TRACE_VARIABLE: str(folder), "OMP_NUM_THREADS": "1"}
    if steps is not None:
        asked[STEPS_VARIABLE] = str(steps)
    with _environment(asked), _quiet_output():
        code = agent.run_command(arguments, n_workers)
    if code >= 128:
        raise KeyboardInterrupt
    if code:
        raise WorkerError(
            f"{arguments[0]} with {n_workers} worker{'s' * (n_workers > 1)} ended with exit code {code}. "
            f"Run it alone first: torchrun --nproc-per-node {n_workers} {arguments[0]}"
        )
    if not log_file(folder, 0).exists():
        raise SpecError(
            f"{arguments[0]}: expected a trace, got none. Call samestep.compare.record(step, model, optimizer) in "
            "it, before the first step and after each.",
            name="script",
        )
    return folder


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet_output() -> Iterator[None]:
    """Send what the workers print to standard error: standard output is the verdict's."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # started without one
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
