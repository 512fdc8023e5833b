"""``samestep verify``: three steps with one worker and with N, and whether they have the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli._recipes import load_settings
from samestep.cli._speak import spoken
from samestep.errors import ReplicaMismatchError, SpecError, WorkerError

__all__ = ["verify"]


def verify(
    what: Annotated[str, typer.Argument(help="A run folder, or the name of a recipe.")],
    config: Annotated[Path | None, typer.Option(help="Settings of the recipe, a YAML file.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=2, help="The other number of workers; the run's own, or 2, by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Take a few steps with one worker and with N, and compare every tensor's digest.

    Example: samestep verify runs/mine --workers 2

    Exit codes: 0 the same bits, 1 not, 2 wrong usage, 3 a worker failed.
    """
    with spoken():
        recipe, config, n_workers = _what(what, config, workers)
        spec = load_settings(recipe, config, list(settings or []), None, False)
        if n_workers > spec.shards:
            raise SpecError(
                f"--workers: expected at most shards={spec.shards}, got {n_workers}. Use fewer workers.",
                name="workers",
            )
        arguments = [recipe, *(["--config", str(config)] if config else []), "--threads", str(threads)]
        arguments += [word for text in settings or [] for word in ("--set", text)] + [
            "--stop-after",
            str(steps),
        ]
        with tempfile.TemporaryDirectory(prefix="samestep-verify-") as place:
            digests = {n: _run(arguments, n, Path(place) / str(n)) for n in (1, n_workers)}
        _tell(digests, n_workers, spec.mode, steps, as_json)


def _what(what: str, config: Path | None, workers: int | None) -> tuple[str, Path | None, int]:
    """Return recipe, settings file and number of workers of a run folder, or of a recipe's name."""
    folder = Path(what)
    if not folder.is_dir():
        return what, config, workers or 2
    import yaml

    if config is not None or not (folder / "config.yaml").exists():
        raise SpecError(
            f"{folder}: expected a run folder with a config.yaml, and then no --config. Name a recipe or a run.",
            name="what",
        )
    recipe = str(yaml.safe_load((folder / "config.yaml").read_text())["recipe"])
    manifest = folder / "manifest.json"
    ran_on = json.loads(manifest.read_text())["workers"] if manifest.exists() else 2
    return recipe, folder / "config.yaml", workers or max(2, int(ran_on))


def _run(arguments: list[str], workers: int, out: Path) -> dict[str, str]:
    """Run the recipe and return the digest of every tensor that it ended with, by name."""
    command = [
        sys.executable,
        "-m",
        "samestep",
        "train",
        *arguments,
        "--workers",
        str(workers),
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    if done.returncode:
        raise WorkerError(
            f"{workers} workers: the run ended with code {done.returncode}.\n{done.stderr.strip()}"
        )
    checkpoints = sorted((out / "checkpoints").glob("*/manifest.json"))
    if not checkpoints:  # a job without steps: what it made
        books: list[str] = json.loads((out / "manifest.json").read_text())["codebooks"]
        return {f"codebooks.{level}": digest for level, digest in enumerate(books)}
    tensors: dict[str, Any] = json.loads(checkpoints[-1].read_text())["tensors"]
    return {name: entry["digest"] for name, entry in tensors.items()}


def _tell(digests: dict[int, dict[str, str]], n_workers: int, mode: str, steps: int, as_json: bool) -> None:
    one, many = digests[1], digests[n_workers]
    different = sorted(name for name in one.keys() | many.keys() if one.get(name) != many.get(name))
    if as_json:
        print(
            json.dumps({"workers": [1, n_workers], "tensors": len(one), "different": different, "mode": mode})
        )
    elif not different:
        print(
            f"1 and {n_workers} workers: the same bits in all {len(one)} tensors after {steps} steps (mode {mode})"
        )
    if different and as_json:
        raise typer.Exit(1)
    if different:
        hint = "" if mode == "exact" else " Mode fast does not promise it; use --set mode=exact."
        raise ReplicaMismatchError(
            f"1 and {n_workers} workers: {len(different)} of {len(one)} tensors differ after {steps} steps, "
            f"the first is `{different[0]}`.{hint}",
            name=different[0],
        )
