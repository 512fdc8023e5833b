"""How long ``samestep schedule`` takes to preview and plot a long schedule, once everything is imported.

Timed is what the command does from its arguments to the written picture: read the expression, make the scheduler,
compute all steps, draw, print the table. A first call, which imports torch and matplotlib, is left out.

    python benchmarks/preview.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import record
import torch

from samestep.cli.schedule import schedule

EXPRESSION = "linear_warmup(500, 0.1) * multistep([30_000, 40_000], 0.1)"
COSINE = "linear_warmup(500, 0.1) * cosine(50_000)"


def once(expression: str, n_steps: int, picture: Path) -> tuple[float, float]:
    """Return wall and CPU seconds; on an idle machine they are the same."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        schedule(expression, steps=n_steps, lr=[0.1, 0.2], plot=picture)
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    record.add_out(parser, "preview")
    parser.add_argument("--steps", type=int, nargs="+", default=[5_000, 50_000, 500_000])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n_steps in args.steps:
            for name, expression in (("multistep", EXPRESSION), ("cosine", COSINE)):
                for suffix in ("png", "svg"):
                    picture = Path(folder) / f"a.{suffix}"
                    times = [once(expression, n_steps, picture) for _ in range(args.rounds + 1)][1:]
                    wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
                    row = {"steps": n_steps, "schedule": name, "picture": suffix}
                    rows.append(row | {"seconds": round(wall, 3), "cpu_seconds": round(cpu, 3)})
    record.save(args.out, rows, lambda _, axes: plot(axes, rows), bar_seconds_of_50000_steps=1.0)


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    for kind in dict.fromkeys((row["schedule"], row["picture"]) for row in rows):
        mine = [row for row in rows if (row["schedule"], row["picture"]) == kind]
        axes.plot([r["steps"] for r in mine], [r["seconds"] for r in mine], marker="o", label=", ".join(kind))
    axes.set(
        xlabel="steps of the schedule", ylabel="seconds of samestep schedule --plot", xscale="log", ylim=0
    )
    axes.legend()


if __name__ == "__main__":
    main()
