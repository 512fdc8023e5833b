"""How long ``samestep schedule`` takes to preview and plot a long schedule, once everything is imported.

Timed is what the command does from its arguments to the written picture: read the expression, make the scheduler,
compute all steps, draw, print the table. The first call is shown apart: it imports torch and matplotlib.

    python benchmarks/preview.py [--out benchmarks/results/preview.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib
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
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, object] = {
        "command": f"python benchmarks/preview.py --steps {args.steps} --rounds {args.rounds}",
        "machine": f"{platform.machine()}, {platform.system()}, one thread",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "matplotlib": matplotlib.__version__,
        },
        "steps": args.steps,
        "bar_seconds": 1.0,
        "load_average": round(os.getloadavg()[0], 1),  # above the number of cores, wall seconds mean little
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, expression in (("multistep", EXPRESSION), ("cosine", COSINE)):
            for suffix in ("png", "svg"):
                times = [
                    once(expression, args.steps, Path(folder) / f"a.{suffix}") for _ in range(args.rounds + 1)
                ]
                rest = times[1:]
                figures[f"{name}_{suffix}"] = {
                    "first_seconds": round(times[0][0], 3),
                    "seconds": round(statistics.median(wall for wall, _ in rest), 3),
                    "cpu_seconds": round(statistics.median(cpu for _, cpu in rest), 3),
                }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
