"""Start workers on this machine and bring their results, or their tracebacks, home.

::

    run(fn, world_size) ──> fork server (torch loaded once) ──> workers ──> results by rank, or every traceback

It leaves no worker behind and does not hang: when one worker fails, the others get a moment to report the same
error and are then stopped. The rendezvous is a file and the traffic stays on the loopback device. For whole
commands in the way of torchrun see `agent`; several machines are torchrun's job.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import GroupError, SamestepError, WorkerError
from samestep.group import Group

__all__ = ["describe_exit", "run", "use_loopback"]

_GRACE_SECONDS = 5.0


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 600.0,
    threads: int = 1,
    device: str = "cpu",
) -> list[Any]:
    """Call ``fn(group, *args)`` in `world_size` local workers and return their results by rank.

    Args:
        fn: a function at module level, so that it can be imported in the workers.
        world_size: number of workers.
        *args: passed on to every worker; must be picklable, as must the results.
        timeout_seconds: bound on the whole call.
        threads: intra-op threads of each worker.
        device: as in `Group.from_env`.

    Returns:
        What `fn` returned, by rank.

    Raises:
        SamestepError: when all workers raised the same one, that error itself.
        WorkerError: when a worker raised, was killed, left, or did not end in time; `rank` names the first one
            and the text has every traceback. Its cause is the worker's own exception where it can be pickled.

    Example:
        >>> from operator import attrgetter
        >>> run(attrgetter("rank"), 1)
        [0]
    """
    if world_size < 1:
        raise ValueError(f"`world_size`: expected at least 1, got {world_size}.")
    # Plain pickle copies tensors; multiprocessing's own would share one memory between all workers.
    job = pickle.dumps((fn, args))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "samestep.launch"])
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        workers: list[BaseProcess] = []
        pipes: list[connection.Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                setup = _Setup(rank, world_size, folder, timeout_seconds, threads, device, dict(os.environ))
                worker = context.Process(target=_work, args=(theirs, setup, job))
                worker.start()
                theirs.close()
                workers.append(worker)
                pipes.append(ours)
            outcomes = _collect(workers, pipes, timeout_seconds, Path(folder))
        finally:
            _stop(workers)
            for pipe in pipes:
                pipe.close()
    return _settle(outcomes, world_size)


class _Setup:
    """What a worker needs to know before it can join."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        folder: str,
        timeout: float,
        threads: int,
        device: str,
        env: dict[str, str],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.folder = folder
        self.timeout = timeout
        self.threads = threads
        self.device = device
        self.env = env


class _Outcome:
    """How a worker ended: a result, an exception, or a description of its death."""

    def __init__(self, result: Any = None, error: BaseException | None = None, text: str = "") -> None:
        self.result = result
        self.error = error
        self.text = text


def _work(pipe: connection.Connection, setup: _Setup, job: bytes) -> None:
    # The fork server was started with an older environment than the caller's.
    os.environ.clear()
    os.environ.update(setup.env)
    use_loopback()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(pipe,), daemon=True).start()
    stacks = open(Path(setup.folder) / f"stack-{setup.rank}", "w")  # noqa: SIM115  kept open for the handler
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    torch.set_num_threads(setup.threads)
    try:
        fn, args = pickle.loads(job)
        with _join(setup) as group:
            result = fn(group, *args)
        message: tuple[str, Any] = ("result", pickle.dumps(result))
    except BaseException as error:
        # The traceback of a worker that only lost its peer would bury the one that matters.
        text = str(error) if isinstance(error, GroupError) else traceback.format_exc()
        message = ("error", (_dump_error(error), text))
    pipe.send(message)
    pipe.close()


def _join(setup: _Setup) -> Group:
    if setup.world_size == 1:
        return Group.single(setup.device)
    store = dist.FileStore(str(Path(setup.folder) / "store"), setup.world_size)
    return Group.from_store(
        store, setup.rank, setup.world_size, setup.rank, setup.device, timeout_seconds=setup.timeout
    )


