"""How workers ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

__all__ = ["first_failure"]


def first_failure(failures: Mapping[int, Any]) -> tuple[int, int, str]:
    """Return rank, process id and end of the worker that most likely took the others along.

    Args:
        failures: torch's `ProcessFailure` by rank, at least one.
    """
    from samestep.launch import describe_exit

    # SIGTERM is what the agent itself sends to those that are left.
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    rank, first = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    if first.exitcode == -signal.SIGALRM:
        return rank, first.pid, "came to no step boundary in time (its alarm ended it; see its stack)"
    return rank, first.pid, describe_exit(first.exitcode)
