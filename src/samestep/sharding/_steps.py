"""What both loaders share: the position in the order of samples, and the loops over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from samestep.errors import SpecError
from samestep.sharding._blocks import whole
from samestep.sharding._fetch import Shard
from samestep.sharding._state import FORMAT_VERSION, check

__all__ = ["Place", "Steps", "check_sizes"]


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


class Steps(ABC):
    """A position (epoch, samples consumed), and iteration from there."""

    def __init__(self) -> None:
        self._epoch = 0
        self._position = 0

    @property
    def epoch(self) -> int:
        """Return the epoch of the step handed out last, from 0; one more once the loop over it has ended."""
        return self._epoch

    @property
    def samples_consumed(self) -> int:
        """Return how many samples of this epoch were handed out, over all workers."""
        return self._position

    def __iter__(self) -> Iterator[list[Shard]]:
        """Yield the steps that remain of the current epoch, then advance the epoch."""
        epoch = self._epoch
        while self._epoch == epoch and (shards := self._next_step()) is not None:
            yield shards
        if self._epoch == epoch:
            self._advance()

    def steps(self, n_steps: int | None = None) -> Iterator[list[Shard]]:
        """Yield so many steps, over the ends of epochs.

        Args:
            n_steps: how many; None for ever.

        Raises:
            SpecError: when `n_steps` is no whole number, or an epoch has no step at all.
        """
        left = None if n_steps is None else whole("n_steps", n_steps, 0)
        return self._endless(left)

    def _endless(self, left: int | None) -> Iterator[list[Shard]]:
        while left is None or left > 0:
            shards = self._next_step()
            if shards is None:
                self._advance()
                shards = self._next_step()
            if shards is None:
                raise SpecError(
                    f"`dataset`: expected at least one step in epoch {self._epoch}, got none. "
                    "Check its source and the batch size.",
                    name="dataset",
                )
            yield shards
            left = None if left is None else left - 1

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

        The world size and the number of loader processes are free to differ.

        Args:
            state: from `state_dict`.
            allow: settings that may differ: names of entries of the state such as "dataset" or
                "global_batch_size". Samples may then come twice, or not at all, in the current epoch.

        Raises:
            SpecError: when another setting differs, with both values; this loader is then left as it was.
        """
        epoch, position = check(state, self._settings(), allow)
        self._go_to(epoch, position, state)
        self._epoch, self._position = epoch, position

    @abstractmethod
    def close(self) -> None:
        """Stop reading ahead; iterating again goes on at the same position."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _advance(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return what a saved position depends on."""

    @abstractmethod
    def _go_to(self, epoch: int, position: int, state: Mapping[str, Any]) -> None:
        """Make the next step start there, or raise before anything changed."""

    @abstractmethod
    def _next_step(self) -> list[Shard] | None:
        """Return this worker's shards and move the position behind them; None at the end of the epoch."""


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
