"""What a user hands over: the phases of one training step, of which most are the ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import SpecError
from samestep.explain import _rows
from samestep.group import Group
from samestep.step import TrainStep

__all__ = ["Program", "by_train_step", "count_of", "opened", "scalar"]


@dataclass
class Program:
    """One training step, cut where `explain` looks: samples, gradients, clipping, update.

    ``build`` is called in every worker, under its process group, and once in a process of its own, under a
    process group of one; so it may wrap the model in DDP. What is left as None is the ordinary thing. The
    reference is always the ordinary step on the whole global batch: ``loss_fn(model, batch).backward()``, `clip`,
    ``optimizer.step()``.

    Attributes:
        model: plain, or wrapped in DDP (with comm hooks or without).
        optimizer: over the model's parameters.
        loss_fn: ``loss_fn(model, batch) -> loss``, the scalar whose gradient is wanted, as for one worker. It may
            return ``(loss_sum, count)``; the reference then takes the quotient.
        gradients: ``gradients(model, loss_fn, part)`` leaves the global batch's mean gradient in ``.grad``;
            ordinarily ``loss_fn(model, part).backward()``. It must call the `loss_fn` that it is given.
        clip: ``clip(parameters)`` changes the mean gradient before the update; ordinarily nothing.
        split: ``split(batch, rank, world_size) -> part``; ordinarily consecutive rows, as even as can be.
        train_step: ``train_step(model, optimizer, loss_fn, part)``, the whole step in one, in place of
            `gradients`; its gradient is then looked at where it enters the optimizer, so that a fault which
            clipping hides is not seen.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[nn.Module, Any], Any]
    gradients: Callable[[nn.Module, Callable[..., Any], Any], Any] | None = None
    clip: Callable[[list[nn.Parameter]], Any] | None = None
    split: Callable[[Any, int, int], Any] | None = None
    train_step: Callable[[nn.Module, torch.optim.Optimizer, Callable[..., Any], Any], Any] | None = None

    @property
    def bare(self) -> nn.Module:
        """The model without its DDP wrapper, so that names are those of one worker."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def part(self, batch: Any, rank: int, world_size: int, ordinary: bool = False) -> Any:
        """Return a rank's samples, by the program's own rule or by the ordinary one."""
        if self.split is not None and not ordinary:
            return self.split(batch, rank, world_size)
        n_rows = _rows.count(batch)
        size, longer = divmod(n_rows, world_size)
        start = rank * size + min(rank, longer)
        return _rows.take(batch, range(start, start + size + (rank < longer)))

    def run_gradients(self, loss_fn: Callable[..., Any], part: Any) -> None:
        """Leave the mean gradient of the global batch in ``.grad``, in the program's way."""
        if self.gradients is not None:
            self.gradients(self.model, loss_fn, part)
        else:
            torch.autograd.backward(scalar(loss_fn(self.model, part), "the part of one worker"))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters, by name in registration order."""
        return {name: p for name, p in self.bare.named_parameters() if p.requires_grad}


def by_train_step(
    **settings: Any,
) -> Callable[[nn.Module, torch.optim.Optimizer, Callable[..., Any], Any], Any]:
    """Return a `Program.train_step` that is one step of samestep's own `TrainStep`, one shard per worker.

    Args:
        **settings: of `TrainStep`, without model, optimizer, group and shards.

    Example:
        >>> by_train_step(clip_norm=1.0).__name__
        'train_step'
    """

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, part: Any) -> None:
        group = Group.from_env("cuda" if _rows.on_cuda(part) else "cpu", threads=None)
        step = TrainStep(model, optimizer, group=group, shards=group.world_size, **settings)
        step.train_step([part], loss_fn)

    return train_step


def count_of(returned: Any) -> float:
    """Return the count in ``(loss_sum, count)``, 1 for a plain loss."""
    return float(returned[1]) if isinstance(returned, tuple) and len(returned) >= 2 else 1.0


def scalar(returned: Any, what: str, quotient: bool = False) -> Tensor:
    """Return the loss to differentiate; sum over count where a loss function gives both and `quotient` is set."""
    if quotient:
        returned = returned[0] / count_of(returned) if isinstance(returned, tuple) and returned else returned
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        got = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        raise SpecError(
            f"`loss_fn`: expected a scalar tensor for {what}, got {got}. Return the loss whose gradient is wanted, "
            "or give Program(gradients=...) or Program(train_step=...) that knows what to do with it.",
            name="loss_fn",
        )
    return returned.reshape(())


def opened(built: Any) -> Program:
    """Return what ``build()`` gave as a `Program`.

    Args:
        built: a `Program`, or (model, optimizer, loss_fn).

    Raises:
        SpecError: when it is neither, or its phases exclude each other.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opened((model, sgd, lambda model, batch: model(batch).mean())).clip is None
        True
    """
    if isinstance(built, tuple) and len(built) == 3:
        built = Program(*built)
    if not isinstance(built, Program):
        raise SpecError(
            f"`build`: expected (model, optimizer, loss_fn) or an explain.Program, got {type(built).__name__}. "
            "Return one of them.",
            name="build",
        )
    if built.train_step is not None and built.gradients is not None:
        raise SpecError(
            "`build`: expected one of `gradients` and `train_step`, got both. Leave one out.", name="build"
        )
    return built
