"""What a broadcast of a whole model costs beside one flat buffer of its size: ``python benchmarks/start.py``.

The jobs take turns (A B C A B C ...), so that a busy machine slows all of them; the figures are medians, and the
time of a job is that of its slowest worker.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import record
import torch
import torch.distributed as dist
from torch import nn

from samestep import launch, start
from samestep.group import Group


def build(width: int, depth: int) -> nn.Module:
    """A transformer-like stack: per layer 12 x width^2 parameters in matrices, and small vectors beside them."""
    layers = [
        nn.ModuleDict(
            {
                "norm": nn.LayerNorm(width),
                "qkv": nn.Linear(width, 3 * width),
                "out": nn.Linear(width, width),
                "up": nn.Linear(width, 4 * width),
                "down": nn.Linear(4 * width, width),
                "batch_norm": nn.BatchNorm1d(width),
            }
        )
        for _ in range(depth)
    ]
    return nn.Sequential(*layers)


def clock(job: Callable[[], object], group: Group) -> float:
    group.barrier()
    began = time.perf_counter()
    job()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()
    return time.perf_counter() - began


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1 << 20)


def work(group: Group, width: int, depth: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(group.rank)
    model = build(width, depth).to(group.device)
    n_parameters = sum(p.numel() for p in model.parameters())
    before = peak_mib()
    start.broadcast(model, group=group, verify=False)
    grown = peak_mib() - before
    flat = torch.zeros(n_parameters, device=group.device)
    jobs: dict[str, Callable[[], object]] = {
        "flat_seconds": lambda: dist.broadcast(flat, src=0, group=group.process_group),
        "broadcast_seconds": lambda: start.broadcast(model, group=group, verify=False),
        "verified_seconds": lambda: start.broadcast(model, group=group),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            elapsed = clock(job, group)
            if turn:
                seconds[name].append(elapsed)
    found = {name: statistics.median(values) for name, values in seconds.items()}
    for name in ("broadcast", "verified"):  # of each turn, then the median: the load changes between turns
        ratios = [a / b for a, b in zip(seconds[f"{name}_seconds"], seconds["flat_seconds"], strict=True)]
        found[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        found[f"{name}_ratio_of_best"] = round(
            min(seconds[f"{name}_seconds"]) / min(seconds["flat_seconds"]), 3
        )
    n_tensors = len([*model.parameters(), *model.buffers()])
    return {"n_parameters": n_parameters, "n_tensors": n_tensors, "extra_peak_mib": round(grown, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    record.add_out(parser, "start")
    args = parser.parse_args()
    rows = []
    for width, depth in ((832, 12), (256, 127)):  # 100 million parameters in 168 and in 1778 tensors
        found = launch.run(work, args.workers, width, depth, args.repeats, device=args.device)
        slowest = {key: max(result[key] for result in found) for key in found[0]}
        rows.append(slowest)
    record.save(args.out, rows, lambda _, axes: plot(axes, rows), workers=args.workers, bar_ratio=1.1)


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    labels = [f"{row['n_tensors']} tensors" for row in rows]
    for shift, name in ((-0.2, "broadcast"), (0.2, "verified")):
        axes.bar(
            [i + shift for i in range(len(rows))], [row[f"{name}_ratio"] for row in rows], 0.4, label=name
        )
    axes.set_xticks(range(len(rows)), labels)
    axes.axhline(1.1, color="black", linewidth=0.8)
    axes.set_ylabel("time / broadcast of one flat buffer")
    axes.legend()


if __name__ == "__main__":
    main()
