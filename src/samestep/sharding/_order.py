"""The order of samples, as a function of (seed, epoch) alone, and random numbers keyed by what they are for.

Nothing here depends on the world size, the number of loader processes or what ran before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from samestep.sharding._blocks import split

__all__ = ["Part", "Plan", "private_randomness", "random_key", "sample_order", "seed_all"]

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


class Part(NamedTuple):
    """What is to be loaded for one shard of one step."""

    epoch: int
    position: int  # of the shard's first sample in the order of the epoch
    shard: int
    ids: Ids  # (shard_samples,) dataset indices


def random_key(*parts: int | str) -> int:
    """Return 64 bits that depend on all parts and on nothing else.

    Args:
        parts: what the random numbers are for, e.g. ("sample", seed, epoch, sample index).

    Example:
        >>> random_key("sample", 0, 1, 2) == random_key("sample", 0, 1, 2) != random_key("sample", 0, 2, 1)
        True
    """
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"samestep").digest(), "little")


def sample_order(n_samples: int, seed: int, epoch: int, shuffle: bool = True) -> Ids:
    """Return the order in which an epoch visits the samples.

    Every sample gets 64 random bits from a counter-based generator (Philox) keyed by (seed, epoch); the order sorts
    them. The generator's stream and a stable sort are the same in every version and on every machine.

    Args:
        n_samples: length of the dataset.
        seed: of the run.
        epoch: from 0.
        shuffle: false gives 0, 1, 2, ...

    Returns:
        (n_samples,) int64 array, a permutation of 0 .. n_samples-1.

    Example:
        >>> sorted(sample_order(4, seed=0, epoch=0).tolist())
        [0, 1, 2, 3]

    Reference: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011 (Philox).
    """
    if not shuffle:
        return np.arange(n_samples, dtype=np.int64)
    bits = np.random.Philox(key=random_key("order", seed, epoch)).random_raw(n_samples)
    order = np.argsort(bits)  # four times faster than the stable sort, and equal to it where no two are equal
    if (np.diff(bits[order]) == 0).any():
        order = np.argsort(bits, kind="stable")
    return order.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Plan:
    """Which samples a worker loads, step by step; pure, so that loader processes may run ahead of the position."""

    n_samples: int
    global_batch_size: int
    shards: int
    mine: range  # shards of this worker
    seed: int
    drop_last: bool
    shuffle: bool
    _orders: dict[int, Ids] = field(default_factory=dict, repr=False, compare=False)

    def order(self, epoch: int) -> Ids:
        """Return the order of an epoch's samples, (n_samples,) int64; the last two asked for are kept."""
        if epoch not in self._orders:
            # The reader runs ahead of the position by an epoch at most, unless epochs are very short.
            for old in list(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = sample_order(self.n_samples, self.seed, epoch, self.shuffle)
        return self._orders[epoch]

    def step_size(self, position: int) -> int:
        """Return the samples of the global batch at this position; 0 at the end of the epoch."""
        rest = self.n_samples - position
        if rest >= self.global_batch_size:
            return self.global_batch_size
        return 0 if self.drop_last else rest

    def parts(self, epoch: int, position: int) -> list[Part]:
        """Return this worker's part of the step at this position."""
        order, size = self.order(epoch), self.step_size(position)
        parts = []
        for shard in self.mine:
            cut = split(size, self.shards, shard)
            first = position + cut.start
            parts.append(Part(epoch, first, shard, order[first : position + cut.stop]))
        return parts

    def endless(self, epoch: int, position: int) -> Iterator[Part]:
        """Yield this worker's parts from a position on, over all epochs to come."""
        while True:
            while size := self.step_size(position):
                yield from self.parts(epoch, position)
                position += size
            epoch, position = epoch + 1, 0


def seed_all(key: int) -> None:
    """Seed the CPU generators of torch, numpy and Python; accelerators are left alone.

    Args:
        key: 64 bits, as from `random_key`.
    """
    torch.default_generator.manual_seed(
        key
    )  # torch.manual_seed would also touch the accelerators' generators
    # numpy and Python run the same generator; from the same words they would draw the same numbers.
    np.random.seed((key & 0xFFFFFFFF, key >> 32, 1))
    random.seed(key)


@contextmanager
def private_randomness() -> Iterator[None]:
    """Run a block that seeds and draws as it likes; the caller's generators and thread count are put back after.

    The block runs on one thread, as torch's loader processes do: sums over large tensors have other bits on two.
    """
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
