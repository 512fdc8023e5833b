"""From the shards' gradients to the mean gradient, on this worker and over all of them.

::

    shard 0 ── backward ─┐ kept apart from .grad
    shard 1 ── backward ─┤ as partial sums of the shard tree             (exact)
                         │ or simply accumulated in .grad                (fast)
    last shard ─ backward ── DDP's buckets ── comm hook: add the partial sums, sum over workers, divide once

Torch's DDP does the bucketing and the overlap. It is given the last shard's finished loss, not the model: so no way
of calling the model can escape the reduction, and a worker that fails before has not yet touched DDP. Every
parameter takes part in that backward, with nothing where the shard did not use it: workers may use different ones.
One worker has no DDP: same sums, same division.
"""

# No postponed annotations here: DDP reads those of a comm hook and does not accept strings.

import inspect
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import SamestepError, SpecError
from samestep.group import Group
from samestep.hooks import Weights, beside, weighted_mean
from samestep.reduce import broadcast_tensor
from samestep.sharding import counter_merges, shard_range
from samestep.tree import Layout, tree_sum

__all__ = ["GradientSum", "Mode", "sparse_parameters"]

Mode = Literal["fast", "exact"]


class _Passing(nn.Module):
    """Holds the model for DDP and passes a finished loss through, so that DDP expects its backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class _Touch(torch.autograd.Function):
    """Returns the loss, and makes every parameter take part in its backward, with nothing."""

    @staticmethod
    def forward(ctx: Any, nothing: list[Tensor | None], loss: Tensor, *_: Tensor) -> Tensor:
        ctx.nothing = nothing
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, grad, *ctx.nothing)


class GradientSum:
    """Collects gradients of loss sums over shards and workers.

    Args:
        model: plain module; its trainable parameters as they are now. With several workers they, and the buffers,
            become those of rank 0, as in torch's DDP.
        group: the workers.
        mode: "exact" adds along the shard tree, "fast" as torch's DDP does.
        n_shards: S; needed by "exact".
        find_unused_parameters: let a parameter take no part in a step; its gradient is then None.
        bucket_cap_mb: as in torch's DDP.

    Collective: all ranks of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        mode: Mode,
        n_shards: int | None,
        find_unused_parameters: bool,
        bucket_cap_mb: float | None,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        self._names = [name for name, _ in named]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._group = group
        self._exact = mode == "exact"
        self._may_be_unused = find_unused_parameters
        self._total = 0.0
        self._low = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters)
        self._stack: list[list[Tensor]] = []  # exact: partial sums, a list over parameters each
        self._pieces: list[Tensor] | None = None  # exact: the sum over the current shard's earlier pieces
        self._used = bytearray(len(self.parameters))
        if self._exact:
            assert n_shards is not None
            self._n_shards = n_shards
            self._block = shard_range(n_shards, group.world_size, group.rank)
            self._layout = Layout.of(n_shards, group.world_size)
            self._leaf = self._block.start
        self._weights = Weights(group)
        self._ddp = self._wrap(model, bucket_cap_mb) if group.world_size > 1 else None
        for index, parameter in enumerate(self.parameters):
            mark = _mark(self._used, index)
            handle = parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def _wrap(self, model: nn.Module, bucket_cap_mb: float | None) -> DistributedDataParallel:
        sparse = {id(p) for p in sparse_parameters(model)}
        # DDP wants a gradient from a parameter that it knows as sparse; an empty one adds nothing.
        self._nothing = [_empty(p) if id(p) in sparse else None for p in self.parameters]
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        quiet = "forward_sync_buffers" in known  # torch 2.13 renamed the option
        options: dict[str, Any] = {"forward_sync_buffers" if quiet else "broadcast_buffers": False}
        ddp = DistributedDataParallel(
            _Passing(model),
            process_group=self._group.process_group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )
        if not quiet:  # the old option leaves out the copy at the start, too
            for buffer in model.buffers():
                broadcast_tensor(buffer, self._group)
        ddp.register_comm_hook(weakref.ref(self), _reduce_exact if self._exact else _reduce_fast)
        return ddp

    def begin(self) -> None:
        """Forget what is left of the step before."""
        for parameter in self.parameters:
            parameter.grad = None
        self._stack, self._pieces = [], None
        self._used[:] = bytes(len(self._used))
        if self._exact:
            self._leaf = self._block.start

    def between(self) -> None:
        """Add up the pieces of one shard; in low precision that needs float32, outside ``.grad`` (exact only)."""
        if self._exact and self._low:
            taken = self._take_all()
            if self._pieces is None:
                self._pieces = taken
            else:
                torch._foreach_add_(self._pieces, taken)

    def keep(self) -> None:
        """Put this shard's gradients, which lie in ``.grad``, on the stack of partial sums (exact only)."""
        if not self._exact:
            return
        self._stack.append(self._take_all())
        if self._pieces is not None:
            torch._foreach_add_(self._stack[-1], self._pieces)
            self._pieces = None
        for _ in range(counter_merges(self._n_shards, self._block.start, self._leaf)):
            newer = self._stack.pop()
            torch._foreach_add_(self._stack[-1], newer)
        self._leaf += 1

    def finish(self, loss: Tensor | None, scale: Callable[[Tensor], Tensor], total: float) -> None:
        """Run the last shard's backward and leave the mean gradient in ``.grad`` on every worker.

        Args:
            loss: sum of the last shard, or of its last piece; None where it had no samples.
            scale: applied to the loss before its backward.
            total: count of the global batch, > 0.

        Raises:
            SpecError: on all workers, when a parameter took no part in the loss of any shard and
                `find_unused_parameters` is off.
            WorkerError: when another worker failed in its backward or is gone.

        Collective: all ranks of the group.
        Numerics: order-fixed ("exact") or order-free ("fast"); low-precision gradients are summed in float32.
        """
        self._total = total
        if self._ddp is None:
            if loss is not None:
                torch.autograd.backward(scale(loss))
            self._finish_alone()
        else:
            self._weights.set_total(total)
            last = torch.zeros((), device=self._group.device, requires_grad=True) if loss is None else loss
            touched = self._ddp(_Touch.apply(self._nothing, last, *self.parameters))  # type: ignore[no-untyped-call]
            try:
                with self._group.collective("reduction of gradients"):
                    torch.autograd.backward(scale(touched))
            except SamestepError:
                raise
            except Exception:
                self._group.abandon(traceback.format_exc())
                raise
            self._stack, self._pieces = [], None  # not before: on CUDA the sums run beside the backward
        self._settle_unused()

    def _finish_alone(self) -> None:
        if self._exact:
            self.keep()
            sums = self._stack.pop()
            torch._foreach_div_(sums, self._total)
            for parameter, value in zip(self.parameters, sums):
                parameter.grad = value.to(parameter.dtype)
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._total)

    def _take_all(self) -> list[Tensor]:
        return [self._take(index) for index in range(len(self.parameters))]

    def _take(self, index: int) -> Tensor:
        """Return this shard's gradient in at least float32 and free `.grad`; zeros where there is none."""
        parameter = self.parameters[index]
        grad, parameter.grad = parameter.grad, None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if grad is None:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if grad.layout != torch.strided:
            raise SpecError(
                f"`{self._names[index]}`: exact mode got a sparse gradient, whose additions have no fixed order. "
                "Use sparse=False, or mode='fast'."
            )
        return grad.to(dtype)

    def reduce_bucket(self, bucket: dist.GradBucket) -> Tensor:
        """Return the mean gradient of a bucket in exact mode, in the bucket's own memory."""
        flat = bucket.buffer()
        summed = flat.to(torch.promote_types(flat.dtype, torch.float32))
        places = [self._index[id(parameter)] for parameter in bucket.parameters()]
        views = _views(summed, bucket.gradients())
        if self._pieces is not None:
            torch._foreach_add_(views, [self._pieces[place] for place in places])
        parts = [[entry[place] for place in places] for entry in self._stack]
        for _ in range(counter_merges(self._n_shards, self._block.start, self._block.stop - 1)):
            torch._foreach_add_(views, parts.pop())
        sums = [torch.cat([part.reshape(-1) for part in entry]) for entry in parts]
        mean = tree_sum([*sums, summed], self._layout, self._group).div_(self._total)
        return mean if mean.data_ptr() == flat.data_ptr() else flat.copy_(mean)

    def _settle_unused(self) -> None:
        """Give parameters that no shard of any worker used no gradient, so that the optimizer skips them."""
        used = torch.frombuffer(self._used, dtype=torch.uint8).clone()
        if self._group.world_size > 1:
            with self._group.collective("exchange of used parameters"):
                dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group.process_group)
        if bool(used.all()):
            return
        unused = (used == 0).nonzero().flatten().tolist()
        if not self._may_be_unused:
            name = self._names[unused[0]]
            raise SpecError(
                f"`{name}`: expected every trainable parameter in the loss of at least one shard, got "
                f"{len(unused)} that took no part. Pass find_unused_parameters=True, or freeze them.",
                name=name,
            )
        for index in unused:
            self.parameters[index].grad = None


def sparse_parameters(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model's embeddings that are asked for sparse gradients."""
    return [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]


def _empty(parameter: Tensor) -> Tensor:
    places = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)


def _mark(used: bytearray, index: int) -> Callable[[Tensor], None]:
    def mark(parameter: Tensor) -> None:
        used[index] |= parameter.grad is not None  # it is called for a parameter that got nothing, too

    return mark


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [
        part.view(tensor.shape) for part, tensor in zip(torch.split(flat, [t.numel() for t in like]), like)
    ]


def _reduce_exact(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    return beside(lambda: state().reduce_bucket(bucket), bucket.buffer().device)


def _reduce_fast(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    return weighted_mean(state()._weights, bucket)
