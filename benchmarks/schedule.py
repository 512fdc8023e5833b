"""What the scheduler costs: one scheduler step against torch's LambdaLR.

Both sides run the same optimizer with no parameters that have gradients, so that only what surrounds the update is
timed: for samestep the hooks on ``optimizer.step()``, for torch ``optimizer.step()`` and ``scheduler.step()``.
The sides alternate, and medians are compared.

    python benchmarks/schedule.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import record
import torch

from samestep import momentum, schedules
from samestep.scheduler import LRScheduler

SCHEDULE = schedules.multistep([30_000, 40_000], 0.1) * schedules.linear_warmup(5_000, 0.1)
FLAT = schedules.multistep([30_000, 40_000], 0.1)


def lambda_factor(step: int) -> float:
    warmup = 0.1 + 0.9 * step / 5_000 if step < 5_000 else 1.0
    return warmup * 0.1 ** ((step >= 30_000) + (step >= 40_000))


def lambda_flat(step: int) -> float:
    return 0.1 ** ((step >= 30_000) + (step >= 40_000))


def optimizer(n_groups: int) -> torch.optim.SGD:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(n_groups)]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def bare(n_groups: int, n_steps: int) -> float:
    opt = optimizer(n_groups)
    begin = time.perf_counter()
    for _ in range(n_steps):
        opt.step()
    return (time.perf_counter() - begin) / n_steps


def samestep(n_groups: int, n_steps: int, schedule: schedules.Schedule) -> float:
    opt = optimizer(n_groups)
    LRScheduler(opt, schedule, momentum=momentum.free())
    begin = time.perf_counter()
    for _ in range(n_steps):
        opt.step()
    return (time.perf_counter() - begin) / n_steps


def lambda_lr(n_groups: int, n_steps: int, factor) -> float:
    opt = optimizer(n_groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    begin = time.perf_counter()
    for _ in range(n_steps):
        opt.step()
        scheduler.step()
    return (time.perf_counter() - begin) / n_steps


def compare(
    n_groups: int, n_steps: int, rounds: int, schedule: schedules.Schedule, factor: Callable[[int], float]
) -> dict[str, float]:
    times: dict[str, list[float]] = {"bare": [], "samestep": [], "lambda_lr": []}
    for _ in range(rounds):
        times["bare"].append(bare(n_groups, n_steps))
        times["samestep"].append(samestep(n_groups, n_steps, schedule))
        times["lambda_lr"].append(lambda_lr(n_groups, n_steps, factor))
    median = {name: statistics.median(values) for name, values in times.items()}
    ours, theirs = median["samestep"] - median["bare"], median["lambda_lr"] - median["bare"]
    return {
        "samestep_microseconds": round(1e6 * ours, 2),
        "lambda_lr_microseconds": round(1e6 * theirs, 2),
        "ratio": round(ours / theirs, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    record.add_out(parser, "schedule")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bare(1, 10)  # imports what torch imports late
    cases = {"every update": (SCHEDULE, lambda_factor), "hardly ever": (FLAT, lambda_flat)}
    rows = [
        {"param_groups": n, "lr_changes": label} | compare(n, args.steps, args.rounds, *sides)
        for label, sides in cases.items()
        for n in (1, 8, 64)
    ]
    record.save(args.out, rows, lambda _, axes: plot(axes, rows))


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    for label in dict.fromkeys(row["lr_changes"] for row in rows):
        mine = [row for row in rows if row["lr_changes"] == label]
        for side, style in (("samestep", "-"), ("lambda_lr", "--")):
            x = [row["param_groups"] for row in mine]
            y = [row[f"{side}_microseconds"] for row in mine]
            axes.plot(x, y, style, marker="o", label=f"{side}, LR changes {label}")
    axes.set(xlabel="param groups", ylabel="microseconds per update", xscale="log", yscale="log")
    axes.legend()


if __name__ == "__main__":
    main()
