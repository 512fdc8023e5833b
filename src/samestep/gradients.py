"""From the shards' gradients to the mean gradient, on this worker and over all of them.

::

    shard 0 ── backward ─┐ kept apart from .grad
    shard 1 ── backward ─┤ as partial sums of the shard tree             (exact)
                         │ or simply accumulated in .grad                (fast)
    last shard ─ backward ── DDP's buckets ── comm hook: add the partial sums, sum over workers, divide once

Torch's DDP does the bucketing and the overlap. It wraps a module whose forward runs the whole loss function, so
that no way of calling the model inside it can escape the reduction. One worker has no DDP: same sums, same
division.
"""

# No postponed annotations here: DDP reads those of a comm hook and does not accept strings.

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import SpecError
from samestep.group import Group
from samestep.hooks import Weights, weighted_mean
from samestep.sharding import counter_merges, shard_range
from samestep.tree import Layout, tree_sum

__all__ = ["GradientSum", "Mode"]

Mode = Literal["fast", "exact"]


class _Whole(nn.Module):
    """Runs the loss function inside DDP's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class GradientSum:
    """Collects gradients of loss sums over shards and workers.

    Args:
        model: plain module; its trainable parameters as they are now.
        group: the workers.
        mode: "exact" adds along the shard tree, "fast" as torch's DDP does.
        n_shards: S; needed by "exact".
        find_unused_parameters: as in torch's DDP; costs a walk over the graph.
        bucket_cap_mb: as in torch's DDP.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        mode: Mode,
        n_shards: int | None,
        find_unused_parameters: bool,
        bucket_cap_mb: int | None,
    ) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._group = group
        self._exact = mode == "exact"
        self._find_unused = find_unused_parameters
        self._total = 0.0
        self._stack: list[list[Tensor]] = []  # exact: partial sums, a list over parameters each
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)
        if self._exact:
            assert n_shards is not None
            self._n_shards = n_shards
            self._block = shard_range(n_shards, group.world_size, group.rank)
            self._layout = Layout.of(n_shards, group.world_size)
            self._leaf = self._block.start
        self._complete = False
        self._marking = True
        self._means: list[tuple[Tensor, Tensor]] = []  # what the buckets held after the reduction
        self._weights = Weights(group)
        self._ddp: DistributedDataParallel | None = None
        if group.world_size > 1:
            self._ddp = DistributedDataParallel(
                _Whole(model),
                process_group=group.process_group,
                **_no_buffer_sync(),
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
                bucket_cap_mb=bucket_cap_mb,
            )
            self._ddp.register_comm_hook(self, _reduce_exact if self._exact else _reduce_fast)
        if find_unused_parameters:
            for index, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(self._mark(index))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget what is left of the step before."""
        for parameter in self.parameters:
            parameter.grad = None
        self._stack = []
        self._used.zero_()
        self._complete = False
        self._means = []
        if self._exact:
            self._leaf = self._block.start

    def forward(self, run: Callable[[], Any], is_last: bool) -> Any:
        """Return ``run()``; the backward of the last shard's loss will communicate.

        Args:
            run: calls the loss function on one shard.
            is_last: whether this is this worker's last shard of the step.
        """
        self._marking = True
        if self._ddp is not None and is_last:
            return self._ddp(run)
        return run()

    def forward_nothing(self, is_last: bool) -> Tensor:
        """Return a zero loss that reaches every parameter: a shard without samples takes part with zeros.

        Args:
            is_last: as in `forward`.
        """

        def zero() -> Tensor:
            parts = [p.reshape(-1)[:0].sum().float().to(self._group.device) for p in self.parameters]
            return torch.stack(parts).sum()

        loss: Tensor = self.forward(zero, is_last)
        self._marking = False
        return loss

    def keep(self) -> None:
        """Put this shard's gradients, which lie in ``.grad``, on the stack of partial sums (exact only)."""
        if not self._exact:
            return
        self._stack.append([self._take(index) for index in range(len(self.parameters))])
        for _ in range(counter_merges(self._n_shards, self._block.start, self._leaf)):
            newer = self._stack.pop()
            torch._foreach_add_(self._stack[-1], newer)
        self._leaf += 1

    def finish(self, backward: Callable[[], None], total: float) -> None:
        """Run the last shard's backward and leave the mean gradient in ``.grad`` on every worker.

        Args:
            backward: of the last shard's loss.
            total: count of the global batch, > 0.

        Raises:
            SpecError: when parameters took no part in the loss and `find_unused_parameters` is off.

        Collective: all ranks of the group.
        Numerics: order-fixed ("exact") or order-free ("fast"); low-precision gradients are summed in float32.
        """
        self._total = total
        if self._ddp is None:
            backward()
            self._finish_alone()
        else:
            self._weights.set_total(total)
            with self._group.collective("reduction of gradients"):
                backward()
            if not self._complete:
                self._refuse_unused()
        if self._find_unused:
            self._drop_unused()

    def _finish_alone(self) -> None:
        if not self._exact and any(p.grad is None for p in self.parameters) and not self._find_unused:
            self._refuse_unused()
        if self._exact:
            self.keep()
            if not self._find_unused and not bool(self._used.all()):
                self._refuse_unused()
            sums = self._stack[0]
            torch._foreach_div_(sums, self._total)
            for parameter, value in zip(self.parameters, sums):
                parameter.grad = value.to(parameter.dtype)
            self._stack = []
            return
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_div_(grads, self._total)

    def _take(self, index: int) -> Tensor:
        """Return this shard's gradient in at least float32 and free `.grad`; zeros where there is none."""
        parameter = self.parameters[index]
        grad, parameter.grad = parameter.grad, None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if grad is None:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if self._marking:
            self._used[index] = 1
        if grad.layout != torch.strided:
            raise SpecError(
                "exact mode: a parameter has a sparse gradient, whose additions have no fixed order. "
                "Use sparse=False, or mode='fast'."
            )
        return grad.to(dtype)

    def reduce_bucket(self, bucket: dist.GradBucket) -> Tensor:
        """Return the mean gradient of a bucket in exact mode, in the bucket's own memory."""
        flat = bucket.buffer()
        self._note(bucket)
        summed = flat.to(torch.promote_types(flat.dtype, torch.float32))
        parts = self._lower_sums(bucket)
        views = _views(summed, bucket.gradients())
        for _ in range(counter_merges(self._n_shards, self._block.start, self._block.stop - 1)):
            torch._foreach_add_(views, parts.pop())
        sums = [torch.cat([part.reshape(-1) for part in entry]) for entry in parts]
        mean = tree_sum([*sums, summed], self._layout, self._group).div_(self._total)
        return mean if mean.data_ptr() == flat.data_ptr() else flat.copy_(mean)

    def _note(self, bucket: dist.GradBucket) -> None:
        self._complete = bucket.is_last()
        if self._find_unused:
            self._means += zip(bucket.parameters(), bucket.gradients())

    def _lower_sums(self, bucket: dist.GradBucket) -> list[list[Tensor]]:
        places = [self._index[id(parameter)] for parameter in bucket.parameters()]
        return [[entry[place] for place in places] for entry in self._stack]

    def _mark(self, index: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            if self._marking:
                self._used[index] = 1

        return mark

    def _drop_unused(self) -> None:
        """Give parameters that no shard of any worker used no gradient, so that the optimizer skips them."""
        if self._group.world_size > 1:
            with self._group.collective("exchange of used parameters"):
                dist.all_reduce(self._used, op=dist.ReduceOp.MAX, group=self._group.process_group)
        # DDP leaves the local gradient where the last shard did not use a parameter but an earlier one did.
        for parameter, mean in self._means:
            parameter.grad = mean
        for parameter, used in zip(self.parameters, self._used.tolist()):
            if not used:
                parameter.grad = None

    def _refuse_unused(self) -> None:
        message = (
            "loss_fn: some trainable parameters took no part in the loss. "
            "Pass find_unused_parameters=True, or freeze them."
        )
        self._group.abandon(message)
        raise SpecError(message)


def _no_buffer_sync() -> dict[str, Any]:
    """Return DDP's option not to broadcast buffers in the forward; `buffers` merges them. Renamed in torch 2.13."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return views


def _reduce_exact(gradients: GradientSum, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Tensor] = torch.futures.Future()
    future.set_result(gradients.reduce_bucket(bucket))
    return future


def _reduce_fast(gradients: GradientSum, bucket: dist.GradBucket) -> Future[Tensor]:
    gradients._note(bucket)
    return weighted_mean(gradients._weights, bucket)
