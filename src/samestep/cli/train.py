"""``samestep train``: run a recipe on local workers, or as one of torchrun's."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli._speak import UNDER_AGENT, spoken
from samestep.errors import SpecError

__all__ = ["train"]

# Where a recipe's settings and its job are; imported when it is asked for.
_RECIPES = {
    "semantic-ids": (
        ("samestep.recipes.semantic_ids.spec", "SemanticIdsSpec"),
        ("samestep.recipes.semantic_ids.job", "run"),
    ),
}

_EXAMPLES = """
Examples:

  samestep train semantic-ids --config examples/semantic_ids.yaml --workers 2

  samestep train semantic-ids --set data=items.parquet --set "n_centroids=[64,64]"

  torchrun --nproc-per-node 4 -m samestep train semantic-ids --config my.yaml --out runs/mine
"""


def train(
    recipe: Annotated[str, typer.Argument(help=f"What to train: {', '.join(_RECIPES)}.")],
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
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of each worker; part of what fixes the bits.")
    ] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Rendezvous port; 0 takes a free one.")] = 0,
) -> None:
    """Train a recipe and write a run folder."""
    with spoken():
        changes = list(settings or [])
        if shards is not None:
            changes.append(f"shards={shards}")
        spec = _load(recipe, config, changes, out, resume)
        from samestep.recipes.folder import RunFolder, default_path

        started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
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
            _work(recipe, spec, folder, resume, device, threads)
            return
        arguments = ["-m", "samestep", "train", recipe, "--out", str(folder), "--threads", str(threads)]
        arguments += ["--device", device, *(["--config", str(config)] if config else [])]
        arguments += [word for change in changes for word in ("--set", change)] + ["--resume"] * resume
        _start(arguments, workers, port)


def _load(recipe: str, config: Path | None, changes: list[str], out: Path | None, resume: bool) -> Any:
    """Return the settings; those of the folder when a run goes on, which new ones must not contradict."""
    from samestep.recipes.spec import load

    if recipe not in _RECIPES:
        raise SpecError(f"recipe: expected one of {', '.join(_RECIPES)}, got {recipe!r}.", name="recipe")
    module, name = _RECIPES[recipe][0]
    kind = getattr(importlib.import_module(module), name)
    saved = None if out is None else out / "config.yaml"
    if not resume or saved is None or not saved.exists():
        return load(kind, config, changes)
    old = load(kind, saved)
    if config is None and not changes:
        return old
    new = load(kind, config, changes) if config is not None else load(kind, saved, changes)
    for key in kind.model_fields:
        if getattr(new, key) != getattr(old, key) and key not in ("checkpoint_every", "audit_every"):
            raise SpecError(
                f"{saved}: `{key}`: this run began with {getattr(old, key)!r}, got {getattr(new, key)!r}. "
                "Resume with the same settings, or start another run.",
                name=key,
            )
    return new


def _start(arguments: list[str], workers: int, port: int) -> None:
    from samestep import agent

    os.environ[UNDER_AGENT] = "1"  # the workers inherit it
    try:
        code = agent.run_command(arguments, workers, port=port)
    finally:
        del os.environ[UNDER_AGENT]
    if code >= 128:
        raise KeyboardInterrupt
    if code:
        raise typer.Exit(code)


def _work(recipe: str, spec: Any, out: Path | None, resume: bool, device: str, threads: int) -> None:
    """Run the recipe as one of the workers."""
    from samestep.group import Group
    from samestep.recipes.folder import RunFolder, default_path
    from samestep.reduce import broadcast_object

    module, name = _RECIPES[recipe][1]
    job = getattr(importlib.import_module(module), name)
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
        job(spec, folder, group, resume)
