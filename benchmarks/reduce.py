"""What the order-fixed sum costs beside ``dist.all_reduce``: ``python benchmarks/reduce.py``.

The contenders take turns in the same workers, so that a busy machine slows all; a time is that of the slowest
worker, figures are medians, ratios are medians of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep import launch, tree
from samestep.group import Group
from samestep.reduce import reduce
from samestep.tree import Layout

RESULTS = Path(__file__).parent / "results"


def measure(group: Group, megabytes: list[float], repeats: int) -> list[dict[str, Any]]:
    layout = Layout.of(group.world_size, group.world_size)
    jobs: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda flat: dist.all_reduce(flat, group=group.process_group),
        "tree_sum": lambda flat: tree.tree_sum([flat], layout, group),
        "exchange": lambda flat: tree._exchange([flat], layout, group),
    }
    rows = []
    for size in megabytes:
        flat = torch.ones(int(size * 2**20 / 4))
        turns = []
        for turn in range(repeats + 1):
            seconds = []
            for job in jobs.values():
                flat.fill_(1.0)
                group.barrier()
                start = time.perf_counter()
                job(flat)
                seconds.append(time.perf_counter() - start)
            if turn:  # the first touches the memory
                turns.append(reduce(torch.tensor(seconds, dtype=torch.float64), group, "max").tolist())
        row: dict[str, Any] = {"world_size": group.world_size, "megabytes": size}
        for place, name in enumerate(jobs):
            row[f"{name}_ms"] = round(1000 * statistics.median(turn[place] for turn in turns), 2)
            row[f"{name}_ratio"] = round(statistics.median(turn[place] / turn[0] for turn in turns), 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "reduce.json")
    args = parser.parse_args()
    rows = []
    for world_size in args.world_sizes:
        rows += launch.run(measure, world_size, args.megabytes, args.repeats, timeout_seconds=3600)[0]
        ratios = [row["tree_sum_ratio"] for row in rows if row["world_size"] == world_size]
        print(f"{world_size} workers: median ratio over the sizes {statistics.median(ratios):.3f}")
    for row in rows:
        print(row)
    found = {
        "command": "python benchmarks/reduce.py",
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "backend": "gloo",
        "threads": 1,
        "repeats": args.repeats,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
