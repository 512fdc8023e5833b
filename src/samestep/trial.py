"""Trying out a loss function before it is trusted: is it a sum, and does it keep to its own shard?

::

    shard 8 samples      L                a sum:   L = L1 + L2
    halves  4 | 4        L1    L2         a mean:  L = (c1 L1 + c2 L2) / c, with the counts c, and so for quarters

A mean in place of a sum is the commonest mistake, and changes nothing that anybody would notice but the result.
Meanwhile BatchNorm and dropout work as in evaluation: else the halves of a right sum could be anything. What is
neither is tried again with other random numbers, for noise, and is a mean if its parts add up like means.
``loss_fn.is_sum = True`` says that it returns a sum, though its halves may not show it.

A loss over the whole global batch (contrastive, over gathered embeddings) talks to the other workers inside the
loss function. Its value then depends on how the shards are spread, which exact mode refuses, unless the function
says ``loss_fn.collective = True``: that its shard's loss and gradient do not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import compiled
from samestep.errors import SpecError
from samestep.lossfn import LossFn, call, cut, n_samples_of
from samestep.tally import Row

__all__ = ["probe"]

_DRAWS = 16
_UNSTEADY = (_NormBase, _DropoutNd, nn.MultiheadAttention, nn.RNNBase)
_Rows = Callable[[Sequence[Any], int], list[Row]]


def probe(
    loss_fn: LossFn,
    model: nn.Module,
    shard: Any,
    alone: bool,
    prepare: Callable[[int], None] = lambda draw: None,
) -> None:
    """Try the loss function on a shard and on its parts.

    Args:
        loss_fn: called without gradients.
        model: its buffers, and the generators, are the caller's to put back.
        shard: with samples.
        alone: whether a loss that talks to other workers is refused.
        prepare: sets buffers and generators for trial number `draw`.

    Raises:
        SpecError: when the loss function breaks its contract, returns a mean, or talks to other workers where it
            must not.
    """
    refused = alone and not getattr(loss_fn, "collective", False)
    guard = _NoTalking() if refused else nullcontext()  # type: ignore[no-untyped-call]

    def rows(pieces: Sequence[Any], draw: int) -> list[Row]:
        found = []
        for piece in pieces:
            prepare(draw)
            with compiled.as_if_not(), torch.no_grad(), guard, _steady(model):
                found.append(call(loss_fn, model, piece).row)
        return found

    n_samples = n_samples_of(shard) or 1  # what is not a batch of tensors cannot be cut
    if n_samples == 1 or getattr(loss_fn, "is_sum", False):
        rows([shard], 0)
        return
    halves = list(cut(shard, (n_samples + 1) // 2))
    quarters = list(cut(shard, -(-n_samples // 4))) if n_samples >= 4 else []
    found = _mean_in(rows, [shard, *halves], quarters)
    if found:
        raise SpecError(
            f"`loss_fn`: expected a sum, got a loss of {found[0]:.6g} for a shard whose halves' losses add up to "
            f'{found[1]:.6g}: their mean. Return a sum (reduction="sum") and the count behind it; or declare with '
            "`loss_fn.is_sum = True` that it is one, where samples of a shard depend on each other.",
            name="loss_fn",
        )


def _mean_in(rows: _Rows, pieces: Sequence[Any], quarters: Sequence[Any]) -> tuple[float, float] | None:
    """Return the losses of the whole and of both halves together, if they are means."""
    trials: list[list[float]] = []
    before = None
    while len(trials) < _DRAWS:
        found = rows(pieces, len(trials))
        if found == before:
            break  # there is no noise
        before = found
        whole, *parts = found
        if not all(row.count for row in found) or sum(part.count for part in parts) != whole.count:
            return None
        trials.append([row.loss for row in found])
        middle, *sides = _averages(trials)
        if middle == 0 or not sum(sides) / middle > 1.4:
            return None  # a sum gives 1, a mean gives 2; NaN gives neither
        exact = _is_weighed_mean(whole, parts)
        if exact and (not quarters or _is_weighed_mean(whole, rows(quarters, len(trials) - 1))):
            return middle, sum(sides)
    if not quarters or not _like_means(middle, sides):
        return None
    again = _averages([[row.loss for row in rows(quarters, draw)] for draw in range(len(trials))])
    return (middle, sum(sides)) if _like_means(middle, again) else None


def _averages(trials: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(trials) for values in zip(*trials, strict=True)]


def _is_weighed_mean(whole: Row, parts: Sequence[Row]) -> bool:
    """Return whether a loss is the mean of its parts' losses, weighed by their counts; exact but for rounding."""
    weighed = sum(part.count * part.loss for part in parts) / whole.count
    return abs(weighed - whole.loss) <= 0.01 * abs(whole.loss)


def _like_means(whole: float, parts: Sequence[float]) -> bool:
    """Return whether a loss may be a mean of its parts' losses, with other weights or noise."""
    spare = 0.05 * abs(whole)
    between = min(parts) - spare <= whole <= max(parts) + spare
    return between and abs(sum(parts) / len(parts) - whole) < 0.1 * abs(whole)


@contextmanager
def _steady(model: nn.Module) -> Iterator[None]:
    """Let modules whose output for a sample depends on chance or on its neighbours work as in evaluation."""
    unsteady = [module for module in model.modules() if module.training and isinstance(module, _UNSTEADY)]
    for module in unsteady:
        module.training = False
    try:
        yield
    finally:
        for module in unsteady:
            module.training = True


class _NoTalking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives inside it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise SpecError(
                f"`loss_fn`: exact mode got a loss that talks to other workers ({func}): over gathered samples its "
                "value depends on how the shards are spread. Use mode='fast', or declare with "
                "`loss_fn.collective = True` that a shard's loss does not depend on the number of workers.",
                name="loss_fn",
            )
        return func(*args, **(kwargs or {}))
