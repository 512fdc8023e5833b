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

import traceback
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from samestep.carrier import Carrier
from samestep.errors import SamestepError, SpecError
from samestep.group import Group
from samestep.hooks import beside, raised
from samestep.sharding import counter_merges, shard_range
from samestep.tree import Layout, tree_sum

__all__ = ["GradientSum", "Mode"]

Mode = Literal["fast", "exact"]


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
        self._sums: list[tuple[Any, Tensor, Tensor]] = []  # fast: sums over workers under way
        self._carrier = (
            Carrier(model, self.parameters, group, bucket_cap_mb) if group.world_size > 1 else None
        )
        if self._carrier is not None:
            self._carrier.register(weakref.ref(self), _reduce_exact if self._exact else _reduce_fast)
        for index, parameter in enumerate(self.parameters):
            mark = _mark(self._used, index)
            handle = parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """Forget what is left of the step before."""
        for parameter in self.parameters:
            parameter.grad = None
        self._stack, self._pieces, self._sums = [], None, []
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
        if self._carrier is None:
            if loss is not None:
                torch.autograd.backward(scale(loss))
            self._finish_alone()
        else:
            last = torch.zeros((), device=self._group.device, requires_grad=True) if loss is None else loss
            touched = self._carrier.carry(last)
            try:
                with self._group.collective("reduction of gradients"):
                    torch.autograd.backward(scale(touched))
                    self._end_sums()
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

    def start_sum(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start the sum of a bucket over workers in its own memory, and return at once (fast only).

        `_end_sums` waits for it. A continuation would do both, but on a thread of gloo's, where Python must not be
        when the process ends.
        """
        flat = bucket.buffer()
        if flat.layout != torch.strided:  # has no memory of its own to sum in: DDP takes what is returned
            dist.all_reduce(flat, group=self._group.process_group)
            return beside(lambda: flat.div_(self._total), flat.device)
        summed = raised(flat, torch.float32)
        work = dist.all_reduce(summed, group=self._group.process_group, async_op=True)
        self._sums.append((work, summed, flat))
        future: Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        future.set_result(flat)
        return future

    def _end_sums(self) -> None:
        for work, summed, flat in self._sums:
            work.wait()
            summed.div_(self._total)
            if summed.data_ptr() != flat.data_ptr():
                flat.copy_(summed)
        self._sums = []

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
    return state().start_sum(bucket)  # type: ignore[no-any-return]
