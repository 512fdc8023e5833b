"""What the scheduler costs: one scheduler step against torch's LambdaLR, and the preview of a long schedule.

Both sides run the same optimizer with no parameters that have gradients, so that only what surrounds the update is
timed: for samestep the hooks on ``optimizer.step()``, for torch ``optimizer.step()`` and ``scheduler.step()``.
The sides alternate, and medians are compared.

    python benchmarks/schedule.py [--out benchmarks/results/schedule.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

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
    n_groups: int, n_steps: int, rounds: int, schedule: schedules.Schedule, factor
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


def rescale(n_elements: int, rounds: int) -> dict[str, float]:
    """A momentum rescale of a large SGD against one foreach multiplication of the same buffers."""
    weights = [torch.nn.Parameter(torch.zeros(n_elements // 100)) for _ in range(100)]
    opt = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for weight in weights:
        opt.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    buffers = [opt.state[weight]["momentum_buffer"] for weight in weights]
    ours, theirs = [], []
    for round_number in range(rounds + 1):
        lrs = [0.1, 0.2] if round_number % 2 else [0.2, 0.1]
        begin = time.perf_counter()
        momentum.apply(opt, momentum.frozen(), lrs[:1], lrs[1:])
        middle = time.perf_counter()
        torch._foreach_mul_(buffers, 0.5 if round_number % 2 else 2.0)
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
    ours_ms, theirs_ms = 1e3 * statistics.median(ours[1:]), 1e3 * statistics.median(theirs[1:])
    return {
        "samestep_milliseconds": round(ours_ms, 2),
        "foreach_milliseconds": round(theirs_ms, 2),
        "ratio": round(ours_ms / theirs_ms, 3),
    }


def preview(n_steps: int, rounds: int) -> float:
    scheduler = LRScheduler(optimizer(2), SCHEDULE, momentum=momentum.threshold())
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        scheduler.preview(n_steps)
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--elements", type=int, default=100_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bare(1, 10)  # imports what torch imports late
    figures = {
        "command": f"python benchmarks/schedule.py --steps {args.steps} --rounds {args.rounds}",
        "machine": f"{platform.machine()}, {platform.system()}, one thread",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "step_with_lr_change_every_step_1_group": compare(
            1, args.steps, args.rounds, SCHEDULE, lambda_factor
        ),
        "step_with_lr_change_every_step_8_groups": compare(
            8, args.steps, args.rounds, SCHEDULE, lambda_factor
        ),
        "step_without_lr_change_1_group": compare(1, args.steps, args.rounds, FLAT, lambda_flat),
        "preview_of_50000_steps_2_groups_seconds": preview(50_000, 3),
        "momentum_rescale": {"elements": args.elements} | rescale(args.elements, 5),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
