"""What samestep adds to the start of a program: `import samestep` beside `import torch`, and `samestep --help`.

Whole processes, in turn, medians. `import samestep` names its modules and imports none of them; the comparison is
``import torch`` with and without it before. For the command line the peer is ``torchrun --help``.

    python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

import record

COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "import torch, samestep": [sys.executable, "-c", "import torch, samestep"],
    "import samestep": [sys.executable, "-c", "import samestep"],
    "python alone": [sys.executable, "-c", "pass"],
    "samestep --help": [sys.executable, "-m", "samestep", "--help"],
    "samestep train --help": [sys.executable, "-m", "samestep", "train", "--help"],
    "torchrun --help": [sys.executable, "-m", "torch.distributed.run", "--help"],
}


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    record.add_out(parser, "startup")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    rows = [{"command": name, "seconds": round(statistics.median(each), 3)} for name, each in times.items()]
    record.save(
        options.out, rows, lambda _, axes: plot(axes, rows), import_bar_seconds=0.05, help_bar_seconds=0.5
    )


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    axes.barh([row["command"] for row in rows], [row["seconds"] for row in rows])
    axes.set_xlabel("seconds")


if __name__ == "__main__":
    main()
