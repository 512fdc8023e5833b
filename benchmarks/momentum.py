"""What a momentum rescale costs: an LR change through the scheduler, against one foreach pass over its buffers.

The optimizer is torch SGD over 100 million parameters in 100 tensors, under the policy `frozen`, with a rate that
changes at every step, so that every step rescales the whole history. The parameters have no gradient, so that
`optimizer.step()` is the rescale and the clock and nothing else.

    python benchmarks/momentum.py
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


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(n_parameters: int, n_tensors: int, rounds: int, device: str) -> dict[str, Any]:
    size = n_parameters // n_tensors
    params = [torch.nn.Parameter(torch.zeros(size, device=device)) for _ in range(n_tensors)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for param in params:
        optimizer.state[param]["momentum_buffer"] = torch.ones(size, device=device)
    buffers = [optimizer.state[param]["momentum_buffer"] for param in params]
    n_steps = 2 * rounds + 10
    alternating = schedules.piecewise([1.0, 0.5] * n_steps, list(range(1, 2 * n_steps)))
    scheduler = LRScheduler(optimizer, alternating, momentum=momentum.frozen())

    def through_scheduler() -> None:
        optimizer.step()

    def one_pass() -> None:
        torch._foreach_mul_(buffers, 2.0)

    for _ in range(2):
        through_scheduler()
        one_pass()
    ours, passes = [], []
    for _ in range(rounds):  # A B A B, so that a slow spell of the machine meets both
        before = float(buffers[0][0])
        ours.append(seconds(through_scheduler, device))
        changed = float(buffers[0][0])
        if changed == before:
            raise RuntimeError(f"step {scheduler.applied_steps}: the history was not rescaled")
        passes.append(seconds(one_pass, device))
        for buffer in buffers:
            buffer.fill_(1.0)
    return {
        "n_parameters": size * n_tensors,
        "n_tensors": n_tensors,
        "scheduler_seconds": statistics.median(ours),
        "foreach_seconds": statistics.median(passes),
        "ratio": round(statistics.median(ours) / statistics.median(passes), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    record.add_out(parser, "momentum")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(n, arguments.tensors, arguments.rounds, arguments.device) for n in arguments.parameters]
    record.save(arguments.out, rows, lambda _, axes: plot(axes, rows), bar_ratio=1.1, device=arguments.device)


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    x = [row["n_parameters"] for row in rows]
    for side, label in (("scheduler", "LR change through the scheduler"), ("foreach", "one foreach pass")):
        axes.plot(x, [row[f"{side}_seconds"] for row in rows], marker="o", label=label)
    axes.set(xlabel="parameters", ylabel="seconds", xscale="log", yscale="log")
    axes.legend()


if __name__ == "__main__":
    main()
