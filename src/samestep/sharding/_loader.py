"""`ShardLoader`: a map-style dataset, shard by shard, in an order that no world size can change."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from samestep.errors import SpecError
from samestep.sharding._blocks import shard_range, whole
from samestep.sharding._fetch import Augment, Collate, Failure, Fetch, Fetcher, Shard
from samestep.sharding._order import Plan, private_randomness
from samestep.sharding._state import describe_dataset
from samestep.sharding._steps import Place, Steps, check_sizes

__all__ = ["ShardLoader"]


class ShardLoader(Steps):
    """Yields this worker's shards of every global batch, one list per step.

    The order of the samples is a function of (seed, epoch); the position in it is the number of samples consumed.
    Neither depends on the world size or on `num_workers`, so a run may go on under other ones, in the middle of an
    epoch too. While a sample is read and augmented, the CPU generators of torch, numpy and Python are seeded by
    (seed, epoch, sample index), while `collate_fn` runs by the shard's place in the epoch; the caller's generators
    are left as they were.

    Iterating gives the rest of the current epoch; then the epoch advances. `steps` goes on over the ends of epochs.
    A position counts what was handed out, not what loader processes have read ahead. Loader processes live on
    from epoch to epoch, until `close`; they hold the dataset as it was when they started.

    Args:
        dataset: map-style: has `__len__` and `__getitem__`. May have `fingerprint() -> str`.
        global_batch_size: samples of a step over all workers, at least `shards`.
        shards: parts of a global batch, S, at least the world size. Fixed for the life of the run.
        group: anything with `rank` and `world_size`.
        seed: of the order and of all random numbers, >= 0.
        collate_fn: list of samples -> batch; torch's default_collate when None.
        num_workers: loader processes of this worker; 0 loads in this process.
        drop_last: leave out a last global batch that is short; otherwise it comes with its true count, cut into S
            shards of which some may be empty. Samples are never repeated to fill it.
        shuffle: false visits the samples as the dataset has them.
        pin_memory: copy batches to page-locked memory, see torch's DataLoader.
        augment: `augment(sample, generator) -> sample`, called on every sample with a generator of its own.
        prefetch_factor: shards that each loader process reads ahead; 2 when None.
        fetch: "samples" asks for `dataset[index]` one by one and costs some 25 microseconds each for the seeds;
            "shards" asks once for `dataset[[indices]]`, which is the batch (or what `collate_fn` gets), with
            random numbers keyed by the shard's place in the epoch. Right for tensors, arrays and tables.

    Raises:
        SpecError: when a setting is out of range or the dataset is empty or not map-style.

    Example:
        >>> from types import SimpleNamespace
        >>> loader = ShardLoader(range(5), 4, 2, group=SimpleNamespace(rank=0, world_size=1), shuffle=False)
        >>> [[shard.sample_ids.tolist() for shard in shards] for shards in loader]
        [[[0, 1], [2, 3]], [[4], []]]
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        shards: int,
        *,
        group: Place,
        seed: int = 0,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
        pin_memory: bool = False,
        augment: Augment | None = None,
        prefetch_factor: int | None = None,
        fetch: Fetch = "samples",
    ) -> None:
        super().__init__()
        n_samples = _length(dataset)
        batch, shards = check_sizes(global_batch_size, shards)
        if drop_last and n_samples < batch:
            raise SpecError(
                f"`global_batch_size`: expected at most the {n_samples} samples of the dataset with drop_last, "
                f"got {batch}. Use a smaller batch or drop_last=False.",
                name="global_batch_size",
            )
        mine = shard_range(shards, group.world_size, group.rank)
        seed = whole("seed", seed, 0)
        self._plan = Plan(n_samples, batch, shards, mine, seed, bool(drop_last), bool(shuffle))
        _check_fetch(fetch, augment)
        self._fetcher = Fetcher(dataset, seed, collate_fn, augment, fetch, group.rank)
        self._num_workers = _processes(num_workers)
        self._prefetch_factor = _prefetch(prefetch_factor, self._num_workers)
        self._pin_memory = pin_memory
        self._dataset_facts = describe_dataset(dataset, n_samples)
        self._batches: Iterator[Any] | None = None  # runs ahead of the position

    def __len__(self) -> int:
        """Return the steps of a whole epoch."""
        full, rest = divmod(self._plan.n_samples, self._plan.global_batch_size)
        return full + (rest > 0 and not self._plan.drop_last)

    def close(self) -> None:
        """End the loader processes; iterating again starts new ones at the same position."""
        self._batches = None  # torch ends the processes of an iterator that nobody holds

    def _settings(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "seed": plan.seed,
            "dataset": dict(self._dataset_facts),
            "global_batch_size": plan.global_batch_size,
            "shards": plan.shards,
            "drop_last": plan.drop_last,
            "shuffle": plan.shuffle,
        }

    def _go_to(self, epoch: int, position: int, state: Mapping[str, Any]) -> None:
        if position > self._plan.n_samples:
            raise SpecError(
                f"`samples_consumed`: expected at most the {self._plan.n_samples} samples of the dataset, "
                f"got {position}. Start the next epoch instead.",
                name="samples_consumed",
            )
        self.close()

    def _next_step(self) -> list[Shard] | None:
        size = self._plan.step_size(self._position)
        if not size:
            return None
        parts = self._plan.parts(self._epoch, self._position)
        try:
            with nullcontext() if self._num_workers else private_randomness():
                if self._batches is None:
                    self._batches = self._open()
                batches = [_checked(next(self._batches)) for _ in parts]
        except BaseException:
            self.close()  # it has run past a step that was not handed out
            raise
        self._position += size
        return [
            Shard(part.shard, torch.from_numpy(part.ids.copy()), batch)
            for part, batch in zip(parts, batches, strict=True)
        ]

    def _open(self) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            self._fetcher,
            batch_size=None,
            sampler=self._plan.endless(self._epoch, self._position),
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            worker_init_fn=_apart,
            prefetch_factor=self._prefetch_factor,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # without one, opening would draw from the caller's generator
        )
        return iter(loader)


