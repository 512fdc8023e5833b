"""`StreamLoader`: a dataset that can only be read in its own order, shard by shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from samestep.errors import SpecError
from samestep.sharding._blocks import shard_range, split, whole
from samestep.sharding._fetch import Augment, Collate, Fetcher, Shard, failed
from samestep.sharding._order import Part, private_randomness, random_key, seed_all
from samestep.sharding._state import describe_dataset
from samestep.sharding._steps import Place, Steps, check_sizes

__all__ = ["SampleStream", "StreamLoader"]


@runtime_checkable
class SampleStream(Protocol):
    """A dataset that hands out its samples in one global order and can go on from where it was.

    Every worker reads the whole stream and keeps its shards, so every worker must see the same samples in the same
    order. The order may depend on anything but the worker.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples that remain of the current epoch.

        When they are all yielded and the iterator has ended, the stream stands at the start of its next epoch. An
        iterator that is made when just the last sample had been handed out yields nothing, and ends the epoch.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return JSON data from which the stream goes on behind the last sample handed out."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place; iterators made before are not used again."""
        ...


class StreamLoader(Steps):
    """Yields this worker's shards of every global batch of a stream, one list per step.

    Like `ShardLoader`, with the order that the stream has. The stream is read in this process, a global batch at a
    time, while the CPU generators of torch, numpy and Python are seeded by (seed, epoch, position of the sample);
    a stream that should be read ahead does so inside. `sample_ids` are positions in the epoch.

    Args:
        stream: see `SampleStream`. May have `fingerprint() -> str`.
        global_batch_size: samples of a step over all workers, at least `shards`.
        shards: parts of a global batch, S, at least the world size. Fixed for the life of the run.
        group: anything with `rank` and `world_size`.
        seed: of all random numbers, >= 0.
        collate_fn: list of samples -> batch; torch's default_collate when None.
        drop_last: leave out a last global batch that is short, otherwise it comes with its true count.
        augment: `augment(sample, generator) -> sample`, called on the samples of this worker.

    Raises:
        SpecError: when a setting is out of range or the stream lacks a method.

    Example:
        >>> from types import SimpleNamespace
        >>> class Count:
        ...     at = 0
        ...     def __iter__(self):
        ...         while self.at < 5:
        ...             self.at += 1
        ...             yield self.at
        ...         self.at = 0
        ...     def state_dict(self):
        ...         return {"at": self.at}
        ...     def load_state_dict(self, state):
        ...         self.at = state["at"]
        >>> loader = StreamLoader(Count(), 4, 2, group=SimpleNamespace(rank=1, world_size=2))
        >>> [shard.batch for shards in loader for shard in shards]
        [tensor([3, 4]), None]
    """

    def __init__(
        self,
        stream: SampleStream,
        global_batch_size: int,
        shards: int,
        *,
        group: Place,
        seed: int = 0,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(stream, SampleStream):
            raise SpecError(
                f"`stream`: expected __iter__, state_dict and load_state_dict, got {type(stream).__name__} "
                "without one of them. See SampleStream.",
                name="stream",
            )
        self._batch_size, self._shards = check_sizes(global_batch_size, shards)
        self._mine = shard_range(self._shards, group.world_size, group.rank)
        self._drop_last = bool(drop_last)
        self._stream = stream
        self._fetcher = Fetcher(stream, whole("seed", seed, 0), collate_fn, augment, "samples", group.rank)
        self._facts = describe_dataset(stream, None)
        self._samples: Iterator[Any] | None = None
        self._ended = (
            False  # a short last batch was handed out, and the stream stands in its next epoch already
        )
        self._place = self._read_place()  # of the stream, behind what was handed out

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the stream's own state and what they depend on, as JSON data."""
        return {**super().state_dict(), "stream": json.loads(self._place), "stream_ended": self._ended}

    def close(self) -> None:
        """Forget the iterator; iterating again goes on at the same position."""
        self._samples = None
        self._stream.load_state_dict(json.loads(self._place))

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self._fetcher.seed,
            "dataset": dict(self._facts),
            "global_batch_size": self._batch_size,
            "shards": self._shards,
            "drop_last": self._drop_last,
        }

    def _go_to(self, epoch: int, position: int, state: Mapping[str, Any]) -> None:
        for name, kind in (("stream", Mapping), ("stream_ended", bool)):
            if not isinstance(state.get(name), kind):
                raise SpecError(
                    f"`{name}`: expected a {kind.__name__} in the state, got {state.get(name)!r}. "
                    "Pass what state_dict gave.",
                    name=name,
                )
        self._samples = None
        self._stream.load_state_dict(dict(state["stream"]))
        self._place, self._ended = json.dumps(state["stream"]), state["stream_ended"]

    def _advance(self) -> None:
        super()._advance()
        self._ended = False

    def _next_step(self) -> list[Shard] | None:
        if self._ended:
            return None
        try:
            with private_randomness():
                samples = self._read()
                size = len(samples)
                if not size or (self._drop_last and size < self._batch_size):
                    self._place = self._read_place()
                    return None
                shards = [self._shard(index, samples) for index in self._mine]
                place = self._read_place()
        except BaseException:
            self.close()  # the stream goes back to where the step began
            raise
        self._position, self._place, self._ended = self._position + size, place, size < self._batch_size
        return shards

    def _read(self) -> list[Any]:
        if self._samples is None:
            self._samples = iter(self._stream)
        samples: list[Any] = []
        while len(samples) < self._batch_size:
            position = self._position + len(samples)
            seed_all(random_key("sample", self._fetcher.seed, self._epoch, position))
            try:
                samples.append(next(self._samples))
            except StopIteration:
                self._samples = None
                break
            except Exception as error:
                where, rank = f"epoch {self._epoch}", self._fetcher.rank
                raise failed("stream", f"sample {position}", where, rank, error) from error
        return samples

    def _shard(self, index: int, samples: list[Any]) -> Shard:
        cut = split(len(samples), self._shards, index)
        first = self._position + cut.start
        ids = np.arange(first, self._position + cut.stop, dtype=np.int64)
        if not len(cut):
            return Shard(index, torch.from_numpy(ids), None)
        part = Part(self._epoch, first, index, ids)
        fetcher = self._fetcher
        own = [fetcher.augmented(part, samples[i], self._position + i) for i in cut]
        return Shard(index, torch.from_numpy(ids), fetcher.collate(part, own))

    def _read_place(self) -> str:
        state = self._stream.state_dict()
        try:
            return json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"`stream`: expected JSON data from state_dict, got {error}. Return numbers, strings, lists.",
                name="stream",
            ) from error
