"""The handle on the workers of a job: who am I, how many are we, and do we agree.

One process alone is the same code: its group has no process group, and every collective is a no-op on it.

::

    torchrun's variables ──> Group.from_env() ──> rank, world_size, local_rank, device, process_group
    nothing set          ──> one process          0     1           0           cpu     None

This module sets up process groups and settles common decisions. It moves no tensors of the user's (see `reduce`)
and starts no processes (see `launch`).
"""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from samestep.environment import pick_device, read_env
from samestep.errors import AgreementError, GroupError, SamestepError, WorkerError
from samestep.handshake import apart
from samestep.transport import first_line, is_transport

__all__ = ["Group"]

_WORD = "samestep/failed"


@dataclass(eq=False)
class Group:
    """The workers of a job, seen from one of them.

    Attributes:
        rank: this worker's number, 0 .. world_size - 1.
        world_size: number of workers.
        local_rank: this worker's number on its machine; picks the device, nothing else.
        device: where this worker computes.
        process_group: torch's object, or None for a single process.
        timeout_seconds: how long a collective waits for a missing worker before it raises.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    process_group: dist.ProcessGroup | None = None
    timeout_seconds: float = 600.0
    _store: Any = field(default=None, repr=False)
    _owns: bool = field(default=False, repr=False)

    @classmethod
    def single(cls, device: str = "cpu") -> Group:
        """Return the group of one process, whatever the environment says.

        Example:
            >>> Group.single().world_size
            1
        """
        return cls(rank=0, world_size=1, local_rank=0, device=pick_device(device, 0))

    @classmethod
    def from_env(cls, device: str = "auto", timeout_seconds: float = 600.0, threads: int | None = 1) -> Group:
        """Join the job that torchrun's variables describe, or return a single process.

        A process group that is already initialized (by Lightning, Accelerate or the user) is adopted and later
        left open; one that is made here is closed by `close` or at the end of a ``with`` block. Made here, it
        speaks gloo for CPU tensors and, on CUDA, NCCL beside it.

        Args:
            device: "auto" (CUDA where there is one), "cpu" or "cuda".
            timeout_seconds: how long a collective waits for a missing worker.
            threads: intra-op threads of this worker, None to leave torch's setting. torchrun sets one thread for
                several workers but not for one, which alone changes bits; so the default is one everywhere.

        Raises:
            GroupError: variables missing or contradictory, the rendezvous port is taken, or workers missing.

        Collective: all workers of the job.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        if dist.is_available() and dist.is_initialized():
            return cls._adopt(device, timeout_seconds)
        rank, world_size, local_rank = read_env()
        if world_size == 1:
            return cls(0, 1, local_rank, pick_device(device, local_rank), None, timeout_seconds)
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_seconds)))
        except (dist.DistError, ValueError, OSError) as error:
            raise GroupError(
                f"rendezvous at {where}: rank {rank} of {world_size} could not join: {first_line(error)}. "
                "Free that port or choose another one (MASTER_PORT, or torchrun --master-port), "
                "and see that all workers are started.",
                rank=rank,
            ) from error
        return cls.from_store(store, rank, world_size, local_rank, device, timeout_seconds)

    @classmethod
    def from_store(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        local_rank: int,
        device: str = "auto",
        timeout_seconds: float = 600.0,
    ) -> Group:
        """Make torch's default process group over a store that all workers share; None for a group of one.

        Raises:
            GroupError: when a worker did not join in time.

        Collective: all workers.
        """
        chosen = pick_device(device, local_rank)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=timeout_seconds)
        try:
            store = apart(dist.HashStore() if store is None else store, rank, world_size, timeout_seconds)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        except (dist.DistError, RuntimeError) as error:
            raise GroupError(
                f"start of the process group: rank {rank} of {world_size} got: {first_line(error)}. "
                "See whether another worker failed before it.",
                rank=rank,
            ) from error
        return cls(rank, world_size, local_rank, chosen, dist.group.WORLD, timeout_seconds, store, True)

    @classmethod
    def _adopt(cls, device: str, timeout_seconds: float) -> Group:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        world = dist.group.WORLD
        if dist.get_world_size() > 1 and "gloo" not in str(dist.get_backend_config()):
            # Decisions and counts live on the CPU, which a process group of NCCL alone cannot carry.
            raise GroupError(
                f"process group: expected one that also carries CPU tensors, got backend "
                f"`{dist.get_backend()}` only. Initialize it with backend='cpu:gloo,cuda:nccl'."
            )
        chosen = pick_device(device, local_rank)
        return cls(dist.get_rank(), dist.get_world_size(), local_rank, chosen, world, timeout_seconds)

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for all: writes files, shows progress. Rank 0."""
        return self.rank == 0

    def agree(self, ok: bool, message: str, error: type[SamestepError] = AgreementError) -> None:
        """Return when all workers are content; else raise the same error on all of them.

        This is how a finding on one rank becomes a common decision, so that no rank is left waiting in a
        collective that the others never reach.

        Args:
            ok: this worker's finding.
            message: what this worker found; read only where `ok` is false.
            error: what to raise; its `rank` is the first that was not content.

        Raises:
            AgreementError: or `error`; names the ranks that were not content, with what they found.
            WorkerError: when a worker did not answer.

        Collective: all ranks of the group.

        Example:
            >>> Group.single().agree(True, "")
        """
        if self.world_size == 1:
            if not ok:
                raise _common(error(message, rank=self.rank))
            return
        verdict = torch.tensor([int(ok)])
        with self.collective("agreement"):
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=self.process_group)
        if int(verdict):
            return
        found = self.gather_text("" if ok else (message or "(no message)"))
        first = next(rank for rank, text in enumerate(found) if text)
        raise _common(error(_name_ranks(found, self.world_size), rank=first))

    def gather_text(self, text: str) -> list[str]:
        """Return every worker's text, by rank.

        Collective: all ranks of the group.
        """
        if self.world_size == 1:
            return [text]
        raw = (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            if text
            else torch.empty(0, dtype=torch.uint8)
        )
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self.collective("gathering of texts"):
            dist.all_gather(lengths, torch.tensor([raw.numel()]), group=self.process_group)
            padded = torch.zeros(max(1, *(int(n) for n in lengths)), dtype=torch.uint8)
            padded[: raw.numel()] = raw
            parts = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(parts, padded, group=self.process_group)
        return [part[: int(n)].numpy().tobytes().decode() for part, n in zip(parts, lengths)]

    def abandon(self, message: str) -> None:
        """Leave word for the others why this worker is about to raise where they cannot be asked.

        They will lose contact when this worker ends, and their `WorkerError` then carries the word.

        Args:
            message: what went wrong here.
        """
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_WORD, f"rank {self.rank} of {self.world_size}: {message}")

    def _word(self) -> str:
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([_WORD]):
                return str(self._store.get(_WORD).decode())
        return "See the other workers' messages: the first that failed is the cause."

    def barrier(self) -> None:
        """Wait until all workers are here.

        Collective: all ranks of the group.
        """
        self.agree(True, "")

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Turn torch's transport errors inside the block into a `WorkerError` that says what was going on.

        Args:
            what: the action, as a noun, for the message.

        Raises:
            WorkerError: when a worker is gone or did not answer within `timeout_seconds`.
        """
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, SamestepError) or not is_transport(error):
                raise
            raise WorkerError(
                f"{what}: rank {self.rank} of {self.world_size} lost contact with another worker "
                f"({first_line(error)}). {self._word()}",
                rank=self.rank,
            ) from error

    def close(self) -> None:
        """Leave the process group, when it was made here; safe to call twice."""
        if self._owns and dist.is_initialized():
            self._owns = False
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dist.destroy_process_group()
            self.process_group = None

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._owns:
            # A worker that leaves early breaks the others' start-up, so all leave together.
            self.barrier()
        self.close()


def _common(error: SamestepError) -> SamestepError:
    error.common = True
    return error


def _name_ranks(found: list[str], world_size: int) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(found):
        if text:
            by_text.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in by_text.items():
        if len(ranks) == world_size:
            parts.append(text)
        else:
            label = "rank" if len(ranks) == 1 else "ranks"
            parts.append(f"{label} {', '.join(map(str, ranks))} of {world_size}: {text}")
    return "\n".join(parts)
