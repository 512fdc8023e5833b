"""``samestep doctor``: is this machine set up to run workers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli._speak import spoken

if TYPE_CHECKING:
    from samestep.doctor import Finding

__all__ = ["doctor"]

_COLOURS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "problem": typer.colors.RED}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look whether this machine is set up to run workers, and try two of them.

    Example: samestep doctor

    Exit codes: 0 no problem, 2 a setting is wrong, 3 the workers' all-reduce failed.
    """
    with spoken():
        from samestep import doctor as examining
        from samestep import environment

        findings = examining.examine()
        code = examining.exit_code(findings)
        if as_json:
            rows = [
                {
                    "name": f.name,
                    "grade": f.grade,
                    "text": f.text,
                    "advice": f.advice,
                    "exit_code": f.exit_code,
                }
                for f in findings
            ]
            kept = environment.fingerprint(environment.pick_device("auto", 0))
            print(json.dumps({"exit_code": code, "findings": rows, "fingerprint": kept}))
        else:
            _show(findings)
    raise typer.Exit(code)


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        grade = typer.style(f"{finding.grade:<7}", fg=_COLOURS[finding.grade])
        typer.echo(f"{grade}  {finding.name:<{width}}  {finding.text}")
        if finding.advice:
            typer.echo(f"{'':<{width + 11}}-> {finding.advice}")
    n_of = {grade: sum(f.grade == grade for f in findings) for grade in ("problem", "note")}
    typer.echo("\n" + ", ".join(_counted(n, grade) for grade, n in n_of.items()))


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"
