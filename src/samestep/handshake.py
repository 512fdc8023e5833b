"""A name for this start of the workers, which no earlier start of the same job has used.

torchrun keeps one key-value store for all starts of a job, so after a restart the keys of the dead are still in
it: a worker that reads the address of a dead peer before the living one has overwritten it waits for ever
(pytorch/pytorch#135712). Nothing in the environment tells the starts of several agents apart, so the workers settle
a name among themselves::

    worker r:  hello/r = a nonce of its own ─> wait for reply/<nonce> ─> seen/<name>/r
    worker 0:  reads hello/r, be it of a dead worker or a living one ─> reply/<nonce> = name
               until all are in seen/<name>/
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist

from samestep.errors import GroupError

__all__ = ["apart", "name_of_start"]

_ROOM = "samestep/start"
_PAUSE_SECONDS = 0.01


def apart(store: Any, rank: int, world_size: int, timeout_seconds: float) -> Any:
    """Return a store that holds keys of this start alone.

    Args:
        store: torch's key-value store; one that an elastic agent keeps has the keys of earlier starts in it.
        rank: of this worker.
        world_size: number of workers.
        timeout_seconds: how long to wait for the others.

    Raises:
        GroupError: when a worker does not come in time.

    Collective: all workers.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return dist.PrefixStore("samestep", store)
    return dist.PrefixStore(name_of_start(store, rank, world_size, timeout_seconds), store)


def name_of_start(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Return a name that all workers of this start share and no earlier start had.

    Args:
        store: torch's key-value store, with the keys of earlier starts in it.
        rank: of this worker.
        world_size: number of workers; may differ from earlier starts.
        timeout_seconds: how long to wait for the others.

    Raises:
        GroupError: when a worker does not come in time; names it, on worker 0.

    Collective: all workers.

    Example:
        >>> store = dist.HashStore()
        >>> name_of_start(store, 0, 1, 5.0) != name_of_start(store, 0, 1, 5.0)
        True
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        _greet(store, world_size, mine, timeout_seconds)
        return mine
    store.set(f"{_ROOM}/hello/{rank}", mine)
    reply = f"{_ROOM}/reply/{mine}"
    store.wait([reply], datetime.timedelta(seconds=timeout_seconds))
    name = str(store.get(reply).decode())
    store.set(f"{_ROOM}/seen/{name}/{rank}", "1")
    return name


def _greet(store: Any, world_size: int, name: str, timeout_seconds: float) -> None:
    """Answer every hello, those of the dead too, until all workers have seen the answer."""
    answered: dict[int, bytes] = {}
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_ROOM}/hello/{rank}"]):
                nonce = bytes(store.get(f"{_ROOM}/hello/{rank}"))
                if answered.get(rank) != nonce:
                    store.set(f"{_ROOM}/reply/{nonce.decode()}", name)
                    answered[rank] = nonce
            if store.check([f"{_ROOM}/seen/{name}/{rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise GroupError(
                f"start of the workers: rank {min(missing)} of {world_size} did not come within "
                f"{timeout_seconds:g} s. See that all workers are started.",
                rank=min(missing),
            )
        time.sleep(_PAUSE_SECONDS if missing else 0.0)
