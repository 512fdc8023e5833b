"""``samestep train``: run a recipe on local workers, or as one of torchrun's."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep import agent
from samestep.cli._recipes import RECIPES, job_of, load_settings
from samestep.cli._speak import spoken
from samestep.errors import SpecError

__all__ = ["train"]

# A wrong setting and replicas that differ are the same after a restart.
_FINAL_CODES = (1, 2)
_WAIT_FOR_OWN_SIGNAL = 10.0  # seconds
_GRACE = typer.Option(min=0.1, help="After SIGTERM or Ctrl-C: time to save and end.")
_TIMEOUT = typer.Option(min=0.1, help="A worker without a step for so long is held to hang.")


@dataclass
class _Way:
    """How to run a recipe, beside its settings."""

    recipe: str
    out: Path | None
    resume: bool
    stop_after: int | None
    threads: int
    device: str
    grace_seconds: float
    timeout_seconds: float


def train(
    recipe: Annotated[str, typer.Argument(help=f"What to train: {', '.join(RECIPES)}.")],
    config: Annotated[Path | None, typer.Option(help="Settings, a YAML file.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes on this machine.")] = 1,
    shards: Annotated[int | None, typer.Option(min=1, help="Same as --set shards=N.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/<recipe>-<time> by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start the workers again so often when one fails; they resume.")
    ] = 0,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many steps, with a checkpoint; --resume goes on.")
    ] = None,
    grace_seconds: Annotated[float, _GRACE] = 30.0,
    timeout_seconds: Annotated[float, _TIMEOUT] = 600.0,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of each worker; part of what fixes the bits.")
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Rendezvous port; 0 takes a free one.")] = 0,
) -> None:
    """Train a recipe on one or several workers and write a run folder.

    Example: samestep train semantic-ids --config examples/semantic_ids.yaml --workers 2

    Example: torchrun --nproc-per-node 4 -m samestep train semantic-ids --config my.yaml --out runs/mine
    """
    agent.die_with_agent()
    with spoken(), _stop_at_once():
        from samestep.recipes.folder import RunFolder, default_path

        started = agent.is_worker()
        _check_start(started, workers, out)
        changes = [*(settings or []), *([] if shards is None else [f"shards={shards}"])]
        resume = resume or (started and out is not None and RunFolder(out).is_ours)
        spec = load_settings(recipe, config, changes, out, resume)
        folder = out or (None if started else default_path(recipe))
        if folder is not None and not started:
            RunFolder(folder).check_free(resume)
        if workers > spec.shards:
            raise SpecError(
                f"--workers: expected at most shards={spec.shards}, got {workers}. "
                "Use fewer workers or more shards.",
                name="workers",
            )
        way = _Way(recipe, folder, resume, stop_after, threads, device, grace_seconds, timeout_seconds)
        if started or (workers == 1 and max_restarts == 0):
            _work(spec, way)
        else:
            _start(way, config, changes, workers, port, max_restarts)


@contextmanager
def _stop_at_once() -> Iterator[None]:
    """End well on SIGTERM as long as there is nothing to save; agent and guard set handlers of their own later."""

    def stop(number: int, frame: Any) -> None:
        print("samestep: stopped before the first step; nothing is lost.", file=sys.stderr)
        raise typer.Exit(0)

    if agent.is_worker() or threading.current_thread() is not threading.main_thread():
        yield  # a worker's end is for its agent to judge
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_start(started: bool, workers: int, out: Path | None) -> None:
    if started and workers != 1:
        raise SpecError(
            "--workers: expected none under torchrun, which has started the workers. Leave it out."
        )
    if started and out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise SpecError(
            "--out: expected a folder under torchrun --max-restarts, for a restart must find it. Name one.",
            name="out",
        )


def _start(
    way: _Way, config: Path | None, changes: list[str], workers: int, port: int, max_restarts: int
) -> None:
    """Start the workers with the same command, and end as they end."""
    options = {
        "--out": way.out,
        "--threads": way.threads,
        "--device": way.device,
        "--config": config,
        "--stop-after": way.stop_after,
        "--grace-seconds": way.grace_seconds,
        "--timeout-seconds": way.timeout_seconds,
    }
    arguments = ["-m", "samestep", "train", way.recipe, *(["--resume"] if way.resume else [])]
    arguments += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    arguments += [word for change in changes for word in ("--set", change)]
    code = agent.run_command(
        arguments,
        workers,
        port=port,
        max_restarts=max_restarts,
        grace_seconds=way.grace_seconds,
        final_codes=_FINAL_CODES,
        tell=lambda text: print(f"samestep: {text}", file=sys.stderr, flush=True),
    )
    if code == 143:  # by SIGTERM, before any worker had begun
        print("samestep: stopped before the first step; nothing is lost.", file=sys.stderr)
        return
    if code >= 128:
        raise KeyboardInterrupt
    if code:
        raise typer.Exit(code)


def _work(spec: Any, way: _Way) -> None:
    """Run the recipe as one of the workers."""
    from samestep.group import Group
    from samestep.recipes.folder import RunFolder, default_path
    from samestep.reduce import broadcast_object
    from samestep.survive import Guard, Stopped

    job = job_of(way.recipe)
    # A worker that hangs gives itself up first, with its stack, and not in a collective of the others.
    patience = way.timeout_seconds + 5.0
    with Group.from_env(way.device, threads=way.threads, timeout_seconds=patience) as group:
        times = {"grace_seconds": 0.9 * way.grace_seconds, "timeout_seconds": way.timeout_seconds}
        with Guard(group, **times) as guard:
            path, resume = broadcast_object((way.out or default_path(way.recipe), way.resume), group)
            folder, problem = RunFolder(path), ""
            if group.is_main:
                try:
                    folder.check_free(resume)
                except SpecError as error:
                    problem = str(error)
            group.agree(not problem, problem, SpecError)
            try:
                job(spec, folder, group, resume, way.stop_after, guard)
            except Stopped as stopped:
                if group.is_main:
                    print(f"samestep: {stopped}", file=sys.stderr)
            if guard.stopping:
                group.barrier()
                group.close()  # from here on every worker ends for itself
            _leave(guard)


def _leave(guard: Any) -> None:
    """End well, unless this node is to go on without the one whose workers were asked to stop."""
    restarts_left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    alone = int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1
    if alone or not guard.stopping or restarts_left <= 0:
        return
    # Each agent ends its own workers; those of a slower agent have stopped with the others before its signal comes.
    deadline = time.monotonic() + _WAIT_FOR_OWN_SIGNAL
    while not guard.was_asked and time.monotonic() < deadline:
        guard.beat()
        time.sleep(0.05)
    if guard.was_asked:
        return
    print("samestep: another node was told to stop; this one is started again without it.", file=sys.stderr)
    raise typer.Exit(3)
