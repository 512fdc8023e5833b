"""`ShardLoader`: a map-style dataset, shard by shard, in an order that no world size can change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from samestep.errors import SpecError
from samestep.sharding._blocks import shard_range, whole
from samestep.sharding._fetch import Augment, Collate, Failure, Fetcher, Shard
from samestep.sharding._order import Ids, Part, Plan
from samestep.sharding._state import FORMAT_VERSION, check, describe_dataset

__all__ = ["Place", "ShardLoader", "check_sizes"]


class Place(Protocol):
    """What a loader asks of a group."""

    @property
    def rank(self) -> int:
        """Return the worker's number, 0 .. world_size-1."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        ...


class ShardLoader:
    """Yields this worker's shards of every global batch, one list per step.

    The order of the samples is a function of (seed, epoch); the position in it is the number of samples consumed.
    Neither depends on the world size or on `num_workers`, so a run may go on under other ones, in the middle of an
    epoch too. A sample that is read or augmented draws from torch, numpy and Python generators seeded by
    (seed, epoch, sample index), and one that `collate_fn` draws for is seeded by the shard's place; the caller's
    generators are left as they were.

    Iterating gives the rest of the current epoch; then the epoch advances. A position counts what was handed out,
    not what loader processes have read ahead. Loader processes live on from epoch to epoch, until `close`; they
    hold the dataset as it was when they started.

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
    ) -> None:
        n_samples = _length(dataset)
        batch, shards = check_sizes(global_batch_size, shards)
        if drop_last and n_samples < batch:
            raise SpecError(
                f"`global_batch_size`: expected at most the {n_samples} samples of the dataset with drop_last, "
                f"got {batch}. Use a smaller batch or drop_last=False.",
                name="global_batch_size",
            )
        mine = shard_range(shards, group.world_size, group.rank)
        self._plan = Plan(
            n_samples, batch, shards, mine, whole("seed", seed, 0), bool(drop_last), bool(shuffle)
        )
        self._fetcher = Fetcher(dataset, self._plan.seed, collate_fn, augment, group.rank)
        self._num_workers = whole("num_workers", num_workers, 0)
        if prefetch_factor is not None and not self._num_workers:
            raise SpecError(
                f"`prefetch_factor`: expected None without loader processes, got {prefetch_factor}. "
                "Set num_workers.",
                name="prefetch_factor",
            )
        self._prefetch_factor = (
            None if prefetch_factor is None else whole("prefetch_factor", prefetch_factor, 1)
        )
        self._pin_memory = pin_memory
        self._dataset_facts = describe_dataset(dataset, n_samples)
        self._epoch = 0
        self._position = 0
        self._order: tuple[int, Ids] | None = None  # of one epoch
        self._batches: Iterator[Any] | None = None  # runs ahead of the position

    @property
    def epoch(self) -> int:
        """Return the epoch of the step handed out last, from 0; one more once the loop over it has ended."""
        return self._epoch

    @property
    def samples_consumed(self) -> int:
        """Return how many samples of this epoch were handed out, over all workers."""
        return self._position

    def __len__(self) -> int:
        """Return the steps of a whole epoch."""
        whole_steps, rest = divmod(self._plan.n_samples, self._plan.global_batch_size)
        return whole_steps + (rest > 0 and not self._plan.drop_last)

    def __iter__(self) -> Iterator[list[Shard]]:
        """Yield the steps that remain of the current epoch, then advance the epoch."""
        epoch = self._epoch
        while self._epoch == epoch and self._plan.step_size(self._position):
            yield self._next_step()
        if self._epoch == epoch:
            self._advance()

    def steps(self, n_steps: int | None = None) -> Iterator[list[Shard]]:
        """Yield so many steps, over the ends of epochs.

        Args:
            n_steps: how many; None for ever.
        """
        done = 0
        while n_steps is None or done < n_steps:
            if not self._plan.step_size(self._position):
                self._advance()
            yield self._next_step()
            done += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what it depends on, as JSON data, the same on every worker."""
        return {
            "format_version": FORMAT_VERSION,
            "epoch": self._epoch,
            "samples_consumed": self._position,
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Go to a saved position; the settings of this loader stay.

        The world size and `num_workers` are free to differ.

        Args:
            state: from `state_dict`.
            allow: settings that may differ: "seed", "dataset", "global_batch_size", "shards", "drop_last",
                "shuffle". Samples may then come twice, or not at all, in the current epoch.

        Raises:
            SpecError: when another setting differs, with both values; this loader is then left as it was.
        """
        epoch, position = check(state, self._settings(), allow)
        if position > self._plan.n_samples:
            raise SpecError(
                f"`samples_consumed`: expected at most the {self._plan.n_samples} samples of the dataset, "
                f"got {position}. Start the next epoch instead.",
                name="samples_consumed",
            )
        self.close()
        self._epoch, self._position = epoch, position

    def close(self) -> None:
        """End the loader processes; iterating again starts new ones at the same position."""
        self._batches = None  # torch ends the processes of an iterator that nobody holds

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _advance(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0

    def _next_step(self) -> list[Shard]:
        if self._order is None or self._order[0] != self._epoch:
            self._order = self._epoch, self._plan.order(self._epoch)
        parts = self._plan.parts(self._order[1], self._epoch, self._position)
        if self._batches is None:
            self._batches = self._open()
        try:
            batches = [_checked(next(self._batches)) for _ in parts]
        except BaseException:
            self.close()  # it has run past a step that was not handed out
            raise
        self._position += self._plan.step_size(self._position)
        return [_shard(part, batch) for part, batch in zip(parts, batches, strict=True)]

    def _open(self) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            self._fetcher,
            batch_size=None,
            sampler=self._plan.endless(self._epoch, self._position),
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # without one, opening would draw from the caller's generator
        )
        return iter(loader)


def check_sizes(global_batch_size: int, shards: int) -> tuple[int, int]:
    """Return both as ints.

    Raises:
        SpecError: when the global batch has fewer samples than shards.
    """
    batch, shards = whole("global_batch_size", global_batch_size, 1), whole("shards", shards, 1)
    if batch < shards:
        raise SpecError(
            f"`global_batch_size`: expected at least shards={shards}, got {batch}. "
            "Use a larger batch or fewer shards.",
            name="global_batch_size",
        )
    return batch, shards


def _length(dataset: Any) -> int:
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise SpecError(
                f"`dataset`: expected a map-style dataset, got {type(dataset).__name__} without {method}.",
                name="dataset",
            )
    n_samples = len(dataset)
    if not n_samples:
        raise SpecError(
            "`dataset`: expected at least one sample, got none. Check its source.", name="dataset"
        )
    return n_samples


def _shard(part: Part, batch: Any) -> Shard:
    return Shard(part.shard, torch.from_numpy(part.ids.copy()), batch)


def _checked(batch: Any) -> Any:
    if isinstance(batch, Failure):
        raise batch.error
    return batch


def _as_it_is(batch: Any) -> Any:
    return batch
