"""Sums over workers whose bits are known in advance, and copies from one worker to all.

The sums here are *ordered*: rank 0's part plus rank 1's, plus rank 2's, as a loop on one worker would add them.
The result is the same on every worker, however the tensor is cut up on its way. They are meant for small
tensors (counts, loss sums, statistics); gradients go through `hooks`.

::

    rank 0: a ─┐              ┌─ a, b, c ── ((a + b) + c)
    rank 1: b ─┼─ all-gather ─┼─ a, b, c ── ((a + b) + c)
    rank 2: c ─┘              └─ a, b, c ── ((a + b) + c)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import SpecError
from samestep.group import Group
from samestep.pooling import Pool, ReduceOp, alone

__all__ = [
    "broadcast_object",
    "broadcast_tensor",
    "gather_parts",
    "ordered_sum",
    "pool",
    "reduce",
    "twin",
    "weighted_mean",
]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def ordered_sum(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum over workers, added in rank order.

    Args:
        tensor: any shape and numeric dtype, equal on all workers; left as it is. On any device that the group's
            backend carries.
        group: the workers.

    Returns:
        Tensor of the same shape and dtype.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`.
    Numerics: order-fixed; accumulates in the tensor's own dtype.

    Example:
        >>> ordered_sum(torch.tensor([1.0, 2.0]), Group.single())
        tensor([1., 2.])
    """
    if group.world_size == 1:
        return tensor.clone()
    parts = gather_parts(tensor, group)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def reduce(tensor: Tensor, group: Group, op: ReduceOp = "sum") -> Tensor:
    """Return the elementwise sum, maximum or minimum over workers.

    Integer sums, maxima and minima do not depend on the order of additions and use the backend's all-reduce;
    float sums are ordered.

    Args:
        tensor: any shape, equal on all workers; left as it is.
        group: the workers.
        op: "sum", "max" or "min".

    Returns:
        Tensor of the same shape and dtype, equal bit for bit on all workers.

    Raises:
        ValueError: unknown `op`.
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`.
    Numerics: order-fixed.

    Example:
        >>> int(reduce(torch.tensor(3), Group.single(), "max"))
        3
    """
    if op not in _OPS:
        raise ValueError(f"`op`: expected one of {sorted(_OPS)}, got {op!r}.")
    if op == "sum" and (tensor.is_floating_point() or tensor.is_complex()):
        return ordered_sum(tensor, group)
    result = tensor.clone(memory_format=torch.contiguous_format)
    if group.world_size > 1:
        with group.collective(f"all-reduce ({op})"):
            dist.all_reduce(result, op=_OPS[op], group=group.process_group)
    return result


def weighted_mean(tensor: Tensor, weight: float, group: Group) -> Tensor:
    """Return the mean over workers, each worker's value weighted by the samples behind it.

    Computes sum_r(weight_r x tensor_r) / sum_r(weight_r): not the mean of means, which is wrong as soon as
    the workers hold different numbers of samples.

    Args:
        tensor: this worker's mean, any shape; ignored where `weight` is 0.
        weight: samples or tokens behind it, >= 0.
        group: the workers.

    Returns:
        float64 tensor of the same shape, equal bit for bit on all workers.

    Raises:
        SpecError: on all workers, when a weight is negative or not finite or all are 0.

    Collective: all ranks of `group`.
    Numerics: order-fixed; accumulates in float64.

    Example:
        >>> weighted_mean(torch.tensor(2.0), 3, Group.single())
        tensor(2., dtype=torch.float64)
    """
    fine = weight >= 0 and weight != float("inf")
    group.agree(fine, f"`weight`: expected a finite number >= 0, got {weight}.", SpecError)
    share = tensor.double() * weight if weight else torch.zeros_like(tensor, dtype=torch.float64)
    packed = torch.cat([share.reshape(-1), share.new_tensor([weight])])
    total = ordered_sum(packed, group)
    if float(total[-1]) == 0:
        raise SpecError("`weight`: expected at least one worker with samples, got 0 on all of them.")
    return (total[:-1] / total[-1]).reshape(tensor.shape)


def broadcast_tensor(tensor: Tensor, group: Group, source_rank: int = 0) -> Tensor:
    """Overwrite `tensor` on all workers with the source rank's values, and return it.

    Args:
        tensor: same shape and dtype on all workers; changed in place.
        group: the workers.
        source_rank: whose values count.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`.

    Example:
        >>> broadcast_tensor(torch.tensor([7]), Group.single())
        tensor([7])
    """
    if group.world_size > 1 and tensor.numel():
        with torch.no_grad(), group.collective("broadcast"):
            flat = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            # Bytes travel, not numbers: every dtype passes, on every backend, with its exact bits.
            raw = flat.reshape(-1).view(torch.uint8)
            dist.broadcast(raw, src=source_rank, group=group.process_group)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat)
    return tensor


def broadcast_object(value: Any, group: Group, source_rank: int = 0) -> Any:
    """Return the source rank's object on all workers.

    Args:
        value: anything picklable; read on the source rank only. It travels between the workers of one job and
            is never read from a file.
        group: the workers.
        source_rank: whose object counts.

    Raises:
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`.

    Example:
        >>> broadcast_object({"lr": 0.1}, Group.single())
        {'lr': 0.1}
    """
    if group.world_size == 1:
        return value
    box = [value if group.rank == source_rank else None]
    with group.collective("broadcast of an object"):
        dist.broadcast_object_list(
            box, src=source_rank, group=group.process_group, device=torch.device("cpu")
        )
    return box[0]


def pool(group: Group) -> Pool:
    """Return the view of `group` that pure code uses (see `samestep.pooling`).

    Example:
        >>> pool(Group.single()).offset(5)
        0
    """
    return alone if group.world_size == 1 else _GroupPool(group)


class _GroupPool:
    """The pool over the workers of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def is_main(self) -> bool:
        return self._group.is_main

    def __call__(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return reduce(tensor, self._group, op)

    def offset(self, n_rows: int) -> int:
        counts = torch.zeros(self._group.world_size, dtype=torch.int64)
        counts[self._group.rank] = n_rows
        return int(reduce(counts, self._group)[: self._group.rank].sum())

    def agree(self, ok: bool, message: str) -> None:
        self._group.agree(ok, message, SpecError)


def gather_parts(tensor: Tensor, group: Group) -> list[Tensor]:
    """Return every worker's tensor, by rank.

    Args:
        tensor: same shape and dtype on all workers.
        group: the workers.

    Collective: all ranks of `group`.
    """
    if group.world_size == 1:
        return [tensor]
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(group.world_size)]
    if mine.numel():
        with group.collective("gathering of tensors"):
            dist.all_gather(parts, mine, group=group.process_group)
    return parts


def twin(group: Group) -> Group:
    """Return the same workers over connections of their own, for a thread whose traffic must not mix.

    Args:
        group: the workers.

    Example:
        >>> twin(Group.single()).world_size
        1

    Collective: all ranks of `group`.
    """
    if group.world_size == 1:
        return group
    return dataclasses.replace(group, process_group=dist.new_group(backend="gloo"), _owns=False)
