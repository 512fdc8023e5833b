"""Load the samples of one shard, in this process or in a loader process, with the same result.

Random numbers are keyed by (seed, epoch, sample) or by the shard's place in the epoch, so neither the process that
loads a sample nor what it loaded before can be seen in it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from samestep.errors import SpecError
from samestep.sharding._order import Part, random_key, seed_all

__all__ = ["Augment", "Collate", "Failure", "Fetch", "Fetcher", "Shard", "failed"]

Augment = Callable[[Any, torch.Generator], Any]
Collate = Callable[[Any], Any]
Fetch = Literal["samples", "shards"]


@dataclass(frozen=True, eq=False)
class Shard:
    """One of the S parts of a global batch, as a worker gets it.

    Attributes:
        index: of the shard, 0 .. S-1.
        sample_ids: (shard_samples,) int64 dataset indices; for a stream, positions in the epoch.
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


@dataclass(frozen=True)
class Fetcher(Dataset[Any]):
    """A dataset whose index is a `Part` and whose item is the batch of that shard."""

    dataset: Any
    seed: int
    collate_fn: Collate | None
    augment: Augment | None
    fetch: Fetch
    rank: int

    def __getitem__(self, part: Part) -> Any:
        if not len(part.ids):
            return None
        try:
            if self.fetch == "shards":
                return self._whole(part)
            return self.collate(part, [self._sample(part, index) for index in part.ids.tolist()])
        except SpecError as error:
            if get_worker_info() is None:
                raise
            return Failure(error)

    def _sample(self, part: Part, index: int) -> Any:
        seed_all(random_key("sample", self.seed, part.epoch, index))
        try:
            sample = self.dataset[index]
        except Exception as error:
            raise failed("dataset", f"sample {index}", self._where(part), self.rank, error) from error
        return self.augmented(part, sample, index)

    def _whole(self, part: Part) -> Any:
        seed_all(random_key("shard", self.seed, part.epoch, part.position))
        try:
            batch = self.dataset[part.ids.tolist()]
        except Exception as error:
            raise failed("dataset", "the batch", self._where(part), self.rank, error) from error
        return batch if self.collate_fn is None else self.collate(part, batch)

    def augmented(self, part: Part, sample: Any, index: int) -> Any:
        """Return the sample after `augment`, with a generator of its own."""
        if self.augment is None:
            return sample
        generator = torch.Generator().manual_seed(random_key("augment", self.seed, part.epoch, index))
        try:
            return self.augment(sample, generator)
        except Exception as error:
            raise failed("augment", f"sample {index}", self._where(part), self.rank, error) from error

    def collate(self, part: Part, samples: Any) -> Any:
        """Return the batch of a shard; random numbers that `collate_fn` draws are keyed by the shard's place."""
        seed_all(random_key("collate", self.seed, part.epoch, part.position))
        try:
            return (default_collate if self.collate_fn is None else self.collate_fn)(samples)
        except Exception as error:
            raise failed("collate_fn", "the batch", self._where(part), self.rank, error) from error

    def _where(self, part: Part) -> str:
        ids = part.ids.tolist()
        shown = str(ids) if len(ids) <= 16 else f"{str(ids[:16])[:-1]}, ... {len(ids)} in all]"
        return f"epoch {part.epoch}, shard {part.shard}, samples {shown}"


def failed(name: str, what: str, where: str, rank: int, error: Exception) -> SpecError:
    """Return the error that says which part of which step could not be made.

    Args:
        name: of the argument whose code failed.
        what: it was to make.
        where: in the epoch.
        rank: of this worker.
        error: as it was raised; its traceback goes along as a note, because only text travels between processes.
    """
    failure = SpecError(
        f"`{name}`: {what} could not be made: {type(error).__name__}: {error} "
        f"(rank {rank}, {where}). Repair the data or the function.",
        rank=rank,
        name=name,
    )
    failure.add_note("".join(traceback.format_exception(error)))
    return failure