def _apart(number: int) -> None:
    """Take a loader process out of its worker's process group, and off what tells the worker of signals.

    So a signal to the group, as torchrun and a terminal send it, stops the worker in order: it still gets the
    batches of the step that it is in, and ends its loader processes by itself.
    """
    signal.set_wakeup_fd(-1)
    os.setpgid(0, 0)


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset):  # it has a __getitem__ that only raises, and often a __len__
        raise SpecError(
            f"`dataset`: expected a map-style dataset, got iterable {type(dataset).__name__}. Use StreamLoader.",
            name="dataset",
        )
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise SpecError(
                f"`dataset`: expected a map-style dataset, got {type(dataset).__name__} without {method}. "
                "Add it, or use StreamLoader for a stream.",
                name="dataset",
            )
    n_samples = len(dataset)
    if not n_samples:
        raise SpecError(
            "`dataset`: expected at least one sample, got none. Check its source.", name="dataset"
        )
    return n_samples


def _check_fetch(fetch: Fetch, augment: Augment | None) -> None:
    if fetch not in ("samples", "shards"):
        raise SpecError(f'`fetch`: expected "samples" or "shards", got {fetch!r}.', name="fetch")
    if fetch == "shards" and augment is not None:
        raise SpecError(
            '`augment`: expected None with fetch="shards", got a function of single samples. '
            "Augment in the dataset or in collate_fn.",
            name="augment",
        )


def _processes(num_workers: int) -> int:
    n_processes = whole("num_workers", num_workers, 0)
    if n_processes and multiprocessing.current_process().daemon:
        raise SpecError(
            f"`num_workers`: expected 0 in a daemonic process, which may not start others, got {n_processes}. "
            "Load in this process, or start this worker with daemon=False (torchrun does).",
            name="num_workers",
        )
    return n_processes


def _prefetch(prefetch_factor: int | None, num_workers: int) -> int | None:
    if prefetch_factor is None:
        return None
    if not num_workers:
        raise SpecError(
            f"`prefetch_factor`: expected None without loader processes, got {prefetch_factor}. Set num_workers.",
            name="prefetch_factor",
        )
    return whole("prefetch_factor", prefetch_factor, 1)


def _checked(batch: Any) -> Any:
    if isinstance(batch, Failure):
        raise batch.error
    return batch


def _as_it_is(batch: Any) -> Any:
    return batch
