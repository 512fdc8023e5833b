"""``samestep train``: run a recipe on local workers, or as one of torchrun's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep import agent
from samestep.cli._recipes import RECIPES, job_of, load_settings
from samestep.cli._speak import UNDER_AGENT, spoken
from samestep.errors import SpecError

__all__ = ["train"]


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
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many steps, with a checkpoint; --resume goes on.")
    ] = None,
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
    with spoken():
        changes = list(settings or [])
        if shards is not None:
            changes.append(f"shards={shards}")
        spec = load_settings(recipe, config, changes, out, resume)
        from samestep.recipes.folder import RunFolder, default_path

        started = agent.is_worker()
        if started and workers != 1:
            raise SpecError(
                "--workers: expected none under torchrun, which has started the workers. Leave it out."
            )
        folder = out or (None if started else default_path(recipe))
        if folder is not None and not started:
            RunFolder(folder).check_free(resume)
        if workers > spec.shards:
            raise SpecError(
                f"--workers: expected at most shards={spec.shards}, got {workers}. "
                "Use fewer workers or more shards.",
                name="workers",
            )
        if started or workers == 1:
            _work(recipe, spec, folder, resume, device, threads, stop_after)
            return
        options = {"--out": folder, "--threads": threads, "--device": device, "--config": config}
        _start(recipe, options | {"--stop-after": stop_after}, changes, resume, workers, port)


def _start(
    recipe: str, options: dict[str, Any], changes: list[str], resume: bool, workers: int, port: int
) -> None:
    """Start the workers with the same command, and end as they end."""
    arguments = ["-m", "samestep", "train", recipe, *(["--resume"] if resume else [])]
    arguments += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    arguments += [word for change in changes for word in ("--set", change)]
    os.environ[UNDER_AGENT] = "1"  # the workers inherit it
    try:
        code = agent.run_command(arguments, workers, port=port)
    finally:
        del os.environ[UNDER_AGENT]
    if code >= 128:
        raise KeyboardInterrupt
    if code:
        raise typer.Exit(code)


def _work(
    recipe: str, spec: Any, out: Path | None, resume: bool, device: str, threads: int, stop_after: int | None
) -> None:
    """Run the recipe as one of the workers."""
    from samestep.group import Group
    from samestep.recipes.folder import RunFolder, default_path
    from samestep.reduce import broadcast_object

    job = job_of(recipe)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # A worker that waits for another one inside a collective does not see a KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with Group.from_env(device, threads=threads) as group:
        path = broadcast_object(out or default_path(recipe), group)
        folder, problem = RunFolder(path), ""
        if group.is_main:
            try:
                folder.check_free(resume)
            except SpecError as error:
                problem = str(error)
        group.agree(not problem, problem, SpecError)
        job(spec, folder, group, resume, stop_after)
