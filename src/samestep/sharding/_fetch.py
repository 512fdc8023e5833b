"""Load the samples of one shard, in this process or in a loader process, with the same result.

Random numbers are keyed by (seed, epoch, sample), so neither the process that loads a sample nor what it loaded
before can be seen in it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from samestep.errors import SpecError
from samestep.sharding._order import Part, private_randomness, random_key, seed_all

__all__ = ["Augment", "Collate", "Failure", "Fetcher", "Shard"]

Augment = Callable[[Any, torch.Generator], Any]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class Shard:
    """One of the S parts of a global batch, as a worker gets it.

    Attributes:
        index: of the shard, 0 .. S-1.
        sample_ids: (shard_samples,) int64 dataset indices, for a stream the positions in the epoch.
        batch: what `collate_fn` made of the samples; None when the shard is empty.
    """

    index: int
    sample_ids: Tensor
    batch: Any

    @property
    def n_samples(self) -> int:
        """Return how many samples the shard holds; 0 is possible in a short last batch."""
        return len(self.sample_ids)


@dataclass(frozen=True)
class Failure:
    """An error on its way from a loader process."""

    error: SpecError


class Fetcher(Dataset[Any]):
    """A dataset whose index is a `Part` and whose item is the batch of that shard."""

    def __init__(
        self, dataset: Any, seed: int, collate_fn: Collate | None, augment: Augment | None, rank: int
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.augment = augment
        self.rank = rank

    def __getitem__(self, part: Part) -> Any:
        if not len(part.ids):
            return None
        in_main = get_worker_info() is None
        with private_randomness() if in_main else nullcontext():
            try:
                return self.collate(part, [self._sample(part, index) for index in part.ids.tolist()])
            except SpecError as error:
                if in_main:
                    raise
                return Failure(error)

    def _sample(self, part: Part, index: int) -> Any:
        try:
            seed_all(random_key("sample", self.seed, part.epoch, index))
            return self.augmented(self.dataset[index], part.epoch, index)
        except Exception as error:
            raise self._failed(f"`dataset`: sample {index}", part, error) from error

    def augmented(self, sample: Any, epoch: int, index: int) -> Any:
        """Return the sample after `augment`, with a generator of its own."""
        if self.augment is None:
            return sample
        generator = torch.Generator().manual_seed(random_key("augment", self.seed, epoch, index))
        return self.augment(sample, generator)

    def collate(self, part: Part, samples: Iterable[Any]) -> Any:
        """Return the batch of a shard; random numbers that `collate_fn` draws are keyed by the shard's place."""
        try:
            seed_all(random_key("collate", self.seed, part.epoch, part.position))
            return self.collate_fn(list(samples))
        except Exception as error:
            raise self._failed("`collate_fn`: the batch", part, error) from error

    def _failed(self, what: str, part: Part, error: Exception) -> SpecError:
        ids = part.ids.tolist()
        shown = str(ids) if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ... {len(ids)} in all]"
        failure = SpecError(
            f"{what} could not be made: {type(error).__name__}: {error} "
            f"(rank {self.rank}, epoch {part.epoch}, shard {part.shard}, samples {shown}). "
            "Repair the data or the function.",
            rank=self.rank,
            name=what.split("`")[1],
        )
        # A traceback does not travel between processes, its text does.
        failure.add_note("".join(traceback.format_exception(error)))
        return failure
