"""The function by which this project began, under its own name: initial values through one optimizer step.

What the original does: the loss of rank 0, the squared distance of the parameters from their targets, is
multiplied by the number of workers, DDP takes the mean over workers, and a fresh SGD with LR 0.5 lands on the
targets. That holds for parameters that are zero, a power-of-two number of workers and a plain sum of squares. Here:

::

    rank 0      gradient of its loss     2 (p - t)  ──broadcast──>  SGD, lr 0.5:  p - (p - t) = t
    others      no gradient at all, whatever their loss

which holds for any parameters that the workers share and any number of workers. What still breaks it is refused.
`start.initialize` and `SamestepCallback(initialize=...)` are the better way: all workers' data, exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from samestep import start
from samestep.bulk import broadcast_tensors
from samestep.errors import AgreementError, SpecError
from samestep.group import Group
from samestep.lightning._workers import group_of
from samestep.reduce import broadcast_object, gather_parts

__all__ = ["scale_loss_by_world_size_for_initialization_training_loop"]

_NEITHER = 2


def scale_loss_by_world_size_for_initialization_training_loop(
    model: LightningModule,
    loss: Tensor,
    world_size: int,
    is_initialized: bool = True,
    initalization_optimizer_lr: float = 0.5,
    initalization_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> None:
    """Take the optimizer step of a LightningModule with manual optimization, or set its initial values by one.

    A drop-in for the function of this name in GRID.

    Not initialized: parameters in the graph of rank 0's `loss` land on their targets, on all workers; `loss` is
    the plain sum of squares ||p - t||^2, unweighted. Other workers' losses do not count. It goes round DDP, so that
    comm hooks, a GradScaler and the module's own optimizer play no part.

    Initialized: zero_grad, manual_backward and step of the module's optimizer, then a step of its LR schedulers,
    which Lightning leaves to the module and the original forgot; those by epoch on an epoch's last batch.

    Args:
        model: with ``automatic_optimization = False``, inside ``training_step``.
        loss: scalar.
        world_size: number of workers; read as a check.
        is_initialized: the same on all workers.
        initalization_optimizer_lr: 0.5; spelled as in the original.
        initalization_optimizer: ``torch.optim.SGD``; spelled as in the original.

    Raises:
        SpecError: on all workers, with the reason: automatic optimization, another optimizer or rate, a loss that
            is averaged, weighted or no sum of squares, or not finite; a wrong `world_size`; several optimizers.
        AgreementError: on all workers, when they do not agree on `is_initialized`.

    Collective: all workers; one small exchange per call.
    Numerics: bit-exact from p = 0; else up to the rounding of p - (p - t). Independent of the number of workers.

    Reference: snap-research/GRID, ``src/components/training_loop_functions.py``.
    """
    trainer: Trainer = model.trainer
    group = group_of(trainer)
    _agree_on_phase(_misuse(model, loss, world_size, group), bool(is_initialized), group)
    if is_initialized:
        _ordinary_step(model, loss, trainer)
    else:
        _initial_step(model, loss, group, initalization_optimizer_lr, initalization_optimizer)


def _agree_on_phase(problem: str, is_initialized: bool, group: Group) -> None:
    mine = torch.tensor([_NEITHER if problem else int(is_initialized)])
    phases = [int(part) for part in gather_parts(mine, group)]
    if _NEITHER in phases:
        group.agree(not problem, problem, SpecError)
    if len(set(phases)) > 1:
        done = [rank for rank, phase in enumerate(phases) if phase]
        raise AgreementError(
            f"`is_initialized`: expected the same on all {group.world_size} workers, got True on ranks {done} "
            "only. Decide it from what all workers know, such as the buffer of start.mark.",
            rank=phases.index(0 if phases[0] else 1),
            name="is_initialized",
        )


def _misuse(model: LightningModule, loss: Tensor, world_size: int, group: Group) -> str:
    if model.automatic_optimization:
        return (
            "`model`: expected manual optimization, got automatic_optimization=True, with which Lightning takes a "
            "step of its own. Set self.automatic_optimization = False."
        )
    if world_size != group.world_size:
        return f"`world_size`: expected the {group.world_size} workers of this trainer, got {world_size}."
    if isinstance(model.optimizers(), list):
        return (
            "`model`: expected one optimizer, got several. Step them yourself, and use start.initialize for "
            "initial values."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return f"`loss`: expected a scalar tensor, got {getattr(loss, 'shape', type(loss).__name__)}."
    return ""


def _ordinary_step(model: LightningModule, loss: Tensor, trainer: Trainer) -> None:
    optimizer: Any = model.optimizers()
    optimizer.zero_grad()
    model.manual_backward(loss)
    optimizer.step()
    for config in trainer.lr_scheduler_configs:
        by_step = config.interval == "step" and trainer.global_step % config.frequency == 0
        by_epoch = config.interval == "epoch" and trainer.is_last_batch
        if by_epoch:
            by_epoch = (trainer.current_epoch + 1) % config.frequency == 0
        if (
            by_step or by_epoch
        ) and not config.reduce_on_plateau:  # a plateau needs a metric, which we have not
            model.lr_scheduler_step(config.scheduler, None)


def _initial_step(
    model: LightningModule, loss: Tensor, group: Group, lr: float, make_optimizer: Callable[..., Any]
) -> None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = make_optimizer(trainable, lr=lr)
    optimizer.zero_grad()
    start.check_gradient_way(model, optimizer, group)
    gradients: list[Tensor | None] = []
    problem = ""
    if group.is_main:
        gradients, problem = _gradients(loss, trainable)
    group.agree(not problem, problem, SpecError)
    reached = broadcast_object([gradient is not None for gradient in gradients], group)
    moved = [parameter for parameter, is_reached in zip(trainable, reached, strict=True) if is_reached]
    mine = [gradient for gradient in gradients if gradient is not None]
    sent = mine if group.is_main else [torch.empty_like(parameter) for parameter in moved]
    broadcast_tensors(sent, group, 0)
    for parameter, gradient in zip(moved, sent, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def _gradients(loss: Tensor, trainable: list[Tensor]) -> tuple[list[Tensor | None], str]:
    """Return rank 0's gradients by parameter, None where the loss does not reach, and what is wrong with the loss.

    For a plain sum of squares the gradient is 2 (p - t), so that ||gradient||^2 / 4 is the loss itself.
    """
    if not loss.requires_grad:
        return [], "`loss`: expected one that reaches a trainable parameter, got one without a gradient."
    if not bool(torch.isfinite(loss)):
        return [], f"`loss`: expected a finite distance from the targets, got {float(loss)}."
    found = list(torch.autograd.grad(loss, trainable, allow_unused=True))
    gradients: list[Tensor | None] = [None if g is None else g.contiguous() for g in found]
    squares = sum(float(g.double().square().sum()) for g in gradients if g is not None) / 4
    value = float(loss.detach().double())
    low = any(
        t.dtype in (torch.float16, torch.bfloat16) for t in (loss, *(g for g in gradients if g is not None))
    )
    if abs(squares - value) <= (5e-2 if low else 1e-3) * max(squares, abs(value)):
        return gradients, ""
    factor = squares / value if value else float("inf")
    return [], (
        f"`loss`: expected the sum of squares ||p - t||^2, got one whose gradient is {factor:.6g} x that of such a "
        "sum: a mean over elements, a weight other than 1, or further terms. The step would miss the targets: "
        "return the plain sum, or use start.initialize."
    )
