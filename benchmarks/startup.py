"""What samestep adds to the start of a program: `import samestep` beside `import torch`, and `samestep --help`.

Whole processes, in turn, medians. `import samestep` names its modules and imports none of them; the comparison is
``import torch`` with and without it before. For the command line the peer is ``torchrun --help``.

    python benchmarks/startup.py [--rounds 9] [--out benchmarks/results/startup.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

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
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    added = medians["import torch, samestep"] - medians["import torch"]
    figures = {
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "import_added_seconds": round(added, 3),
        "import_bar_seconds": 0.05,
        "help_bar_seconds": 0.5,
        "help_to_torchrun_ratio": round(medians["samestep --help"] / medians["torchrun --help"], 3),
    }
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
