"""``samestep explain``: one step on one worker and on N, and why they differ."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli._speak import spoken
from samestep.errors import SpecError

if TYPE_CHECKING:
    from samestep.explain import Explanation

__all__ = ["explain"]


def explain(
    build: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:BUILD",
            help="Function that returns (model, optimizer, loss_fn) or an explain.Program; the module is looked "
            "for in the current folder too.",
        ),
    ],
    workers: Annotated[int, typer.Option(min=2, help="Worker processes; 2 hide some faults.")] = 4,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The global batch, or a function that returns it; `global_batch` of the same module by default.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each of the two runs.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit XML file, for CI.")] = None,
) -> None:
    """Say why one step on N workers is not the step on one worker. Exit code 1 when they differ.

    Example: samestep explain my_training:build --workers 4
    """
    with spoken():
        sys.path.insert(0, os.getcwd())
        module = build.partition(":")[0]
        program = _named(build, "MODULE:BUILD")
        samples = _named(batch or f"{module}:global_batch", "--batch")
        from samestep import explain as explaining

        found = explaining.one_step(
            program,
            samples() if callable(samples) else samples,
            workers,
            timeout_seconds=timeout,
            threads=threads,
            device=device,
        )
        print(json.dumps(found.to_dict(), indent=2) if as_json else _text(found))
        if junit is not None:
            junit.write_text(_xml(found, build))
        if not found.same:
            raise typer.Exit(1)


def _named(text: str, what: str) -> Any:
    name, colon, attribute = text.partition(":")
    if not (colon and name and attribute):
        raise SpecError(
            f"{what}: expected MODULE:NAME, got {text!r}. Name it as in mypackage.train:build.", name=what
        )
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise SpecError(
            f"{what}: there is no module `{name}` here or among the installed ones. "
            "Run in the folder that holds it.",
            name=what,
        ) from None
    if not hasattr(module, attribute):
        raise SpecError(
            f"{what}: `{name}` has no `{attribute}`. Define it there, or name another one.", name=what
        )
    return getattr(module, attribute)


def _text(found: Explanation) -> str:
    lines = [found.sentence]
    if found.stage is not None:
        lines[0] = f"{found.stage}: {found.sentence}"
        lines += [f"then {finding.stage}: {finding.sentence}" for finding in found.findings[1:]]
    if found.as_built is not None:
        lines.append(
            f"In {found.as_built.dtype}, as it is trained, the gradient differs by at most "
            f"{found.as_built.ulps:.3g} ulps (`{found.as_built.tensor}`)."
        )
    return "\n".join([*lines, *(f"note: {warning}" for warning in found.warnings)])


def _xml(found: Explanation, name: str) -> str:
    from xml.sax.saxutils import quoteattr

    failure = ""
    if not found.same:
        text = "\n".join(f"{finding.stage}: {finding.sentence}" for finding in found.findings)
        failure = f"<failure type={quoteattr(found.cause or '')} message={quoteattr(text)}/>"
    case = f'<testcase classname={quoteattr(name)} name="{found.world_size} workers">{failure}</testcase>'
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<testsuite name="samestep explain" tests="1" failures="{int(not found.same)}">'
        f"{case}</testsuite>\n"
    )
