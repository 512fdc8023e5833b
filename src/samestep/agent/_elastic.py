"""torch's elastic agent, with what it does not tell: exit codes after a signal, and why it starts workers again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from samestep.agent._ends import first_failure

__all__ = ["Agent"]


class Agent(LocalElasticAgent):
    """An elastic agent for workers on this machine.

    Attributes:
        final_codes: exit codes after which a restart would be of no use.
        tell: gets a line for each restart.
        killed: whether `kill` was called.
        grace_seconds: from a stop of the workers to the end of those that do not stop.
    """

    final_codes: Collection[int] = ()
    tell: Callable[[str], None] | None = None
    killed = False
    grace_seconds = 30.0
    _running: Any = None  # torch's handle on the workers, while they are those of the current start
    _last: RunResult | None = None

    def exit_codes(self) -> dict[int, int | None]:
        """Return the workers' exit codes by local rank; none when no workers are there, None for one that lives."""
        if self._running is None:
            return {}
        handlers = getattr(self._running, "subprocess_handlers", None)
        if handlers is not None:
            return {rank: handler.proc.poll() for rank, handler in handlers.items()}
        return {rank: process.exitcode for rank, process in enumerate(self._running._pc.processes)}

    def kill(self) -> None:
        """Kill the workers, and what they started, at once."""
        self.killed = True
        for pid in self._running.pids().values() if self._running is not None else ():
            with suppress(ProcessLookupError, PermissionError):
                # Workers from the interpreter lead a process group of their own; forked ones are in this one.
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)

    def leave(self) -> None:
        """Close the rendezvous and its port."""
        self._worker_group.spec.rdzv_handler.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._running = self._pcontext
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._last = result
            codes = [failure.exitcode for failure in result.failures.values()]
            if any(code in self.final_codes for code in codes) and -signal.SIGKILL not in codes:
                self._remaining_restarts = 0
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # torch 2.9 has no option for the time, and `timeout` is that of later ones.
        if self._pcontext:
            self._pcontext.close(death_sig, max(1, round(self.grace_seconds)))

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        if self.tell is not None and self._last is not None and self._last.failures:
            rank, pid, how = first_failure(self._last.failures)
            self.tell(
                f"restart {spec.max_restarts - self._remaining_restarts} of {spec.max_restarts}: "
                f"rank {rank} of {spec.local_world_size} (process {pid}) {how}"
            )
        self._running = None
        super()._restart_workers(worker_group)
