"""Stop all workers together, and let none hang or outlive the job: signals, time-outs, parents that die.

::

    SIGTERM, or SIGINT once ──> this worker asks ──┐
    nothing                 ──> has nothing to ask ┴─ exchange at a step boundary ─> all stop: save, end with 0
    SIGINT twice            ──> ends at once
    no boundary in time     ──> every worker's stack goes to a file, the workers end, the agent starts them again
    the agent dies          ──> its workers die with it

The loop stays the user's::

    with survive.Guard(group, grace_seconds=30, timeout_seconds=600) as guard:
        for shards in loader:
            guard.ask()                      # the exchange runs beside the step
            step.train_step(shards, loss_fn)
            if guard.answer():               # the same on all workers
                checkpointer.save(step.step, model=model, optimizer=optimizer)
                break

A signal is only noted while Python or a collective is at work; a thread reads it even when the main thread is stuck
in C++, so that the grace period holds in any case.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import SamestepError, SpecError
from samestep.group import Group
from samestep.pooling import Pool, ReduceOp

__all__ = ["Guard", "Stopped"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HUNG_EXIT, _TWICE_EXIT = 3, 130
_SECONDS_BETWEEN, _STEPS_BETWEEN = 0.1, 64  # exchanges, where steps are shorter


class Stopped(SamestepError):  # noqa: N818  it is no error
    """All workers were asked to stop and have agreed to; nothing is wrong. Raised on all of them alike."""

    exit_code = 0


class Guard:
    """Watches over a worker from ``with`` to its end.

    Signal handlers are set in the main thread only, and put back at the end; in another thread a guard exchanges
    what it is told by `request_stop` and nothing more.

    Args:
        group: the workers.
        grace_seconds: from a signal to the end of the process at the latest. A worker that finds no step boundary
            in that time writes its stack and ends with exit code 3; the last checkpoint is then what remains.
        timeout_seconds: longest time between two boundaries (questions, steps, calls of a guarded pool); a worker
            that takes longer is held to hang. None watches for no hang.

    Raises:
        SpecError: when a time is not positive.

    Collective: `ask`, `answer` and `check` are, over all ranks of the group.
    """

    def __init__(
        self,
        group: Group,
        *,
        grace_seconds: float = 30.0,
        timeout_seconds: float | None = 600.0,
    ) -> None:
        for name, value in (("grace_seconds", grace_seconds), ("timeout_seconds", timeout_seconds)):
            if value is not None and not value > 0:
                raise SpecError(f"`{name}`: expected a positive number, got {value}.", name=name)
        self._group = group
        self._grace, self._timeout = grace_seconds, timeout_seconds
        self._asked = 0  # the first signal; written by the listening thread
        self._interrupts = 0
        self._stop = False
        self._flag = torch.zeros(2, dtype=torch.float64)  # asked or not; seconds of a step
        self._work: Any = None
        self._open = False  # whether `ask` was called since the last answer
        self._steps_left, self._steps, self._since = 0, 0, time.monotonic()
        self._beat = time.monotonic()
        self._deadline = float("inf")
        self._stacks: TextIO | None = None
        self._restore: list[Callable[[], Any]] = []
        self._wake = threading.Event()

    @property
    def stopping(self) -> bool:
        """Whether all workers have agreed to stop."""
        return self._stop

    @property
    def was_asked(self) -> bool:
        """Whether this worker itself was asked to stop."""
        return bool(self._asked)

    def request_stop(self, number: int = signal.SIGTERM) -> None:
        """Note a wish to stop, as the signal of that number does."""
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(_TWICE_EXIT)
        if not self._asked:
            self._asked = number
            self._deadline = time.monotonic() + self._grace

    def ask(self) -> None:
        """Begin to exchange whether any worker was asked to stop; `answer` ends it. Costs the step no wait.

        Where steps are short it is done every tenth of a second only, at the same steps on all workers.

        Collective: all ranks of the group.
        """
        self.beat()
        self._open = True
        self._steps += 1
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._exchange()

    def _exchange(self) -> None:
        if self._group.world_size > 1 and self._work is None and not self._stop:
            now = time.monotonic()
            seconds = (now - self._since) / max(self._steps, 1)
            self._steps, self._since = 0, now
            self._flag.copy_(torch.tensor([float(self.was_asked), seconds], dtype=torch.float64))
            with self._group.collective("question whether to stop"):
                self._work = dist.all_reduce(
                    self._flag, op=dist.ReduceOp.MAX, group=self._group.process_group, async_op=True
                )

    def answer(self) -> bool:
        """Return whether to stop; the same on all workers, and true for good once it is.

        Raises:
            WorkerError: when a worker is gone.

        Collective: all ranks of the group.
        """
        if not self._stop and self._group.world_size == 1:
            self._stop = self.was_asked
        elif not self._stop and (self._work is not None or not self._open):
            self._exchange()
            work, self._work = self._work, None
            with self._group.collective("question whether to stop"):
                work.wait()
            asked, seconds = self._flag.tolist()
            self._stop = bool(asked)
            # The slowest worker's time, which all know now, tells all alike when to ask again.
            self._steps_left = min(_STEPS_BETWEEN, int(_SECONDS_BETWEEN / max(seconds, 1e-9)))
        self._open = False
        self.beat()
        return self._stop

    def check(self) -> None:
        """Ask and answer at once.

        Raises:
            Stopped: on all workers, when one of them was asked to stop.

        Collective: all ranks of the group.
        """
        if self.answer():
            error = Stopped("stopped when asked to, before a step. Go on with --resume.")
            error.common = True
            raise error

    def pool(self, pool: Pool) -> Pool:
        """Return a pool that calls `check` at each of its calls: long work on it then stops between two of them."""
        return _GuardedPool(pool, self)

    def beat(self) -> None:
        """Say that this worker is alive: the time-out begins anew."""
        self._beat = time.monotonic()
        if self._timeout is not None and self._restore:
            # In case that the thread cannot act, because C++ holds the interpreter: an alarm that needs no Python.
            _set_alarm(self._timeout + 1.0)

    def write_stacks_to(self, path: Path) -> None:
        """Let stacks go to a file, if it can be written, rather than to standard error; an empty one is removed."""
        with suppress(OSError):
            self._stacks = path.open("a")  # what an earlier start has left there stays
        if self._restore and self._stacks is not None and self._timeout is not None:
            faulthandler.register(signal.SIGALRM, file=self._stacks, all_threads=True, chain=True)

    def __enter__(self) -> Guard:
        if threading.current_thread() is not threading.main_thread():
            return self
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # the wake-up of signals asks for it
        self._restore = [lambda: os.close(reader), lambda: os.close(writer)]
        for number in _SIGNALS:
            before = signal.signal(number, _do_nothing)
            self._restore.append(_setter(number, before))
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._restore.append(lambda: signal.set_wakeup_fd(wakeup))
        if self._timeout is not None:
            left, start = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
            faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
            self._restore.append(lambda: faulthandler.unregister(signal.SIGALRM))
            self._restore.append(
                lambda: _set_alarm(max(left - time.monotonic() + start, 0.01) if left else 0.0)
            )
        thread = threading.Thread(target=self._listen, args=(reader,), name="samestep-guard", daemon=True)
        thread.start()

        def end() -> None:
            self._wake.set()
            os.write(writer, b"\0")
            thread.join()

        self._restore.append(end)
        self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._restore:
            self._restore.pop()()
        if self._stacks is not None:
            self._stacks.close()
            path = Path(self._stacks.name)
            if path.exists() and path.stat().st_size == 0:
                path.unlink()

    def _listen(self, reader: int) -> None:
        """Note signals and act on deadlines, whatever the main thread is stuck in."""
        while not self._wake.is_set():
            limit = self._deadline
            if self._timeout is not None:
                limit = min(limit, self._beat + self._timeout)
            wait = min(max(limit - time.monotonic(), 0.0), 1.0)
            if select.select([reader], [], [], wait)[0]:
                for number in os.read(reader, 64):
                    if number in _SIGNALS:
                        self.request_stop(number)
                continue
            now = time.monotonic()
            if now >= self._deadline:
                self._give_up(f"found no step boundary within the {self._grace:g} s of grace after a signal")
            if self._timeout is not None and now >= self._beat + self._timeout:
                self._give_up(
                    f"came to no step boundary within {self._timeout:g} s, so it is held to hang. "
                    "If it was only slow, give it more with --timeout-seconds"
                )

    def _give_up(self, what: str) -> NoReturn:
        stacks, who = self._stacks, f"rank {self._group.rank} of {self._group.world_size}"
        where = "standard error" if stacks is None else stacks.name
        print(f"samestep: {who} {what}; its stack: {where}", file=sys.stderr, flush=True)
        try:
            faulthandler.dump_traceback(file=2 if stacks is None else stacks, all_threads=True)
        finally:
            os._exit(_HUNG_EXIT)


class _GuardedPool:
    """A pool that looks for a wish to stop at each call."""

    def __init__(self, pool: Pool, guard: Guard) -> None:
        self._pool, self._guard = pool, guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def __call__(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        self._guard.check()
        return self._pool(tensor, op)


def _do_nothing(number: int, frame: Any) -> None:
    """Stand for a handler: Python writes the signal's number into the pipe by itself."""


def _set_alarm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _setter(number: signal.Signals, before: Any) -> Callable[[], Any]:
    return lambda: signal.signal(number, before if before is not None else signal.SIG_DFL)
