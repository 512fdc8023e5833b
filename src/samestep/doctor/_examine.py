"""All checks in the order in which one would ask."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from samestep.doctor._finding import Finding
from samestep.doctor._machine import backends, bits, build, count_cores, devices, folder_is_writable, versions
from samestep.doctor._variables import cublas, launcher, local_workers, network, others, port, threads
from samestep.doctor._workers import all_reduce

__all__ = ["examine", "exit_code"]


def examine(folder: Path | str = ".", *, timeout_seconds: float = 60.0) -> list[Finding]:
    """Look at this machine, this process and its environment, and try two workers.

    Args:
        folder: where runs would be written; a file is written there for a moment.
        timeout_seconds: bound on each start of workers.

    Returns:
        What was found, in a fixed order; also where a check itself could not be done.
    """
    variables = os.environ
    cuda = devices()
    n_devices = cuda.count
    n_workers = local_workers(variables)
    return [
        versions(),
        build(),
        backends(n_devices),
        cuda.finding,
        threads(variables, count_cores(), n_workers),
        launcher(),
        port(variables),
        *network(variables, n_devices),
        *others(variables),
        *([cublas(variables)] if n_devices else []),
        bits("cuda" if n_devices else "cpu"),
        folder_is_writable(Path(folder)),
        *all_reduce(n_devices, timeout_seconds),
    ]


def exit_code(findings: Iterable[Finding]) -> int:
    """Return what the command line returns for findings: the largest of their codes.

    Example:
        >>> exit_code([Finding("threads", "note", "8 threads"), Finding("port", "problem", "taken", "free it", 2)])
        2
    """
    return max((finding.exit_code for finding in findings), default=0)
