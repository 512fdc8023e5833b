"""``samestep compare``: one script at several numbers of workers, or two recorded runs."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from samestep.cli import _verdicts
from samestep.cli._speak import spoken
from samestep.errors import SpecError

if TYPE_CHECKING:
    from samestep.compare import Comparison, Trace
    from samestep.explain import Explanation

__all__ = ["compare"]


def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_A RUN_B | -- SCRIPT ARGS...",
            help="Two traces or run folders with one; or a script, or `samestep train ...`.",
        ),
    ],
    workers: Annotated[
        str | None, typer.Option(help="Run the script with each of these numbers of workers, such as 1,2,4.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Stop each run after as many updates.")] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep traces and a report.html in this folder; they are removed otherwise."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Take only the same bits for agreement.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit XML file for CI.")] = None,
    explain: Annotated[
        bool, typer.Option(help="Explain in float64 the step at which runs of a recipe part.")
    ] = True,
) -> None:
    """Say whether runs are the same, and if not, which tensor parts first, in which phase and by how much.

    Example: samestep compare --workers 1,2,4 --steps 50 -- train.py --lr 0.1

    Example: samestep compare --workers 1,2 --steps 5 -- samestep train semantic-ids --config my.yaml

    Of two run folders, the second one keeps the verdict, and its report shows it.

    Exit codes: 0 agreed, 1 different, 2 wrong usage or a comparison that proves nothing, 3 a worker failed.
    """
    with spoken():
        counts = _counts(workers)
        if not counts and len(what) != 2:
            raise SpecError(
                f"compare: expected two traces, or --workers 1,2,4 -- SCRIPT, got {len(what)} arguments. "
                "See samestep compare --help.",
                name="what",
            )
        if not counts and (steps is not None or keep is not None):
            raise SpecError("compare: --steps and --keep go with --workers. Leave them out.", name="steps")
        found, why = _run(what, counts, steps, keep, explain) if counts else _read(what, explain)
        _show(found, why, exact, as_json)
        if junit is not None:
            from samestep.compare import junit as document

            junit.parent.mkdir(parents=True, exist_ok=True)
            junit.write_text(document(found), encoding="utf-8")
    raise typer.Exit(_exit_code(found, exact))


def _counts(workers: str | None) -> list[int]:
    if workers is None:
        return []
    words = [word.strip() for word in workers.split(",")]
    counts = [int(word) for word in words if word.isdigit()]
    if len(counts) != len(words) or len(set(counts)) < 2 or 0 in counts or len(set(counts)) != len(counts):
        raise SpecError(
            f"--workers: expected at least two different numbers, such as 1,2,4, got {workers!r}.",
            name="workers",
        )
    return sorted(counts)


_Found: TypeAlias = "tuple[list[Comparison], list[Explanation | str | None]]"


def _read(folders: list[str], explain: bool) -> _Found:
    from samestep import compare as comparing

    a, b = (comparing.read(folder) for folder in folders)
    found, why = _judge([a, b], explain)
    run = _verdicts.recipe_folder(b.folder)
    if run is not None:
        _verdicts.keep(found[0], why[0], run)
    return found, why


def _judge(traces: list[Trace], explain: bool) -> _Found:
    from samestep import compare as comparing

    found = [
        _verdicts.name_settings(comparing.compare(traces[0], other), traces[0], other) for other in traces[1:]
    ]
    if max(trace.world_size for trace in traces) > 2:
        found = [one.beside_more_workers() for one in found]
    why = [
        _verdicts.explain_first(one, traces[0], other) if explain else None
        for one, other in zip(found, traces[1:])
    ]
    return found, why


def _run(
    arguments: list[str], counts: list[int], steps: int | None, keep: Path | None, explain: bool
) -> _Found:
    from samestep import compare as comparing

    if arguments[0] == "samestep":
        arguments = ["-m", *arguments]
    trains = arguments[:3] == ["-m", "samestep", "train"]
    if arguments[0] not in ("-m", "-c") and not Path(arguments[0]).is_file():
        raise SpecError(f"script: expected a file, got {arguments[0]!r}.", name="script")
    if trains and any(word.split("=")[0] in ("--out", "--workers", "--resume") for word in arguments):
        raise SpecError(
            "compare: --out, --workers and --resume are ours to give to samestep train. Leave them out behind --, "
            "and keep the runs with --keep.",
            name="what",
        )
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise SpecError(f"--keep: expected a new or empty folder, got {keep}. Name another one.", name="keep")
    with tempfile.TemporaryDirectory(prefix="samestep-compare-") as scratch:
        base = keep or Path(scratch)
        traces = []
        for count in counts:
            print(f"samestep: {count} worker{'s' * (count > 1)} ...", file=sys.stderr)
            place = base / f"{count}-worker{'s' * (count > 1)}"
            more: list[str] = []
            if trains:
                more = ["--out", str(place), *([] if steps is None else ["--stop-after", str(steps)])]
            trace = place / "trace" if trains else place
            limit = None if trains else steps
            traces.append(
                comparing.read(comparing.run_script([*arguments, *more], count, trace, steps=limit))
            )
        found, why = _judge(traces, explain)
        if keep is not None:
            for one, reason in zip(found, why):
                page = _verdicts.keep(one, reason, keep)
            print(f"samestep: report in {page}", file=sys.stderr)
        return found, why


def _exit_code(found: list[Comparison], exact: bool) -> int:
    codes = [1 if exact and c.verdict == "within" and c.proves else c.exit_code for c in found]
    return 1 if 1 in codes else max(codes)


def _show(found: list[Comparison], why: list[Explanation | str | None], exact: bool, as_json: bool) -> None:
    code = _exit_code(found, exact)
    if as_json:
        verdict = {0: "agreed", 1: "different", 2: "proves nothing"}[code]
        comparisons = [
            c.to_json() | {"explanation": e if e is None or isinstance(e, str) else e.to_dict()}
            for c, e in zip(found, why)
        ]
        print(
            json.dumps({"verdict": verdict, "exit_code": code, "comparisons": comparisons}, allow_nan=False)
        )
        return
    from rich.console import Console

    console = Console()
    for one, reason in zip(found, why):
        console.print(_table(one))
        for text in one.unlike:
            console.print(f"  before the first step: {text}", markup=False, highlight=False, soft_wrap=True)
        console.print(one.sentence(), markup=False, highlight=False, soft_wrap=True)
        if reason is not None:
            text = reason if isinstance(reason, str) else reason.sentence
            console.print(f"  explained: {text}", markup=False, highlight=False, soft_wrap=True)
        notes = one.refusals if one.first is not None else ()
        for text in (*notes, *one.warnings):
            console.print(f"  note: {text}", markup=False, highlight=False, soft_wrap=True)
        if exact and one.verdict == "within":
            console.print("  --exact: within is not enough", markup=False, highlight=False)


def _table(one: Comparison) -> Any:
    from rich.table import Table

    n_steps = len({cell.step for cell in one.cells})
    table = Table(title=f"{one.reference} against {one.other}, {n_steps} records", title_justify="left")
    for title in ("phase", "verdict", "records", "nearest to its bound, or first different"):
        table.add_column(title, overflow="fold")
    colours = {"exact": "green", "within": "yellow", "different": "red"}
    for phase, verdict in one.phase_verdicts().items():
        cells = [cell for cell in one.cells if cell.phase == phase]
        counts = [(sum(cell.verdict == v for cell in cells), v) for v in colours]
        counts.append((sum(not cell.judged for cell in cells), "not judged"))
        records = ", ".join(f"{number} {what}" for number, what in counts if number)
        table.add_row(phase, f"[{colours[verdict]}]{verdict}[/]", records, _detail(cells, verdict))
    return table


def _detail(cells: list[Any], verdict: str) -> str:
    """Return the cell that says most about a phase, in words."""
    from rich.markup import escape

    shown = [cell for cell in cells if cell.verdict == verdict and cell.tensor is not None]
    if not shown:
        return ""
    if verdict == "within":
        cell = max(shown, key=lambda c: (c.relative or 0.0) / c.allowed if c.allowed else 0.0)
    else:
        cell = shown[0]
    words = f"step {cell.step} {cell.tensor}"
    if cell.relative is not None:
        words += f": {cell.relative:.2g} of its size"
        if cell.allowed:
            words += f", {cell.allowed:.2g} allowed"
    return escape(words)
