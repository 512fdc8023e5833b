"""Torch's DDP as a carrier of gradients: it is handed a finished loss, not the model.

So no way of calling the model can escape the reduction, and a worker that fails before the last backward has not
yet touched DDP. Every parameter takes part in that backward, with nothing where the loss does not use it: workers
may use different ones, and none waits for a bucket that another one never fills.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.group import Group
from samestep.reduce import broadcast_tensor

__all__ = ["Carrier", "sparse_parameters"]


class Carrier:
    """DDP around a model, for the backward of a loss that is computed outside.

    Without a comm hook the backward leaves the mean over workers in ``.grad``, as torch's DDP does.

    Args:
        model: plain module; with the wrapping its parameters and buffers become those of rank 0.
        parameters: its trainable parameters.
        group: the workers.
        bucket_cap_mb: as in torch's DDP.

    Collective: all ranks of the group.
    """

    def __init__(
        self, model: nn.Module, parameters: list[nn.Parameter], group: Group, bucket_cap_mb: float | None
    ) -> None:
        sparse = {id(p) for p in sparse_parameters(model)}
        # DDP wants a gradient from a parameter that it knows as sparse; an empty one adds nothing.
        self._nothing = [_empty(p) if id(p) in sparse else None for p in parameters]
        self._parameters = parameters
        self._edges = [torch.autograd.graph.get_gradient_edge(p) for p in parameters]
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        quiet = "forward_sync_buffers" in known  # torch 2.13 renamed the option
        options: dict[str, Any] = {"forward_sync_buffers" if quiet else "broadcast_buffers": False}
        self._ddp = DistributedDataParallel(
            _Passing(model),
            process_group=group.process_group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )
        if not quiet:  # the old option leaves out the copy at the start, too
            for buffer in model.buffers():
                broadcast_tensor(buffer, group)

    def register(self, state: object, hook: Callable[..., Any]) -> None:
        """Attach the comm hook."""
        self._ddp.register_comm_hook(state, hook)

    def settle_buckets(self) -> None:
        """Let DDP settle its buckets now, in the reverse order of the parameters, as it does at the start.

        Left alone, it does so after its first backward, and in the order of that: a run that goes on from a
        checkpoint would add the gradients of its first step in another order than the undisturbed run, with other
        last bits. Twice: the first backward in new buckets divides by the number of workers in another way, too.

        Collective: all ranks of the group.
        """
        with _without_hooks(self._parameters):
            for _ in range(2):
                loss = self._nought()
                for nothing, parameter in zip(self._nothing, self._parameters):
                    loss = _Touch.apply([nothing], loss, parameter)  # type: ignore[no-untyped-call]
                self._ddp(loss).backward()
                for parameter in self._parameters:
                    parameter.grad = None

    def backward(self, loss: Tensor | None, scale: Callable[[Tensor], Tensor]) -> None:
        """Run the backward of a loss; it reaches every parameter and communicates once per bucket.

        Args:
            loss: None for a worker that has none.
            scale: applied to it before.

        Collective: all ranks of the group.
        """
        last = self._nought() if loss is None else loss
        carried = self._ddp(_Touch.apply(self._nothing, last, *self._parameters))  # type: ignore[no-untyped-call]
        torch.autograd.backward(scale(carried))

    def take_part(self) -> None:
        """Add nothing of use to the backward of the others, whatever has become of this worker's model.

        Parameters that were frozen after the wrapping are no longer tied to DDP by a graph that could be built now;
        so the backward starts where their gradients would have arrived.

        Collective: all ranks of the group.
        """
        frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            carried = self._ddp(self._nought())
            nothing = [
                torch.zeros_like(parameter) if sparse is None else sparse
                for parameter, sparse in zip(self._parameters, self._nothing)
            ]
            torch.autograd.backward([carried, *self._edges], [torch.zeros_like(carried), *nothing])
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _nought(self) -> Tensor:
        return torch.zeros((), device=self._parameters[0].device, requires_grad=True)


@contextlib.contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep users' hooks from a backward that is none of theirs: one may even step an optimizer."""
    found = [
        hooks
        for parameter in parameters
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        if hooks
    ]
    kept = [dict(hooks) for hooks in found]
    try:
        for hooks in found:  # autograd looks into these very dicts
            hooks.clear()
        yield
    finally:
        for hooks, saved in zip(found, kept):
            hooks.update(saved)


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
