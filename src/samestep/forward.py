"""The shards of one worker: forward, backward, figures, and what went wrong, without a word to the others.

Nothing here communicates. What failed is returned, for the tally that follows to make it known to all.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep import compiled, lossfn, streams, trial
from samestep.buffers import BufferMerge
from samestep.errors import SpecError
from samestep.gradients import GradientSum
from samestep.group import Group
from samestep.lossfn import LossFn
from samestep.tally import Failure, Row
from samestep.watch import ModelWatch

__all__ = ["Settings", "ShardRunner"]


@dataclass(frozen=True)
class Settings:
    """How shards are run.

    Attributes:
        block: numbers of this worker's shards, or None when each worker brings any number.
        autocast: makes the context in which the loss function runs.
        scaler: torch's GradScaler, or None.
        micro_batch_size: samples that run at a time, or None for whole shards.
        seed: of the shards' random streams.
        allow_nonfinite: leave a loss that is not finite to the gradient's check.
        exact: refuse a loss that talks to other workers, and kernels that depend on what ran before.
    """

    block: range | None
    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: Any
    micro_batch_size: int | None
    seed: int
    allow_nonfinite: bool
    exact: bool


class ShardRunner:
    """Runs a loss function over this worker's shards of a step.

    Args:
        model: plain module.
        group: the workers; only to say who found what.
        settings: see there.
        gradients: collects the gradients.
        buffers: gives every shard the same ones to start from.
    """

    def __init__(
        self, model: nn.Module, group: Group, settings: Settings, gradients: GradientSum, buffers: BufferMerge
    ) -> None:
        self._model, self._group, self._settings = model, group, settings
        self._gradients, self._buffers = gradients, buffers
        self._watch = ModelWatch(model)
        self._trusted: set[Any] = set()  # loss functions that were probed
        self._shards: list[Any] = []

    def read(self, shards: Iterable[Any], step: int) -> Failure | None:
        """Take this worker's shards of a step; the user's own generators may be used meanwhile.

        Args:
            shards: in order.
            step: updates applied so far.

        Returns:
            What failed, or None.
        """

        def take() -> None:
            self._shards = []
            changed = self._watch.change()
            if changed:
                raise SpecError(
                    f"`model`: {changed} after TrainStep was made. Make a new TrainStep.", step=step
                )
            self._shards = list(shards)
            self._check_number(len(self._shards))

        failure = _attempt(take)
        if failure is not None and self._watch.moved:
            return Failure(failure.text, is_spec=True, is_away=True)
        return failure

    def run(self, loss_fn: LossFn, step: int) -> tuple[list[Row], Tensor | None, Failure | None]:
        """Run all shards, with the backward of all but the last.

        Args:
            loss_fn: see `lossfn`.
            step: updates applied so far; part of the key of the random streams.

        Returns:
            The shards' figures, the last shard's loss (None where it has no samples), and what failed, if anything.
        """
        rows: list[Row] = []
        pending: list[Tensor | None] = [None]

        def work() -> None:
            for place in range(len(self._shards)):
                row, loss = self._run_shard(place, loss_fn, step)
                rows.append(row)
                if place < len(self._shards) - 1:
                    if loss is not None:
                        torch.autograd.backward(self.scale(loss))
                    self._gradients.keep()
                else:
                    pending[0] = loss

        failure = _attempt(work)
        return rows, pending[0], failure

    def scale(self, loss: Tensor) -> Tensor:
        """Return what to run the backward of: the loss, scaled where there is a GradScaler, and weighed."""
        scaler = self._settings.scaler
        return self._gradients.weigh(loss if scaler is None else scaler.scale(loss))

    def find_nonfinite(self, loss_fn: LossFn, step: int) -> tuple[int, str]:
        """Run the shards again, one by one, and return (place, name) of the first gradient that is not finite.

        For the message when the mean gradient is not finite; gradients and buffers are the caller's to put back.

        Args:
            loss_fn: as in `run`.
            step: as in `run`.

        Returns:
            Number of the shard, or -1 when every shard's gradient is finite by itself; name of the parameter.
        """
        for place in range(len(self._shards)):
            self._gradients.begin()
            _, loss = self._run_shard(place, loss_fn, step)
            if loss is not None:
                torch.autograd.backward(loss)
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None and not bool(torch.isfinite(_values(parameter.grad)).all()):
                    return self._number(place), name
        return -1, ""

    def _run_shard(self, place: int, loss_fn: LossFn, step: int) -> tuple[Row, Tensor | None]:
        """Return the figures of one shard and the loss sum whose backward is still to run."""
        shard, number = self._shards[place], self._number(place)
        if lossfn.is_empty(shard):
            return Row(0.0, 0.0, {}), None
        kind = getattr(loss_fn, "__code__", type(loss_fn))
        if kind not in self._trusted:
            with self._settings.autocast():
                trial.probe(
                    loss_fn,
                    self._model,
                    shard,
                    self._settings.exact,
                    partial(self._start_shard, step, number),
                )
            self._trusted.add(kind)
        self._start_shard(step, number)
        row, loss = self._run_pieces(loss_fn, shard)
        if row.count and not math.isfinite(row.loss) and not self._settings.allow_nonfinite:
            raise SpecError(f"loss of shard {number}: expected a finite sum, got {row.loss}.", step=step)
        if not row.count:
            return row, None  # without samples: no gradient, no part in the buffers
        self._buffers.after_shard()
        return row, loss

    def _start_shard(self, step: int, number: int, draw: int = 0) -> None:
        streams.seed_all(self._settings.seed, step, number, *([draw] if draw else []))
        self._buffers.restore()

    def _run_pieces(self, loss_fn: LossFn, shard: Any) -> tuple[Row, Tensor | None]:
        size = self._settings.micro_batch_size
        rows: list[Row] = []
        loss = None  # of the piece before, where it had samples
        for piece in [shard] if size is None else lossfn.cut(shard, size):
            if loss is not None:
                torch.autograd.backward(self.scale(loss))
                self._gradients.between()
            with self._settings.autocast(), compiled.by_shape() if self._settings.exact else nullcontext():
                result = lossfn.call(loss_fn, self._model, piece)
            loss = result.loss if result.row.count else None
            rows.append(result.row)
        return _add_rows(rows), loss

    def _number(self, place: int) -> int:
        block = self._settings.block
        # Without a fixed number of shards: a stream of its own for every worker and place, at this layout.
        return self._group.rank * 1_000_003 + place if block is None else block[place]

    def _check_number(self, n_shards: int) -> None:
        block = self._settings.block
        if block is not None and n_shards != len(block):
            raise SpecError(
                f"`shards`: expected {len(block)} on rank {self._group.rank} of {self._group.world_size} "
                f"(shards {block.start} to {block.stop - 1}), got {n_shards}.",
                name="shards",
            )
        if n_shards == 0:
            raise SpecError(
                "`shards`: expected at least one, got none. Pass empty shards instead.", name="shards"
            )


def _attempt(work: Callable[[], None]) -> Failure | None:
    try:
        work()
    except SpecError as error:
        return Failure(str(error), is_spec=True)
    except Exception:
        return Failure(traceback.format_exc())
    return None


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad


def _add_rows(rows: list[Row]) -> Row:
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return Row(sum(row.count for row in rows), sum(row.loss for row in rows), sums)
