"""Calling a loss function on one shard, and not believing everything that it returns.

A loss function returns a *sum* over the shard and the *count* behind it; the exact mean over the global batch is
the sum of the sums over the sum of the counts. What it returns is checked here, in words that say which part is
wrong; the commonest mistake, a mean in place of the sum, is found by cutting a shard in two.

A loss over the whole global batch (contrastive, over gathered embeddings) talks to the other workers inside the
loss function. Its value then depends on how the shards are spread, which exact mode refuses, unless the function
says ``loss_fn.collective = True``: that its shard's loss and gradient do not depend on the number of workers.
``loss_fn.is_sum = True`` says that it returns a sum, though its halves may not show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samestep import compiled
from samestep.errors import SpecError
from samestep.sharding import Shard
from samestep.tally import Row

__all__ = ["LossFn", "Result", "call", "cut", "is_empty", "probe"]

LossFn = Callable[[nn.Module, Any], Any]

_DRAWS = 16
_UNSTEADY = (_NormBase, _DropoutNd, nn.MultiheadAttention, nn.RNNBase)


@dataclass
class Result:
    """What a loss function said of one shard: the loss sum with its graph, and the figures."""

    loss: Tensor
    row: Row


def call(loss_fn: LossFn, model: nn.Module, shard: Any) -> Result:
    """Return the checked result of ``loss_fn(model, shard)``.

    Args:
        loss_fn: returns (loss_sum, count) or (loss_sum, count, further sums by name).
        model: passed on.
        shard: passed on.

    Raises:
        SpecError: when what it returns is not that.
    """
    returned = loss_fn(model, shard)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise SpecError(
            f"`loss_fn`: expected (loss_sum, count) or (loss_sum, count, sums), got {type(returned).__name__}. "
            "Return the sum over the shard and the number of samples or tokens behind it.",
            name="loss_fn",
        )
    loss, count, *rest = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise SpecError(
            f"`loss_fn`: expected a scalar tensor as loss sum, got {got}. Sum over the samples.",
            name="loss_fn",
        )
    sums = rest[0] if rest else {}
    if not isinstance(sums, Mapping):
        raise SpecError(
            f"`loss_fn`: expected a dict of further sums, got {type(sums).__name__}.", name="loss_fn"
        )
    figures = {str(name): _figure(value, f"sum `{name}`") for name, value in sums.items()}
    number = _count(count)
    if not number and float(loss.detach()) != 0:
        raise SpecError(
            f"`loss_fn`: expected a loss sum of 0 with count 0, got {float(loss.detach())}. "
            "Return a sum, which is 0 over nothing, and the count behind it.",
            name="loss_fn",
        )
    if number and torch.is_grad_enabled() and not loss.requires_grad:
        raise SpecError(
            "`loss_fn`: the loss sum does not depend on any trainable parameter. "
            "Compute it from the model that is passed in, outside torch.no_grad().",
            name="loss_fn",
        )
    return Result(loss.reshape(()), Row(number, float(loss.detach()), figures))


def is_empty(shard: Any) -> bool:
    """Return whether a shard of a `ShardLoader` has no samples."""
    return isinstance(shard, Shard) and shard.n_samples == 0


def cut(shard: Any, size: int) -> Iterator[Any]:
    """Yield a shard in pieces of at most `size` samples, along the first axis of its tensors.

    Args:
        shard: a `Shard`, or a batch of tensors in tuples, lists and dicts.
        size: samples of a micro-batch, >= 1.

    Raises:
        SpecError: when the batch holds no tensors, or they differ in their first axis.
    """
    batch = shard.batch if isinstance(shard, Shard) else shard
    n_samples = _length(batch)
    for start in range(0, n_samples, size):
        piece = _slice(batch, start, start + size)
        if isinstance(shard, Shard):
            yield Shard(shard.index, shard.sample_ids[start : start + size], piece)
        else:
            yield piece


def probe(
    loss_fn: LossFn,
    model: nn.Module,
    shard: Any,
    alone: bool,
    prepare: Callable[[int], None] = lambda draw: None,
) -> None:
    """Try the loss function on a shard and on its two halves, before it is trusted.

    A mean is found by its halves: weighed by their counts they add up to the whole, as they stand to twice the
    whole. Meanwhile BatchNorm and dropout work as in evaluation, else the halves of a right sum could be anything.
    What is neither is tried again, for noise, and is a mean if its quarters add up to four times the whole, too.

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
    try:
        n_samples = _length(shard.batch if isinstance(shard, Shard) else shard)
    except SpecError:
        n_samples = 1  # not a batch of tensors: it cannot be cut
    refused = alone and not getattr(loss_fn, "collective", False)
    guard = _NoTalking() if refused else nullcontext()  # type: ignore[no-untyped-call]

    def rows(pieces: Sequence[Any], draw: int) -> list[Row]:
        found = []
        for piece in pieces:
            prepare(draw)
            with compiled.as_if_not(), torch.no_grad(), guard, _steady(model):
                found.append(call(loss_fn, model, piece).row)
        return found

    may_cut = n_samples > 1 and not getattr(loss_fn, "is_sum", False)
    halves = list(cut(shard, (n_samples + 1) // 2)) if may_cut else []
    quarters = list(cut(shard, -(-n_samples // 4))) if n_samples >= 4 else []
    trials: list[list[float]] = []  # losses of the whole and of the halves
    before = None
    while len(trials) < _DRAWS:
        found = rows([shard, *halves], len(trials))
        if found == before:
            break  # there is no noise
        before = found
        whole, *parts = found
        if len(parts) < 2 or not all(row.count for row in found):
            return
        if sum(part.count for part in parts) != whole.count:
            return
        trials.append([row.loss for row in found])
        middle, *sides = _averages(trials)
        if middle == 0 or not sum(sides) / middle > 1.4:
            return  # a sum gives 1, a mean gives 2; NaN gives neither
        if _is_weighed_mean(whole, parts) and (
            n_samples < 4 or _is_weighed_mean(whole, rows(quarters, len(trials) - 1))
        ):
            raise _is_mean(middle, sum(sides))
    if n_samples < 4 or not _like_means(middle, sides):
        return
    if _like_means(
        middle, _averages([[row.loss for row in rows(quarters, draw)] for draw in range(len(trials))])
    ):
        raise _is_mean(middle, sum(sides))


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


def _is_mean(whole: float, halves: float) -> SpecError:
    return SpecError(
        f"`loss_fn`: expected a sum, got a loss of {whole:.6g} for a shard whose halves' losses add up to "
        f'{halves:.6g}: their mean. Return a sum (reduction="sum") and the count behind it; or declare with '
        "`loss_fn.is_sum = True` that it is one, where samples of a shard depend on each other.",
        name="loss_fn",
    )


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


def _count(count: Any) -> float:
    if isinstance(count, Tensor) and count.requires_grad:
        raise SpecError(
            "`loss_fn`: the count has a gradient. Return a number of samples or tokens, not a model output.",
            name="loss_fn",
        )
    number = _figure(count, "count")
    if not 0 <= number < math.inf:
        raise SpecError(f"`loss_fn`: expected a finite count >= 0, got {number}.", name="loss_fn")
    return number


def _figure(value: Any, what: str) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(
            f"`loss_fn`: expected a number as {what}, got {type(value).__name__}.", name="loss_fn"
        ) from None


def _length(batch: Any) -> int:
    lengths = {
        leaf.shape[0] for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()
    }
    if len(lengths) != 1:
        raise SpecError(
            f"`micro_batch_size`: expected a batch of tensors with one common first axis, got lengths "
            f"{sorted(lengths)}. Cut the batch in the dataset instead.",
            name="micro_batch_size",
        )
    return int(lengths.pop())


def _slice(batch: Any, start: int, stop: int) -> Any:
    return _pytree.tree_map(
        lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
    )
