"""Two workers that add numbers, by the way that runs take."""

from __future__ import annotations

import torch

from samestep import launch, reduce
from samestep.doctor._finding import Finding, note, ok, problem
from samestep.errors import SamestepError
from samestep.group import Group

__all__ = ["all_reduce"]

_LENGTH = 1000
_MAX_LINES = 3


def all_reduce(n_devices: int, timeout_seconds: float) -> list[Finding]:
    """Start workers and let them add known numbers; over NCCL too where there are CUDA devices.

    Args:
        n_devices: CUDA devices.
        timeout_seconds: bound on each start of workers.
    """
    found = [_try("gloo", "cpu", timeout_seconds)]
    if n_devices >= 2:
        found.append(_try("NCCL", "cuda", timeout_seconds))
    elif n_devices == 1:
        text = "one CUDA device: two workers need one each, so NCCL between workers was not tried"
        found.append(note("all-reduce", text))
    return found


def _try(way: str, device: str, timeout_seconds: float) -> Finding:
    name = "all-reduce"
    try:
        sums = launch.run(_add, 2, timeout_seconds=timeout_seconds, device=device)
    except (SamestepError, OSError, RuntimeError) as error:
        return problem(
            name,
            f"two workers over {way} failed: {_short(str(error))}",
            "See the problems above first; then the firewall, the memory and the number of processes allowed.",
            exit_code=3,
        )
    expected = [float(3 * i) for i in range(_LENGTH)]  # i from rank 0 and 2 i from rank 1, exact in float32
    wrong = [rank for rank, values in enumerate(sums) if values != expected]
    if wrong:
        return problem(
            name,
            f"two workers over {way} got a wrong sum on rank {' and '.join(map(str, wrong))}",
            "Do not train here: the transport or a device is faulty. Try another device or torch build.",
            exit_code=3,
        )
    return ok(name, f"two workers over {way} added {_LENGTH:,} numbers and both have the right sums")


def _add(group: Group) -> list[float]:
    """Return the sum over workers of (rank + 1) x (0, 1, 2, ...)."""
    mine = torch.arange(_LENGTH, dtype=torch.float32, device=group.device) * (group.rank + 1)
    found: list[float] = reduce.reduce(mine, group).tolist()
    return found


def _short(text: str) -> str:
    """Return the lines of a worker's report that say what went wrong: each traceback's last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    lines = [line for line in lines if not line.endswith("Traceback (most recent call last):")]
    return " | ".join(lines[:_MAX_LINES]) or text
