"""The exact mean in a loop that is not ours: weigh the gradient of a loss, in DDP and alone.

Frameworks return a mean per micro-batch, divide it by the number of micro-batches and let DDP take the mean over
workers: a mean of means of means. `LossWeights` needs nothing but the loss, just before its backward.

::

    loss ── hook on its gradient: x weight ── backward ── DDP's buckets ── weighted mean over workers
                                                 └ alone: the gradients are kept at the mean of what came so far

It refuses a model that several workers train without DDP.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep import hooks
from samestep.errors import SpecError
from samestep.group import Group

__all__ = ["LossWeights", "count_samples"]


@dataclass
class _Told(hooks.Weights):
    """Weights whose exchange also tells why a worker's weight is not a number."""

    problem: str = ""

    def total(self, is_last: bool) -> float:
        try:
            return super().total(is_last)
        except SpecError as error:
            # All workers are here with the same error, so they can be asked.
            found = self.group.gather_text(self.problem)
            self.problem = ""
            told = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
            raise SpecError("\n".join([error.message, *told]), rank=error.rank, name=error.name) from error


class LossWeights:
    """Makes the gradient of every update the mean over all samples behind it, whoever calls backward.

    With DDP it registers a comm hook, `hooks.weighted_mean`; micro-batches before the last run under ``no_sync``,
    as frameworks do. Without DDP, in a single process, gradients are kept at the weighted mean of the micro-batches
    so far.

    Args:
        model: DDP's wrapper, before its first backward and without a comm hook; or a plain module that this
            process trains alone.
        optimizers: those that update the model; an update begins a new mean. With DDP, the backward that
            communicates does.
        group: the workers.
        ordered: adds workers in a fixed order, `hooks.ordered_mean`. DDP regroups its buckets after the first
            update of a process, and with three or more workers the backend's sums depend on the grouping: a resumed
            run then differs in the last bits unless they are ordered.

    Raises:
        SpecError: several workers and no DDP, or DDP with a comm hook.

    Example:
        >>> weight = nn.Linear(1, 1, bias=False).requires_grad_()
        >>> optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
        >>> weights = LossWeights(weight, [optimizer], Group.single())
        >>> for inputs in (torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[5.0]])):
        ...     loss = weight(inputs).mean()
        ...     weights.weigh(loss, len(inputs))
        ...     loss.backward()
        >>> weight.weight.grad.item()
        2.0
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Optimizer], group: Group, *, ordered: bool = False
    ) -> None:
        self._weights: _Told | None = None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._so_far = 0.0
        self._handles: list[Any] = []
        if isinstance(model, DistributedDataParallel):
            self._weights = _registered(model, group, ordered)
        elif group.world_size > 1:
            raise SpecError(
                f"`model`: expected a DistributedDataParallel in a job of {group.world_size} workers, got "
                f"{type(model).__name__}. The exact mean hooks into DDP: use the DDP strategy.",
                name="model",
            )
        else:
            me = weakref.ref(self)
            for optimizer in optimizers:
                self._handles.append(optimizer.register_step_post_hook(lambda *_: _forget(me)))

    def weigh(self, loss: Tensor, weight: float | Callable[[], float], divided_by: float = 1) -> None:
        """Arrange that `loss`'s backward, which comes next, counts with its weight.

        Args:
            loss: scalar mean over a micro-batch, or that mean divided or scaled by the framework.
            weight: samples or tokens behind the mean, >= 0; 0 for none, where the gradient must still be finite.
                Or a function that counts them: what it raises on one worker is raised on all of them, in the
                backward that communicates.
            divided_by: what the framework divides the loss by, to average micro-batches; undone here.

        Raises:
            SpecError: without DDP, a weight that is negative or not finite.
        """
        number = self._number(weight)
        if not loss.requires_grad:
            return  # a backward would fail, and does
        if self._weights is not None:
            self._weights.add(number)
            factor = number * divided_by
        else:
            factor = self._share(number) * divided_by
        if factor != 1.0:
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        """Listen to the optimizers no longer. DDP keeps its comm hook for as long as it lives."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def forget(self) -> None:
        """Begin a new mean, where an update is given up."""
        self._so_far = 0.0
        if self._weights is not None:
            self._weights.reset()

    def _number(self, weight: float | Callable[[], float]) -> float:
        if not callable(weight):
            return float(weight)
        if self._weights is None:
            return float(weight())
        try:
            return float(weight())
        except Exception as error:  # told to all in the exchange, since the others are on their way to it
            self._weights.problem = f"{type(error).__name__}: {error}"
            return float("nan")

    def _share(self, number: float) -> float:
        """Return this micro-batch's share of the mean so far, and make room for it in the gradients."""
        if not 0.0 <= number < float("inf"):
            raise SpecError(
                f"`weight`: expected a finite number >= 0, got {number}. Pass the number of samples or tokens "
                "behind the loss.",
                name="weight",
            )
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        before = self._so_far if gradients else 0.0
        self._so_far = before + number
        if not self._so_far:
            return 0.0
        if before and number:
            with torch.no_grad():
                torch._foreach_mul_(gradients, before / self._so_far)
        return number / self._so_far


def count_samples(batch: Any) -> int:
    """Return how many samples a batch holds: the common first dimension of all its tensors.

    Args:
        batch: a tensor, or tuples, lists and dicts of tensors; other values in them do not count.

    Raises:
        SpecError: no tensor with a dimension, or tensors that differ in it.

    Example:
        >>> count_samples({"inputs": torch.zeros(3, 2), "labels": torch.zeros(3)})
        3
    """
    sizes = sorted(set(_first_dimensions(batch)))
    if len(sizes) != 1:
        got = f"first dimensions {', '.join(map(str, sizes))}" if sizes else f"none in {type(batch).__name__}"
        raise SpecError(
            f"`batch`: expected tensors with one common first dimension, got {got}. Pass a function that counts "
            "the samples or tokens behind the loss of a batch.",
            name="batch",
        )
    return sizes[0]


def _first_dimensions(batch: Any) -> Iterable[int]:
    if isinstance(batch, Tensor):
        if batch.dim():
            yield len(batch)
    elif hasattr(batch, "values") and callable(batch.values):  # dicts, and the dict-likes of tokenizers
        for value in batch.values():
            yield from _first_dimensions(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _first_dimensions(value)


def _registered(model: DistributedDataParallel, group: Group, ordered: bool) -> _Told:
    if model._comm_hooks:
        found = [getattr(hook, "__name__", str(hook)) for hook, _ in model._comm_hooks]
        raise SpecError(
            f"`model`: expected DDP without a comm hook, got {found[0]}. Leave it out: the exact mean is one.",
            name="model",
        )
    weights = _Told(group)
    model.register_comm_hook(weights, hooks.ordered_mean if ordered else hooks.weighted_mean)
    return weights


def _forget(me: weakref.ref[LossWeights]) -> None:
    weights = me()
    if weights is not None:
        weights._so_far = 0.0
