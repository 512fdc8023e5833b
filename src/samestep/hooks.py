"""Comm hooks for torch DDP: the exact mean, and the exact mean in a fixed order.

For people who keep their own DDP loop. DDP's own all-reduce takes the mean of the workers' means, which is wrong
as soon as they hold different numbers of samples. These hooks sum what the backward left in the buckets and
divide once by the total weight.

::

    weights = hooks.register(ddp_model, hooks.weighted_mean, group)
    for inputs, targets in loader:
        loss = cross_entropy(ddp_model(inputs), targets)              # a mean over this micro-batch
        weights.weigh(loss, len(inputs)).backward()                   # also under ddp_model.no_sync()
        optimizer.step()

`weighted_mean` adds with the backend's all-reduce: replicas agree, other world sizes within rounding.
`ordered_mean` adds along a fixed tree over ranks: the same bits for every bucket size.
"""

# No postponed annotations here: DDP reads those of a comm hook and does not accept strings.

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import SpecError
from samestep.group import Group
from samestep.reduce import ordered_sum
from samestep.tree import Layout, tree_sum

__all__ = ["Weights", "ordered_mean", "register", "weighted_mean"]

Hook = Callable[["Weights", dist.GradBucket], "Future[Tensor]"]


@dataclass
class Weights:
    """The state of a comm hook: the weight of this worker's gradients since the last update.

    Attributes:
        group: the workers.
        reduce_dtype: dtype of the sums over workers for gradients in half precision; None keeps theirs.
        local: samples or tokens behind the gradients that this worker has collected so far.
    """

    group: Group
    reduce_dtype: torch.dtype | None = torch.float32
    local: float = 0.0
    _total: float | None = field(default=None, repr=False)
    _layout: Layout | None = field(default=None, repr=False)

    def weigh(self, loss: Tensor, weight: float) -> Tensor:
        """Return the loss to call `backward` on, and count its weight.

        Call it once per micro-batch, before its backward, under ``no_sync`` too.

        Args:
            loss: scalar mean over the micro-batch.
            weight: samples or tokens behind that mean, >= 0; 0 for a worker that has none.

        Returns:
            Scalar `loss` x `weight`: the sum over the micro-batch.

        Raises:
            SpecError: when the weight is negative or not finite.
        """
        self.add(weight)
        return loss * weight if weight else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0

    def add(self, weight: float) -> None:
        """Count the weight of a micro-batch whose loss is already a sum.

        Raises:
            SpecError: when the weight is negative or not finite.
        """
        if not 0 <= weight < float("inf"):
            raise SpecError(
                f"`weight`: expected a finite number >= 0, got {weight} on rank {self.group.rank}. "
                "Pass the number of samples or tokens behind the loss.",
                rank=self.group.rank,
                name="weight",
            )
        self.local += float(weight)

    def total(self, is_last: bool) -> float:
        """Return the weight of all workers for this update; `is_last` closes the update's account.

        Raises:
            SpecError: on all workers, when no worker counted any weight.

        Collective: in the first bucket of an update.
        """
        if self._total is None:
            self._total = float(ordered_sum(torch.tensor([self.local], dtype=torch.float64), self.group))
        total = self._total
        if is_last:
            self.local, self._total = 0.0, None
        if total == 0:
            raise SpecError(
                "`weight`: expected at least one worker with samples, got 0 on all of them. "
                "Call weights.weigh(loss, n_samples) before each backward.",
                name="weight",
            )
        return total

    def set_total(self, total: float) -> None:
        """Give the total weight of this update, where the caller already knows it."""
        self._total = total

    def layout(self) -> Layout:
        """Return the tree over ranks: one shard per worker."""
        if self._layout is None:
            self._layout = Layout.of(self.group.world_size, self.group.world_size)
        return self._layout


def register(
    ddp_model: DistributedDataParallel,
    hook: Hook,
    group: Group,
    *,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> Weights:
    """Attach a hook to a DDP model and return the state that takes the weights.

    Args:
        ddp_model: before its first backward, without another comm hook.
        hook: `weighted_mean`, `ordered_mean`, or one of them wrapped.
        group: the workers that the model was wrapped for.
        reduce_dtype: dtype of the sums for half-precision gradients, None to keep theirs.

    Returns:
        The hook's state; call its `weigh` (or `add`) before each backward.

    Raises:
        SpecError: when `ddp_model` is not wrapped in DDP.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise SpecError(
            f"`ddp_model`: expected a DistributedDataParallel, got {type(ddp_model).__name__}. "
            "Wrap the model first: DistributedDataParallel(model).",
            name="ddp_model",
        )
    weights = Weights(group, reduce_dtype)
    ddp_model.register_comm_hook(weights, hook)
    return weights


def weighted_mean(weights: Weights, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the bucket's gradients summed over workers and divided by the total weight.

    Args:
        weights: from `register`.
        bucket: gradients of loss *sums* (see `Weights.weigh`).

    Returns:
        Future of a tensor of the bucket's shape and dtype, equal bit for bit on all workers.

    Collective: all workers, once per bucket; the weights travel once per update.
    Numerics: order-free over workers; half precision accumulates in `weights.reduce_dtype`.
    """
    total = weights.total(bucket.is_last())
    flat = _raised(bucket.buffer(), weights.reduce_dtype)
    if weights.group.world_size == 1:
        return _done(_settled(flat, total, bucket.buffer()))
    work = dist.all_reduce(flat, group=weights.group.process_group, async_op=True)
    assert work is not None
    reduced: Future[Tensor] = work.get_future().then(
        lambda future: _settled(future.value()[0], total, bucket.buffer())
    )
    return reduced


def ordered_mean(weights: Weights, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the same mean as `weighted_mean`, added along the tree over ranks.

    The bits depend on neither the bucket layout nor the backend. Collectives are issued here, in the hook's
    body: one that is issued in a future's continuation hangs on gloo.

    Args:
        weights: from `register`.
        bucket: gradients of loss *sums* (see `Weights.weigh`).

    Returns:
        Future of a tensor of the bucket's shape and dtype, equal bit for bit on all workers.

    Collective: all workers, once per bucket; the weights travel once per update.
    Numerics: order-fixed; half precision accumulates in `weights.reduce_dtype`.
    """
    total = weights.total(bucket.is_last())
    flat = _raised(bucket.buffer(), weights.reduce_dtype)
    return _done(_settled(tree_sum([flat], weights.layout(), weights.group), total, bucket.buffer()))


def _raised(flat: Tensor, dtype: torch.dtype | None) -> Tensor:
    low = flat.dtype in (torch.float16, torch.bfloat16)
    return flat.to(dtype) if low and dtype is not None else flat


def _settled(summed: Tensor, total: float, bucket: Tensor) -> Tensor:
    mean = summed.div_(total)
    if mean.data_ptr() == bucket.data_ptr():
        return mean
    return bucket.copy_(mean)  # DDP wants the bucket's own dtype, and views of it may be the gradients


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future
