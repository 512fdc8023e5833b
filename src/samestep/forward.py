"""The shards of one worker: forward, backward, figures, and what went wrong, without a word to the others.

Nothing here communicates. What failed is returned as text, for the tally that follows to make it known to all.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from samestep import lossfn, streams
from samestep.buffers import BufferMerge
from samestep.errors import SpecError
from samestep.gradients import GradientSum
from samestep.group import Group
from samestep.lossfn import LossFn, Result
from samestep.tally import Row
from samestep.watch import ModelWatch

__all__ = ["ShardRunner"]


class ShardRunner:
    """Runs a loss function over this worker's shards of a step.

    Args:
        model: plain module.
        group: the workers; only to say who found what.
        block: numbers of this worker's shards, or None when each worker brings any number.
        gradients: collects the gradients.
        buffers: gives every shard the same ones to start from.
        autocast: makes the context in which the loss function runs.
        scaler: torch's GradScaler, or None.
        micro_batch_size: samples that run at a time, or None for whole shards.
        seed: of the shards' random streams.
        allow_nonfinite: leave a loss that is not finite to the gradient's check.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        block: range | None,
        *,
        gradients: GradientSum,
        buffers: BufferMerge,
        autocast: Callable[[], AbstractContextManager[Any]],
        scaler: Any,
        micro_batch_size: int | None,
        seed: int,
        allow_nonfinite: bool,
    ) -> None:
        self._model, self._group, self._block = model, group, block
        self._gradients, self._buffers = gradients, buffers
        self._autocast, self._scaler = autocast, scaler
        self._micro_batch_size, self._seed = micro_batch_size, seed
        self._allow_nonfinite = allow_nonfinite
        self._watch = ModelWatch(model)
        self._check_mean = True

    def run(self, shards: Iterable[Any], loss_fn: LossFn, step: int) -> tuple[list[Row], Tensor | None, str]:
        """Run all shards, with the backward of all but the last.

        Args:
            shards: this worker's shards, in order.
            loss_fn: see `lossfn`.
            step: updates applied so far; part of the key of the random streams.

        Returns:
            The shards' figures, the last shard's loss, and what failed (empty when nothing did).
        """
        rows: list[Row] = []
        try:
            changed = self._watch.change()
            if changed:
                raise SpecError(
                    f"model: {changed} after TrainStep was made. Make a new TrainStep.", step=step
                )
            mine = list(shards)
            self._check_number(len(mine))
            pending = None
            for place, shard in enumerate(mine):
                is_last = place == len(mine) - 1
                row, loss = self._run_shard(shard, place, loss_fn, step, is_last)
                rows.append(row)
                if is_last:
                    pending = loss
                else:
                    self.backward(loss)
                    self._gradients.keep()
            return rows, pending, ""
        except SpecError as error:
            return rows, None, str(error)
        except Exception:
            return rows, None, traceback.format_exc()

    def _run_shard(
        self, shard: Any, place: int, loss_fn: LossFn, step: int, is_last: bool
    ) -> tuple[Row, Tensor]:
        """Return the figures of one shard and the loss sum whose backward is still to run."""
        if lossfn.is_empty(shard):
            return Row(0.0, 0.0, {}), self._gradients.forward_nothing(is_last)
        number = place if self._block is None else self._block[place]
        if self._block is None:
            number = self._group.rank * 1_000_003 + place  # a stream of its own, at this layout
        streams.seed_all(self._seed, step, number)
        self._buffers.before_shard()
        pieces = [shard]
        if self._micro_batch_size is not None:
            pieces = list(lossfn.cut(shard, self._micro_batch_size))
        results: list[Result] = []
        for index, piece in enumerate(pieces):
            final = index == len(pieces) - 1
            result = self._gradients.forward(partial(self._call, loss_fn, piece), is_last and final)
            results.append(result)
            if not final:
                self.backward(result.loss)
        row = _add_rows([result.row for result in results])
        if row.count and not math.isfinite(row.loss) and not self._allow_nonfinite:
            raise SpecError(f"loss of shard {number}: expected a finite sum, got {row.loss}.", step=step)
        self._buffers.after_shard()
        if self._check_mean:
            self._refuse_mean(loss_fn, shard, row)
        return row, results[-1].loss

    def _call(self, loss_fn: LossFn, piece: Any) -> Result:
        with self._autocast():
            return lossfn.call(loss_fn, self._model, piece)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss sum, scaled where there is a GradScaler."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _refuse_mean(self, loss_fn: LossFn, shard: Any, row: Row) -> None:
        """Find a mean returned for a sum, once, on the first shard that can tell."""
        self._check_mean = False
        with self._autocast():
            suspicious = lossfn.looks_like_mean(loss_fn, self._model, shard, row)
        if suspicious:
            raise SpecError(
                "`loss_fn`: the loss of a shard is the mean of its halves' losses, not their sum. "
                'Return a sum (reduction="sum") and the count behind it.',
                name="loss_fn",
            )

    def _check_number(self, n_shards: int) -> None:
        if self._block is not None and n_shards != len(self._block):
            raise SpecError(
                f"`shards`: expected {len(self._block)} on rank {self._group.rank} of {self._group.world_size} "
                f"(shards {self._block.start} to {self._block.stop - 1}), got {n_shards}.",
                name="shards",
            )
        if n_shards == 0:
            raise SpecError(
                "`shards`: expected at least one, got none. Pass empty shards instead.", name="shards"
            )


def _add_rows(rows: list[Row]) -> Row:
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return Row(sum(row.count for row in rows), sum(row.loss for row in rows), sums)
