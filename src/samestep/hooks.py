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
`ordered_mean` adds along a fixed tree over ranks: the same bits for every bucket size. `weighted` makes a weighted
mean of a hook that takes the mean of workers, such as torch's compression hooks.
"""

# No postponed annotations here: DDP reads those of a comm hook and does not accept strings.

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import SpecError
from samestep.group import Group
from samestep.reduce import gather_parts
from samestep.tree import Layout, tree_sum

__all__ = [
    "Hook",
    "Weights",
    "beside",
    "finished",
    "ordered_mean",
    "raised",
    "register",
    "weighted",
    "weighted_mean",
]

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

        Call it once per micro-batch, before its backward, under ``no_sync`` too. A weight that is negative or not
        finite is refused on all workers in the backward that communicates.

        Args:
            loss: scalar mean over the micro-batch. With weight 0 its value does not matter (the mean of nothing is
                NaN), but its gradient must be finite: clamp a denominator of your own.
            weight: samples or tokens behind that mean, >= 0; 0 for a worker that has none.

        Returns:
            Scalar `loss` x `weight`: the sum over the micro-batch.
        """
        self.add(weight)
        return loss * weight if weight else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0

    def add(self, weight: float) -> None:
        """Count the weight of a micro-batch whose loss is already a sum.

        Args:
            weight: as in `weigh`.
        """
        # A bad weight must reach the exchange: an error here would leave the other workers waiting for us.
        self.local = self.local + float(weight) if weight >= 0 else float("nan")

    def total(self, is_last: bool) -> float:
        """Return the weight of all workers for this update; `is_last` closes the update's account.

        Raises:
            SpecError: on all workers, when a weight is negative or not finite, or no worker counted any.

        Collective: in the first bucket of an update.
        """
        if self._total is None:
            self._total = self._exchange()
        total = self._total
        if is_last:
            self.reset()
        return total

    def _exchange(self) -> float:
        each = [
            float(part) for part in gather_parts(torch.tensor([self.local], dtype=torch.float64), self.group)
        ]
        wrong = [rank for rank, weight in enumerate(each) if not weight < float("inf")]
        if wrong:
            self.reset()
            raise SpecError(
                "`weight`: expected finite numbers >= 0, got a negative one, NaN or infinity on rank "
                f"{wrong[0]} of {self.group.world_size}. Pass the number of samples or tokens behind the loss.",
                rank=wrong[0],
                name="weight",
            )
        if sum(each) == 0:
            self.reset()
            raise SpecError(
                "`weight`: expected at least one worker with samples, got 0 on all of them. "
                "Call weights.weigh(loss, n_samples) before each backward.",
                name="weight",
            )
        return sum(each)

    def reset(self) -> None:
        """Forget the weights counted so far, where an update is given up."""
        self.local, self._total = 0.0, None

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

    One backward per update communicates; micro-batches before it run under ``ddp_model.no_sync()``.

    Args:
        ddp_model: before its first backward, without another comm hook.
        hook: `weighted_mean`, `ordered_mean`, or another one made `weighted`.
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
    flat = raised(bucket.buffer(), weights.reduce_dtype)

    def mean() -> Tensor:
        # Waited for here: a continuation would run, and be torn down, on a thread of gloo's, which aborts the
        # process when Python ends before it is done.
        if weights.group.world_size > 1:
            dist.all_reduce(flat, group=weights.group.process_group)
        return _settled(flat, total, bucket.buffer())

    return beside(mean, flat.device)


def ordered_mean(weights: Weights, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the same mean as `weighted_mean`, added along the tree over ranks.

    The bits depend on neither the bucket layout nor the backend. Collectives are issued here, in the hook's
    body: one that is issued in a future's continuation hangs on gloo.

    Args:
        weights: from `register`.
        bucket: gradients of loss *sums* (see `Weights.weigh`), dense.

    Returns:
        Future of a tensor of the bucket's shape and dtype, equal bit for bit on all workers.

    Raises:
        SpecError: when the gradients are sparse.

    Collective: all workers, once per bucket; the weights travel once per update.
    Numerics: order-fixed; half precision accumulates in `weights.reduce_dtype`.
    """
    if bucket.buffer().layout != torch.strided:
        raise SpecError(
            "ordered_mean: got a sparse gradient, whose additions have no fixed order. Use sparse=False, or "
            "hooks.weighted_mean."
        )
    total = weights.total(bucket.is_last())

    def mean() -> Tensor:
        flat = raised(bucket.buffer(), weights.reduce_dtype)
        return _settled(tree_sum([flat], weights.layout(), weights.group), total, bucket.buffer())

    return beside(mean, bucket.buffer().device)


def weighted(hook: Callable[[Any, dist.GradBucket], Any], state: Any = None) -> Hook:
    """Return a hook that takes the exact weighted mean by way of one that takes the plain mean over workers.

    The gradients of loss sums are multiplied by world size / total weight first, so that the plain mean of what
    comes out is the weighted one. The wrapped hook sees values of the size of a mean gradient.

    Args:
        hook: of torch, such as ``default_hooks.fp16_compress_hook`` or ``powerSGD_hook.powerSGD_hook``.
        state: the wrapped hook's own, such as a ``PowerSGDState``; None for the group's process group.

    Returns:
        A hook for `register`; as exact as the wrapped one.
    """

    def run(weights: Weights, bucket: dist.GradBucket) -> Future[Tensor]:
        total = weights.total(bucket.is_last())
        bucket.buffer().mul_(weights.group.world_size / total)
        future: Future[Tensor] = hook(weights.group.process_group if state is None else state, bucket)
        return future

    return run


def finished(value: Tensor) -> Future[Tensor]:
    """Return a future that holds `value` already."""
    future: Future[Tensor] = Future(devices=[value.device] if value.is_cuda else None)
    future.set_result(value)
    return future


def beside(work: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
    """Return a finished future of ``work()``, which on CUDA runs on a stream of its own, beside the backward.

    Args:
        work: may communicate; its result lies on `device`.
        device: of the bucket.
    """
    if device.type != "cuda":
        return finished(work())
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    later: Future[Tensor] = torch.futures.Future(devices=[device])
    with torch.cuda.stream(stream):
        later.set_result(work())
    return later


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def raised(flat: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a bucket of half precision in `dtype`, and any other as it is."""
    low = flat.dtype in (torch.float16, torch.bfloat16)
    return flat.to(dtype) if low and dtype is not None else flat


def _settled(summed: Tensor, total: float, bucket: Tensor) -> Tensor:
    mean = summed.div_(total)
    if mean.layout != torch.strided or mean.data_ptr() == bucket.data_ptr():
        return mean
    return bucket.copy_(mean)  # DDP wants the bucket's own dtype, and views of it may be the gradients
