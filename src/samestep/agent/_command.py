"""Run a command in local workers, and say how it ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from samestep.agent._ends import first_failure
from samestep.agent._worker import AGENT_VARIABLE
from samestep.errors import SpecError, WorkerError

if TYPE_CHECKING:  # torch's agent takes a second to import
    from samestep.agent._elastic import Agent

__all__ = ["check_port", "run_command"]


def run_command(
    arguments: Sequence[Any],
    n_workers: int,
    *,
    port: int = 0,
    max_restarts: int = 0,
    grace_seconds: float = 30.0,
    final_codes: Collection[int] = (),
    tell: Callable[[str], None] | None = None,
    entrypoint: Callable[..., Any] | None = None,
) -> int:
    """Run ``python arguments...`` in `n_workers` local workers and return the command's exit code.

    SIGTERM and SIGINT go on to the workers, which get `grace_seconds` to end; a second SIGINT kills them.

    Args:
        arguments: what follows the interpreter, such as ``["-m", "samestep", "train", ...]``.
        n_workers: number of workers.
        port: rendezvous port on the loopback device; 0 takes a free one.
        max_restarts: how often the workers are started again when one fails.
        grace_seconds: from a signal to the moment when workers that are left are killed.
        final_codes: exit codes after which a restart would be of no use.
        tell: gets a line for each restart.
        entrypoint: function to call with the arguments, in forked workers, in place of the interpreter.

    Returns:
        0 when all workers ended well, also after a signal; 1 or 2 when they ended with that code, having said why;
        128 + n when signal n ended workers that did not handle it, or a second SIGINT came.

    Raises:
        WorkerError: when a worker was killed or failed in another way; `rank` says which one.
        SpecError: when the rendezvous port is taken.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    check_port(port)
    with _environment():
        agent = _make_agent(arguments, n_workers, port, max_restarts, grace_seconds, entrypoint)
        agent.final_codes, agent.tell = final_codes, tell
        try:
            with _signals(agent):
                result = agent.run()
        except SignalException as stop:
            return _settle_stop(int(stop.sigval), agent.exit_codes(), agent.killed, grace_seconds)
        finally:
            agent.leave()
    return _settle(result.failures, n_workers) if result.is_failed() else 0


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


def _make_agent(
    arguments: Sequence[Any],
    n_workers: int,
    port: int,
    max_restarts: int,
    grace_seconds: float,
    entrypoint: Callable[..., Any] | None,
) -> Agent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    from samestep.agent._elastic import Agent

    # torch's own log repeats, at length, what is said below in one line; each of its modules has its own level.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{port}",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
        is_host=True,
    )
    spec = WorkerSpec(
        role="worker",
        local_world_size=n_workers,
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        entrypoint=sys.executable if entrypoint is None else _Forked(entrypoint),
        args=tuple(arguments),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    # Nothing is redirected, so that there is no folder of logs to leave behind.
    logs = DefaultLogsSpecs(log_dir=os.devnull)
    agent = Agent(spec, logs, start_method="fork")
    agent.grace_seconds = grace_seconds
    return agent


class _Forked:
    """A function to run in a worker that is a copy of the agent's process."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")

    def __call__(self, *arguments: Any) -> Any:
        for number in (signal.SIGTERM, signal.SIGINT):  # the agent's handlers are not the worker's
            signal.signal(number, signal.SIG_DFL)
        return self._function(*arguments)


@contextmanager
def _environment() -> Iterator[None]:
    """Set what the workers inherit, for as long as they run."""
    from samestep.launch import use_loopback

    before = dict(os.environ)
    use_loopback()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # signals are handled here
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals(agent: Agent) -> Iterator[None]:
    """Turn the first signal into the agent's orderly end, the second SIGINT into its workers' sudden one."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if seen.count(signal.SIGINT) > 1:
            agent.kill()
        elif len(seen) == 1:
            raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settle_stop(number: int, codes: Mapping[int, int | None], killed: bool, grace_seconds: float) -> int:
    """Turn the exit codes of workers that were asked to stop into one for the command."""
    if killed:
        return 128 + signal.SIGINT
    late = [rank for rank, code in codes.items() if code in (None, -signal.SIGKILL)]
    if late:
        raise WorkerError(
            f"rank {late[0]} of {len(codes)} did not end within {grace_seconds:g} s after a signal and was killed. "
            "The last checkpoint is whole.",
            rank=late[0],
        )
    # Workers that did not handle the signal had nothing to save; others then lost them as peers.
    if not codes or any(code in (-number, 128 + number) for code in codes.values()):
        return 128 + number
    return max(code or 0 for code in codes.values())


def _settle(failures: dict[int, Any], n_workers: int) -> int:
    """Turn the agent's list of failed workers into an exit code, or into the error that names the cause."""
    # The agent itself ends the workers that are left with SIGTERM.
    failures = {r: f for r, f in failures.items() if f.exitcode != -signal.SIGTERM} or failures
    killed = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    # Codes 1 and 2 come with a message of the worker's own; workers that lost it as a peer end with 3.
    told = [failure.exitcode for failure in failures.values() if failure.exitcode in (1, 2, 130)]
    if told and not killed:
        return int(told[0])
    rank, pid, how = first_failure(failures)
    raise WorkerError(
        f"rank {rank} of {n_workers} (process {pid}) {how}; the other workers were stopped.", rank=rank
    )
