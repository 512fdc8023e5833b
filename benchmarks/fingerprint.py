"""What a fingerprint costs beside a plain sum over the same bytes: ``python benchmarks/fingerprint.py``.

The two take turns (A B A B ...), so that a busy machine slows both; the figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import record
import torch
from torch import Tensor

from samestep import fingerprint


def medians(jobs: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first turn compiles kernels and touches the memory
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def row(label: str, tensors: dict[str, Tensor], device: torch.device, repeats: int) -> dict[str, object]:
    n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    jobs: dict[str, Callable[[], object]] = {
        "sum": lambda: [t.sum() for t in tensors.values()],
        "fingerprint": lambda: fingerprint.word(tensors),
    }
    found = medians(jobs, device, repeats)
    return {
        "state": label,
        "bytes": n_bytes,
        "sum_gb_per_second": round(n_bytes / found["sum"] / 1e9, 2),
        "fingerprint_gb_per_second": round(n_bytes / found["fingerprint"] / 1e9, 2),
        "fingerprint_seconds": round(found["fingerprint"], 6),
        "ratio_to_sum": round(found["sum"] / found["fingerprint"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=21)
    record.add_out(parser, "fingerprint")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    states = {
        "one tensor, 64 MiB": {"x": torch.randn(2**24, device=device)},
        "one tensor, 256 MiB": {"x": torch.randn(2**26, device=device)},
        "100 tensors of 1 MiB": {str(i): torch.randn(2**18, device=device) for i in range(100)},
        "300 tensors of 16 KiB": {str(i): torch.randn(64, 64, device=device) for i in range(300)},
    }
    rows = [row(label, tensors, device, args.repeats) for label, tensors in states.items()]
    record.save(args.out, rows, lambda _, axes: plot(axes, rows), threads=args.threads, bar_ratio=0.6)


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    axes.barh([each["state"] for each in rows], [each["ratio_to_sum"] for each in rows])
    axes.axvline(0.6, color="black", linewidth=0.8)
    axes.set_xlabel("speed of the fingerprint / speed of a plain sum")


if __name__ == "__main__":
    main()
