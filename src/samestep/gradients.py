"""From the shards' gradients to the mean gradient, on this worker and over all of them.

::

    shard 0 ── backward ─┐ kept apart from .grad
    shard 1 ── backward ─┤ as partial sums of the shard tree             (exact)
                         │ or simply accumulated in .grad                (fast)
    last shard ─ backward ── DDP's buckets ── add the partial sums, sum over workers ── divide once

Torch's DDP does the bucketing and the overlap. It is given the last shard's finished loss, not the model: so no way
of calling the model can escape the reduction, and a worker that fails before has not yet touched DDP. Every
parameter takes part in that backward, with nothing where the shard did not use it: workers may use different ones.
One worker has no DDP: same sums, same division.

Fast mode leaves the sum over workers to DDP itself, with no hook of ours, so a step costs what DDP's does. A loss
sum is divided before its backward by the count of the batch before; where this batch's differs, one factor in the
end puts the gradient right. Low precision, sparse gradients and a GradScaler go through a hook, summed in float32.
"""

# No postponed annotations here: DDP reads those of a comm hook and does not accept strings.

import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from samestep.carrier import Carrier, sparse_parameters
from samestep.errors import SamestepError, SpecError
from samestep.group import Group
from samestep.hooks import beside, finished
from samestep.partials import PartialSums
from samestep.sharding import shard_range
from samestep.tree import Layout, TreeSum

__all__ = ["GradientSum", "Mode"]

Mode = Literal["fast", "exact"]
_Sum = tuple[Callable[[], Tensor], Tensor]

_LOW = (torch.float16, torch.bfloat16)
_MOST_UNDER_WAY = 2  # ordered sums that need memory of their own