def _leave_with_parent(pipe: connection.Connection) -> None:
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def use_loopback() -> None:
    """Keep local workers' traffic on this machine, whatever its host name resolves to."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _dump_error(error: BaseException) -> bytes | None:
    try:
        raw = pickle.dumps(error)
        pickle.loads(raw)
    except Exception:
        return None
    return raw


def _collect(
    workers: list[BaseProcess], pipes: list[connection.Connection], timeout: float, folder: Path
) -> dict[int, _Outcome]:
    """Wait until all workers ended, or one failed and the others had their grace, or time ran out."""
    outcomes: dict[int, _Outcome] = {}
    deadline = time.monotonic() + timeout
    failing_since: float | None = None
    while len(outcomes) < len(workers):
        now = time.monotonic()
        limit = deadline if failing_since is None else min(deadline, failing_since + _GRACE_SECONDS)
        if now >= limit:
            if failing_since is None:
                outcomes.update(_time_out(workers, outcomes, timeout, folder))
            break
        waiting = {pipes[r]: r for r in range(len(workers)) if r not in outcomes}
        for ready in connection.wait(list(waiting), timeout=min(1.0, limit - now)):
            rank = waiting[ready]  # type: ignore[index]
            outcomes[rank] = _receive(workers[rank], pipes[rank])
            if outcomes[rank].text and failing_since is None:
                failing_since = time.monotonic()
    return outcomes


def _receive(worker: BaseProcess, pipe: connection.Connection) -> _Outcome:
    try:
        kind, content = pipe.recv()
    except (EOFError, OSError):
        worker.join(_GRACE_SECONDS)
        return _Outcome(text=describe_exit(worker.exitcode))
    if kind == "result":
        return _Outcome(result=pickle.loads(content))
    raw, text = content
    return _Outcome(error=None if raw is None else pickle.loads(raw), text=text)


def describe_exit(exit_code: int | None) -> str:
    """Return in words how a process ended.

    Example:
        >>> describe_exit(-9)
        'was killed by SIGKILL'
    """
    if exit_code is None:
        return "closed its pipe and did not end"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"left with exit code {exit_code}"


def _time_out(
    workers: list[BaseProcess], outcomes: dict[int, _Outcome], timeout: float, folder: Path
) -> dict[int, _Outcome]:
    late = [r for r in range(len(workers)) if r not in outcomes]
    for rank in late:
        if workers[rank].pid and workers[rank].is_alive():
            os.kill(workers[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.5)
    found = {}
    for rank in late:
        file = folder / f"stack-{rank}"
        stack = file.read_text() if file.exists() else ""
        found[rank] = _Outcome(text=f"did not end within {timeout:g} seconds; it was at\n{stack}")
    return found


def _stop(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.join(0.05)
        if worker.is_alive():
            worker.terminate()
    for worker in workers:
        worker.join(1.0)
        if worker.is_alive():
            worker.kill()
            worker.join()
        worker.close()


def _settle(outcomes: dict[int, _Outcome], world_size: int) -> list[Any]:
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.text}
    if not failed:
        return [outcomes[rank].result for rank in range(world_size)]
    errors = [outcome.error for outcome in failed.values()]
    first = errors[0]
    common = len(failed) == world_size and all(
        isinstance(e, SamestepError) and type(e) is type(first) and str(e) == str(first) for e in errors
    )
    if common and isinstance(first, SamestepError):
        raise first
    # A worker that lost contact with another one is a consequence; the cause comes first.
    order = sorted(failed, key=lambda rank: isinstance(failed[rank].error, GroupError))
    stopped = [rank for rank in range(world_size) if rank not in outcomes]
    lines = [f"rank {rank} of {world_size}: {failed[rank].text.rstrip()}" for rank in order]
    if stopped:
        lines.append(f"stopped because of that: rank {', '.join(map(str, stopped))}")
    raise WorkerError("\n\n".join(lines), rank=order[0]) from failed[order[0]].error
