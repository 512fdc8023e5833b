"""What a momentum rescale costs: an LR change through the scheduler, against one foreach pass over its buffers.

The optimizer is torch SGD over 100 million parameters in 100 tensors, under the policy `frozen`, with a rate that
changes at every step, so that every step rescales the whole history. The parameters have no gradient, so that
`optimizer.step()` is the rescale and the clock and nothing else.

    OMP_NUM_THREADS=1 python benchmarks/momentum.py --out benchmarks/results/momentum.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from samestep import momentum, schedules
from samestep.scheduler import LRScheduler

BAR = 1.1


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(n_parameters: int, n_tensors: int, rounds: int, device: str) -> dict[str, object]:
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
    ratio = statistics.median(ours) / statistics.median(passes)
    return {
        "n_parameters": size * n_tensors,
        "n_tensors": n_tensors,
        "rounds": rounds,
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "scheduler_seconds": statistics.median(ours),
        "foreach_seconds": statistics.median(passes),
        "ratio": ratio,
        "bar": BAR,
        "within_bar": ratio <= BAR,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.parameters, arguments.tensors, arguments.rounds, arguments.device)
    result |= {"torch": torch.__version__, "python": platform.python_version(), "command": " ".join(sys.argv)}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0 if result["within_bar"] else 1


if __name__ == "__main__":
    sys.exit(main())