class GradientSum:
    """Collects gradients of loss sums over shards and workers.

    Args:
        model: plain module; with several workers its parameters and buffers become those of rank 0.
        group: the workers.
        mode: "exact" adds along the shard tree, "fast" as torch's DDP does.
        n_shards: S; needed by "exact".
        find_unused_parameters: let a parameter take no part in a step; its gradient is then None.
        bucket_cap_mb: as in torch's DDP.
        scaled: whether a GradScaler scales the losses.

    Attributes:
        parameters: the trainable ones, as they were at the start.
        expected_count: count of the last global batch; fast mode takes it for that of the next.

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
        scaled: bool = False,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in named]
        self.expected_count = 1.0
        self._names = [name for name, _ in named]
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._group = group
        self._exact = mode == "exact"
        self._may_be_unused = find_unused_parameters
        self._low = any(p.dtype in _LOW for p in self.parameters)
        self._sparse = any(p.requires_grad for p in sparse_parameters(model))
        self._plain = not (self._exact or self._low or self._sparse or scaled)  # DDP itself takes the mean
        self._used = bytearray(len(self.parameters))
        self._broken = False  # a worker that failed, and adds nothing
        self._partials: PartialSums | None = None
        if self._exact:
            assert n_shards is not None
            self._layout = Layout.of(n_shards, group.world_size)
            block = shard_range(n_shards, group.world_size, group.rank)
            self._partials = PartialSums(self._names, self.parameters, n_shards, block)
        self._under_way: deque[_Sum] = deque()  # sums of buckets, and their memory
        self._landed: list[tuple[Tensor, Tensor]] = []
        self._carrier: Carrier | None = None
        if group.world_size > 1:
            self._carrier = Carrier(model, self.parameters, group, bucket_cap_mb)
            if self._plain:
                self._carrier.settle_buckets()
            else:
                self._carrier.register(weakref.ref(self), _start_sum)
        for index, parameter in enumerate(self.parameters):
            mark = _mark(self._used, index)
            handle = parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        """Forget what is left of the step before."""
        for parameter in self.parameters:
            parameter.grad = None
        self._broken = False
        self._under_way.clear()
        self._landed = []
        self._used[:] = bytes(len(self._used))
        if self._partials is not None:
            self._partials.begin()

    def weigh(self, loss: Tensor) -> Tensor:
        """Return what to run the backward of, for a loss sum; DDP will divide by the number of workers."""
        return loss * (self._group.world_size / self.expected_count) if self._plain else loss

    def between(self) -> None:
        """Add up the pieces of one shard; in low precision that needs float32, outside ``.grad`` (exact only)."""
        if self._partials is not None and self._low:
            self._partials.between()

    def keep(self) -> None:
        """Put this shard's gradients, which lie in ``.grad``, with the partial sums (exact only)."""
        if self._partials is not None:
            self._partials.keep()

    def finish(self, loss: Tensor | None, scale: Callable[[Tensor], Tensor], broken: bool = False) -> None:
        """Run the last shard's backward and the sums over workers; `settle` makes the mean of them.

        Args:
            loss: sum of the last shard, or of its last piece; None where it had no samples.
            scale: applied to the loss before its backward.
            broken: this worker failed before. It takes part, so that nobody waits for it, and adds nothing of use.

        Raises:
            WorkerError: when another worker failed here or is gone.

        Collective: all ranks of the group.
        Numerics: order-fixed ("exact") or order-free ("fast"); low-precision gradients are summed in float32.
        """
        self._broken = broken
        if self._carrier is None:
            if loss is not None and not broken:
                torch.autograd.backward(scale(loss))
            return
        try:
            with self._group.collective("reduction of gradients"):
                if broken:
                    self._carrier.take_part()
                else:
                    self._carrier.backward(loss, scale)
                self._land(0)
        except Exception as error:
            if not isinstance(error, SamestepError):
                self._group.abandon(traceback.format_exc())
            raise
        if self._partials is not None:
            self._partials.begin()  # not before: on CUDA the sums run beside the backward

    def settle(self, total: float) -> None:
        """Leave the mean gradient in ``.grad``.

        Args:
            total: count of the global batch.
        """
        if self._partials is not None and self._carrier is None:
            self.keep()
            sums = self._partials.total()
            torch._foreach_div_(sums, total)
            for parameter, value in zip(self.parameters, sums):
                parameter.grad = value.to(parameter.dtype)
            return
        if self._plain or self._carrier is None:
            right = self.expected_count / total if self._plain else 1 / total
            if right != 1.0:
                self.multiply(right)
        for summed, flat in self._landed:
            summed.div_(total)
            if summed.data_ptr() != flat.data_ptr():
                flat.copy_(summed)
        self._landed = []
        if self._sparse and self._carrier is not None:  # those have no memory of their own in a bucket
            _multiply([p.grad for p in self.parameters if p.grad is not None and p.grad.is_sparse], 1 / total)
        self.expected_count = total

    def norm(self) -> float:
        """Return the norm of the mean gradient; what no shard of any worker used has no gradient from here on.

        Raises:
            SpecError: on all workers, when a parameter took no part in the loss of any shard and
                `find_unused_parameters` is off.

        Collective: all ranks of the group.
        Numerics: order-fixed: one norm per parameter, and the norm of these.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        values = [g if g.layout == torch.strided else g.coalesce().values() for g in grads]
        if self._exact and self._group.device.type == "cuda":
            # CUDA's sums over a tensor depend on where it begins, and that differs between buckets and world sizes.
            values = [g if g.data_ptr() % 512 == 0 else g.clone() for g in values]
        wide = torch.float64 if any(g.dtype == torch.float64 for g in values) else torch.float32
        norms = torch.stack([n.to(wide) for n in torch._foreach_norm(values)]) if values else torch.zeros(1)
        total, *each = torch.cat([torch.linalg.vector_norm(norms).view(1), norms]).tolist()
        # All workers see the same norms, and a gradient that is not zero was made by somebody.
        if len(values) < len(self.parameters) or 0.0 in each:
            self._settle_unused()
        return float(total)

    def multiply(self, factor: float) -> None:
        """Multiply the mean gradient, to clip it."""
        _multiply([p.grad for p in self.parameters if p.grad is not None], factor)

    def start_sum(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start the sum of a bucket over workers in its own memory, and return at once; `finish` waits for it.

        A continuation would, too, but on a thread of gloo's, where Python must not be when the process ends.
        """
        flat = bucket.buffer()
        if flat.layout != torch.strided:
            dist.all_reduce(flat, group=self._group.process_group)
            return finished(flat)
        summed = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if not self._exact:
            work = dist.all_reduce(summed, group=self._group.process_group, async_op=True)
            self._under_way.append((lambda: (work.wait(), summed)[1], flat))
            return finished(flat)
        sums = self._subtree_sums(bucket, summed)
        if flat.is_cuda and not self._layout.pair:

            def add() -> Tensor:
                self._landed.append((TreeSum(sums, self._layout, self._group).wait(), flat))
                return flat

            return beside(add, flat.device)
        if not self._layout.pair:
            self._land(_MOST_UNDER_WAY - 1)
        self._under_way.append((TreeSum(sums, self._layout, self._group, bucket.index()).wait, flat))
        return finished(flat)

    def _subtree_sums(self, bucket: dist.GradBucket, summed: Tensor) -> list[Tensor]:
        """Return the sums of this worker's subtrees for a bucket; the last shard's gradients are in `summed`."""
        assert self._partials is not None
        if self._broken:
            return [torch.zeros_like(summed) for _ in range(self._layout.parts[self._group.rank])]
        places = [self._index[id(parameter)] for parameter in bucket.parameters()]
        return self._partials.of_bucket(summed, bucket.gradients(), places)

    def _land(self, most: int) -> None:
        """Wait for the oldest sums until at most so many are under way."""
        while len(self._under_way) > most:
            wait, flat = self._under_way.popleft()
            self._landed.append((wait(), flat))

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


def _multiply(grads: list[Tensor], factor: float) -> None:
    if any(grad.layout != torch.strided for grad in grads):
        for grad in grads:
            grad.mul_(factor)
    elif grads:
        torch._foreach_mul_(grads, factor)


def _start_sum(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    return state().start_sum(bucket)  # type: ignore[no-any-return]
