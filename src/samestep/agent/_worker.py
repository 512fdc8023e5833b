"""What a worker knows of the agent that started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

__all__ = ["AGENT_VARIABLE", "die_with_agent", "is_worker"]

AGENT_VARIABLE = "SAMESTEP_AGENT"
"""Set in workers that `run_command` started: the agent's process id."""

_SET_PDEATHSIG = 1  # of Linux' prctl


def is_worker() -> bool:
    """Return whether this process was started by torchrun (or by `run_command`) as one of several workers."""
    return "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def die_with_agent() -> None:
    """Let this worker be killed when the elastic agent that started it dies, so that none is left behind.

    On Linux the kernel does it; elsewhere a thread looks twice a second. Does nothing in a process that no elastic
    agent started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(os.environ.get(AGENT_VARIABLE, os.getppid()))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before anybody watched
        os._exit(3)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(3)
