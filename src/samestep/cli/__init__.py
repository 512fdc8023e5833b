"""The command line: thin commands over the library; torch is imported only when a command needs it.

Exit codes: 0 done and agreed, 1 a disagreement was found, 2 wrong usage or bad input, 3 a worker failed,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Annotated

import typer

from samestep import __version__
from samestep.cli import audit, compare, doctor, encode, explain, report, schedule, train, verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="samestep",
    help="Synchronous data-parallel training in PyTorch that is exact, and proves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="train")(train.train)
app.command(name="audit")(audit.audit)
app.command(name="compare")(compare.compare)
app.command(name="doctor")(doctor.doctor)
app.command(name="encode")(encode.encode)
app.command(name="explain")(explain.explain)
app.command(name="report")(report.report)
app.command(name="schedule")(schedule.schedule)
app.command(name="verify")(verify.verify)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"samestep {__version__}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
