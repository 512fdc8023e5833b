"""Random number streams keyed by (seed, step, shard), so that nothing random depends on who computes a shard.

A shard's dropout masks and noise come from generators that are seeded just before it runs. They are then the same
on one worker and on eight, after a resume, and in a replay; no generator state needs saving.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

__all__ = ["key", "preserved", "seed_all"]


def key(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part and on their order.

    Args:
        *parts: whole numbers, such as (seed, step, shard).

    Example:
        >>> key(1, 2, 3) == key(1, 2, 3), key(1, 2, 3) == key(1, 3, 2)
        (True, False)
    """
    text = ",".join(str(int(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(*parts: int) -> None:
    """Seed the global generators of torch (CUDA too where it is in use), NumPy and Python from `parts`.

    Args:
        *parts: as in `key`.
    """
    # Not torch.manual_seed: where CUDA is not in use it formats a traceback for later, some milliseconds a call.
    torch.default_generator.manual_seed(key(*parts))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key(*parts))
    # NumPy and Python share a generator algorithm: seeded alike they would draw the same numbers.
    np.random.seed(key(*parts, 1) & 0xFFFFFFFF)
    random.seed(key(*parts, 2))


@cache
def _lent() -> np.random.MT19937:
    return np.random.MT19937(0)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave the caller's global generators as they were, whatever happens inside the block.

    Args:
        device: whose generator to keep beside the CPU's, where it is a CUDA device.
    """
    state, python = torch.get_rng_state(), random.getstate()
    # NumPy is lent another generator, which costs less than to copy its state twice.
    others, lent = np.random.get_bit_generator(), _lent()  # type: ignore[attr-defined]
    inner = np.random.get_state() if others is lent else None
    np.random.set_bit_generator(lent)  # type: ignore[attr-defined]
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        np.random.set_bit_generator(others)  # type: ignore[attr-defined]
        if inner is not None:
            np.random.set_state(inner)
        random.setstate(python)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
