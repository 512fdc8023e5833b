"""What the order-fixed sum costs beside ``dist.all_reduce``: ``python benchmarks/reduce.py``.

The contenders take turns in the same workers, so that a busy machine slows all; a time is that of the slowest
worker, figures are medians, ratios are medians of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.distributed as dist

from samestep import launch, tree
from samestep.group import Group
from samestep.reduce import reduce
from samestep.tree import Layout


def measure(group: Group, megabytes: list[float], repeats: int, exchange: bool) -> list[dict[str, Any]]:
    layout = Layout.of(group.world_size, group.world_size)
    jobs: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda flat: dist.all_reduce(flat, group=group.process_group),
        "tree_sum": lambda flat: tree.tree_sum([flat], layout, group),
    }
    if exchange:
        jobs["exchange"] = lambda flat: list(tree._exchange([flat], layout, group, 0))
        jobs["all_to_all"] = lambda flat: tree._all_to_all([flat], layout, group)
        if layout.halving:
            jobs["halving"] = lambda flat: list(tree._halve_and_double(flat, group, 0))
    rows = []
    for size in megabytes:
        flat = torch.ones(int(size * 2**20 / 4))
        turns = []
        for turn in range(repeats + 1):
            found = {}
            # Each starts a turn as often as the others.
            for place in sorted(range(len(jobs)), key=lambda place: (place + turn) % len(jobs)):
                flat.fill_(1.0)
                group.barrier()
                start = time.perf_counter()
                list(jobs.values())[place](flat)
                found[place] = time.perf_counter() - start
            seconds = [found[place] for place in range(len(jobs))]
            if turn:  # the first touches the memory
                turns.append(reduce(torch.tensor(seconds, dtype=torch.float64), group, "max").tolist())
        row: dict[str, Any] = {"world_size": group.world_size, "megabytes": size}
        for place, name in enumerate(jobs):
            ratios = sorted(turn[place] / turn[0] for turn in turns)
            row[f"{name}_ms"] = round(1000 * statistics.median(turn[place] for turn in turns), 2)
            row[f"{name}_ratio"] = round(statistics.median(ratios), 3)
            row[f"{name}_quartiles"] = [round(ratios[len(ratios) * q // 4], 3) for q in (1, 3)]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--exchange", action="store_true", help="time every schedule by itself, too")
    record.add_out(parser, "reduce")
    args = parser.parse_args()
    rows = []
    for world_size in args.world_sizes:
        rows += launch.run(
            measure, world_size, args.megabytes, args.repeats, args.exchange, timeout_seconds=3600
        )[0]
        ratios = [row["tree_sum_ratio"] for row in rows if row["world_size"] == world_size]
        print(f"{world_size} workers: median ratio over the sizes {statistics.median(ratios):.3f}")
    record.save(args.out, rows, lambda _, axes: plot(axes, rows), backend="gloo", repeats=args.repeats)


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    for world_size in sorted({row["world_size"] for row in rows}):
        mine = [row for row in rows if row["world_size"] == world_size]
        axes.plot(
            [row["megabytes"] for row in mine],
            [row["tree_sum_ratio"] for row in mine],
            marker="o",
            label=f"N={world_size}",
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="MB", ylabel="time of the ordered sum / dist.all_reduce", xscale="log", ylim=0)
    axes.legend()


if __name__ == "__main__":
    main()
