"""Start the workers of a command on this machine the way torchrun does: torch's elastic agent, in this process.

::

    samestep train ... --workers 4
      └─ agent (this process) ── python -m ... rank 0
                              ├─ python -m ... rank 1      each finds torchrun's variables in its environment
                              └─ ...

The agent watches the workers, stops all when one fails, and this module says in one line which one failed and
how. Under torchrun itself nothing is started: the command is then already one of the workers.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from samestep.errors import SpecError, WorkerError

__all__ = ["check_port", "is_worker", "run_command"]


def is_worker() -> bool:
    """Return whether this process was started by torchrun (or by `run_command`) as one of several workers."""
    return "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def run_command(arguments: Sequence[str], n_workers: int, *, port: int = 0, max_restarts: int = 0) -> int:
    """Run ``python arguments...`` in `n_workers` local workers and return the command's exit code.

    Args:
        arguments: what follows the interpreter, such as ``["-m", "samestep", "train", ...]``.
        n_workers: number of workers.
        port: rendezvous port on the loopback device; 0 takes a free one.
        max_restarts: how often the workers are started again when one fails.

    Returns:
        0 when all workers ended well; 1 or 2 when they ended with that code, having said why; 130 after Ctrl-C.

    Raises:
        WorkerError: when a worker was killed or failed in another way; `rank` says which one.
        SpecError: when the rendezvous port is taken.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from samestep.launch import use_loopback

    check_port(port)
    # The agent's own log repeats, at length, what is said below in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    use_loopback()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n_workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"is_host": True},
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(),
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return _settle(error, n_workers)
    except (SignalException, KeyboardInterrupt) as stop:
        number = getattr(stop, "sigval", signal.SIGINT)
        return 128 + int(number)
    return 0


def check_port(port: int) -> None:
    """Refuse a rendezvous port that something else listens on.

    Args:
        port: on the loopback device; 0 stands for any free one.

    Raises:
        SpecError: when the port cannot be used.
    """
    import socket

    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise SpecError(
                f"`port`: {port} on 127.0.0.1 cannot be used ({error.strerror}). "
                "Choose another one, or 0 for any free one.",
                name="port",
            ) from error


def _settle(error: Any, n_workers: int) -> int:
    """Turn the agent's list of failed workers into an exit code, or into the error that names the cause."""
    from samestep.launch import describe_exit

    failures: dict[int, Any] = error.failures
    # The agent itself ends the workers that are left with SIGTERM.
    failures = {r: f for r, f in failures.items() if f.exitcode != -signal.SIGTERM} or failures
    killed = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    # Codes 1 and 2 come with a message of the worker's own; workers that lost it as a peer end with 3.
    told = [failure.exitcode for failure in failures.values() if failure.exitcode in (1, 2, 130)]
    if told and not killed:
        return int(told[0])
    rank, first = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    raise WorkerError(
        f"rank {rank} of {n_workers} (process {first.pid}) {describe_exit(first.exitcode)}; "
        "the other workers were stopped.",
        rank=rank,
    )
