"""``samestep report``: the page of a run, written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli._speak import spoken

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="Run folder, finished or not.")],
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard event files beside it.")
    ] = False,
) -> None:
    """Write report.html into a run folder and print its path.

    Example: samestep report runs/mine
    """
    with spoken():
        from samestep import report as pages

        print(pages.write(run))
        if tensorboard:
            print(pages.write_events(run))
