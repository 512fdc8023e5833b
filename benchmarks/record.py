"""Where and how figures are kept: JSON with the conditions, the same as a Markdown table, and a plot."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samestep import environment

RESULTS = Path(__file__).parent / "results"


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a benchmark the option that says where its JSON goes; the table and the plot lie beside it."""
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file")


def save(
    out: Path,
    rows: Sequence[dict[str, Any]],
    plot: Callable[[Any, Any], None] | None = None,
    panels: int = 1,
    **facts: Any,
) -> None:
    """Write rows and the conditions they were measured under.

    Args:
        out: the JSON file; `.md` and `.png` are written beside it.
        rows: flat; values that are no numbers or text stay out of the table.
        plot: ``plot(figure, axes)`` draws into `panels` axes side by side (one axis itself when there is one).
        panels: number of axes.
        **facts: what else to keep in the JSON.
    """
    command = shlex.join(["python", "benchmarks/" + Path(sys.argv[0]).name, *_without_out(sys.argv[1:])])
    found = {
        "command": command,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "environment": environment.fingerprint(),
        **facts,
        "rows": list(rows),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(f"# `{command}`, {found['date']}\n\n" + as_table(rows))
    if plot is not None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, panels, figsize=(1 + 5 * panels, 4.2))
        plot(figure, axes)
        figure.tight_layout()
        figure.savefig(out.with_suffix(".png"), dpi=110)
        plt.close(figure)
    print(as_table(rows))


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, with a column for every key that is a number or text somewhere."""
    keys = list(
        dict.fromkeys(
            key for row in rows for key, value in row.items() if isinstance(value, int | float | str)
        )
    )
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * len(keys) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(key, "")) for key in keys) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _without_out(words: list[str]) -> list[str]:
    if "--out" in words:
        at = words.index("--out")
        return words[:at] + words[at + 2 :]
    return words
