"""Calling a loss function on one shard, and not believing everything that it returns.

A loss function returns a *sum* over the shard and the *count* behind it; the exact mean over the global batch is
the sum of the sums over the sum of the counts. What it returns is checked here, in words that say which part is
wrong; the commonest mistake, a mean in place of the sum, shows only when it is tried out (see `trial`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from samestep.errors import SpecError
from samestep.sharding import Shard
from samestep.tally import Row

__all__ = ["LossFn", "Result", "call", "cut", "is_empty", "n_samples_of"]

LossFn = Callable[[nn.Module, Any], Any]


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


def n_samples_of(shard: Any) -> int:
    """Return the number of samples of a shard that `cut` could cut; 0 when it could not."""
    try:
        return _length(shard.batch if isinstance(shard, Shard) else shard)
    except SpecError:
        return 0


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
