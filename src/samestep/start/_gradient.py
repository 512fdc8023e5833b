"""The way by gradient: one step of plain SGD, through the mean over workers, that lands on the targets.

::

    source:   loss = W x sum (p - t)^2    gradient 2 W (p - t)  ─┐ mean     SGD, lr 0.5
    others:   loss = 0                    gradient 0            ─┴────> 2 (p - t) ────> p - (p - t) = t

For a loop that can only talk through gradients. It is right for every start value that the workers share, up to
the rounding of ``p - (p - t)``. The other workers contribute no gradient at all: were they to pull towards zero,
the result would be ``t - (W - 1) p``. A broadcast is shorter and exact; `initialize` goes that way by default.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep.errors import SpecError
from samestep.group import Group
from samestep.reduce import broadcast_object, ordered_sum
from samestep.start._broadcast import prove
from samestep.start._structure import unwrap
from samestep.start._targets import cast_targets, slots_of

__all__ = ["check_gradient_way", "check_landed", "initialization_loss", "step_to"]

_LR = 0.5


def initialization_loss(
    module: nn.Module, targets: Mapping[str, Tensor] | None, group: Group, *, source_rank: int = 0
) -> Tensor:
    """Return the loss whose gradient, averaged over workers, moves parameters onto targets in one step of SGD(0.5).

    W x sum over targets of ||p - t||^2 on the source rank, and 0 on the others. It touches every trainable
    parameter, with gradient 0 where it has no target, so that DDP finds none unused. Use it as it is: not averaged,
    weighted, accumulated, clipped or scaled, with ``torch.optim.SGD(..., lr=0.5)``; see `check_gradient_way`.

    Args:
        module: DDP and compiled wrappers are looked through, here and in names. Workers hold equal values.
        targets: tensors by parameter name; read on the source rank, may be None elsewhere.
        group: the workers that the gradient is averaged over.
        source_rank: who knows the targets.

    Returns:
        Scalar; float32, or float64 for float64 parameters.

    Raises:
        SpecError: on all workers, when targets do not fit, or are no trainable parameters.

    Collective: all ranks of `group`.
    Numerics: one rounding each of p - t, of the product with W, and of the mean.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> loss = initialization_loss(layer, {"weight": torch.tensor([[3.0, 4.0]])}, Group.single())
        >>> loss.backward()
        >>> torch.optim.SGD(layer.parameters(), lr=0.5).step()
        >>> torch.allclose(layer.weight, torch.tensor([[3.0, 4.0]]))
        True
    """
    inner = unwrap(module)
    fitted = _fitted(inner, targets, group, source_rank)
    trainable = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    wide = torch.float64 if any(p.dtype == torch.float64 for p in trainable.values()) else torch.float32
    # An empty slice: gradient zero whatever the parameter holds, where 0 x NaN would be NaN.
    loss = torch.stack([p.flatten()[:0].sum().to(wide) for p in trainable.values()]).sum()
    for name, target in fitted.items():
        parameter = trainable[name]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        distance = (parameter.to(dtype) - target.to(dtype)).square().sum()
        loss = loss + (group.world_size * distance).to(wide)
    return loss


def check_gradient_way(
    module: nn.Module,
    optimizer: Optimizer,
    group: Group,
    *,
    scaler: object = None,
    clip_norm: float | None = None,
    n_accumulated: int = 1,
) -> None:
    """Return when a step with `initialization_loss` will land on its targets; else raise, with the reason.

    Args:
        module: as it is trained: its DDP wrapper is looked at.
        optimizer: the one that takes the step.
        group: the workers.
        scaler: the GradScaler in use, or None.
        clip_norm: bound on the gradient in use, or None.
        n_accumulated: backward passes per step.

    Raises:
        SpecError: on all workers: another optimizer, momentum, weight decay, another rate, a scaler, clipping,
            accumulation, gradients left over, DDP's comm hooks or ``no_sync``.

    Collective: all ranks of `group`.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> check_gradient_way(layer, torch.optim.SGD(layer.parameters(), lr=0.5), Group.single())
    """
    problem = _optimizer_problem(optimizer) or _loop_problem(scaler, clip_norm, n_accumulated)
    problem = problem or _module_problem(module)
    group.agree(not problem, f"by gradient: {problem} Or initialize by broadcast.", SpecError)


def check_landed(
    module: nn.Module,
    targets: Mapping[str, Tensor] | None,
    before: Mapping[str, Tensor],
    group: Group,
    *,
    source_rank: int = 0,
) -> None:
    """Return when parameters are on their targets up to rounding; else raise, with the likely reason.

    Args:
        module: after the step.
        targets: as for `initialization_loss`.
        before: copies of the parameters from before the step, by name.
        group: the workers.
        source_rank: who knows the targets.

    Raises:
        SpecError: on all workers; says which share of the way was gone, and what usually does that.
        ReplicaMismatchError: on all workers, when their parameters differ.

    Collective: all ranks of `group`.
    """
    inner = unwrap(module)
    slots = slots_of(inner)
    fitted = _fitted(inner, targets, group, source_rank)
    problem = next(
        (f"`before`: expected a copy of `{name}`, got none." for name in fitted if name not in before), ""
    )
    for name, target in fitted.items():
        problem = problem or _missed(name, before[name], target, slots[name].detach())
    group.agree(not problem, problem, SpecError)
    names = broadcast_object(list(fitted), group, source_rank)
    prove([{name: slots[name] for name in names}], group)


def step_to(
    module: nn.Module,
    targets: Mapping[str, Tensor],
    group: Group,
    optimizer: Optimizer | None,
    source_rank: int,
) -> dict[str, Tensor]:
    """Take the step with the mean over workers, and return the parameters that it moved, by name.

    Other parameters stay as they are.
    """
    slots = slots_of(module)
    names = broadcast_object(list(targets), group, source_rank)
    loss = initialization_loss(module, targets, group, source_rank=source_rank)
    moved = {name: slots[name] for name in names}
    prove(
        [moved], group, advice="The way by gradient needs replicas that agree: call start.broadcast before."
    )
    before = {name: tensor.detach().clone() for name, tensor in moved.items()}
    gradients = torch.autograd.grad(loss, list(moved.values()))
    kept = [tensor.grad for tensor in moved.values()]
    for parameter, gradient in zip(moved.values(), gradients, strict=True):
        parameter.grad = ordered_sum(gradient, group) / group.world_size
    (optimizer or torch.optim.SGD(list(moved.values()), lr=_LR)).step()
    for parameter, former in zip(moved.values(), kept, strict=True):
        parameter.grad = former
    check_landed(module, targets, before, group, source_rank=source_rank)
    return moved


def _fitted(
    module: nn.Module, targets: Mapping[str, Tensor] | None, group: Group, source_rank: int
) -> dict[str, Tensor]:
    """Return the checked targets by the parameters' first names on the source rank, and none on the others."""
    found: dict[str, Tensor] = {}
    problem = ""
    if group.rank == source_rank:
        try:
            found = _trainable(cast_targets(targets, slots_of(module)), module)
        except SpecError as error:
            problem = str(error)
    group.agree(not problem, problem, SpecError)
    return found


def _trainable(targets: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return the targets under the parameters' first names; refuse what no gradient reaches."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    firsts = {id(p): name for name, p in module.named_parameters()}
    for name in targets:
        tensor = parameters.get(name)
        if tensor is None or not tensor.requires_grad or tensor.is_complex():
            kind = (
                "a buffer"
                if tensor is None
                else f"one with requires_grad={tensor.requires_grad}, {tensor.dtype}"
            )
            raise SpecError(
                f"`{name}`: expected a trainable real parameter, got {kind}. No gradient sets it. "
                "Initialize by broadcast.",
                name=name,
            )
    return {firsts[id(parameters[name])]: target for name, target in targets.items()}


def _optimizer_problem(optimizer: Optimizer) -> str:
    if type(optimizer) is not torch.optim.SGD:
        return (
            f"`optimizer`: expected torch.optim.SGD with lr={_LR}, got {type(optimizer).__name__}, which does not "
            f"move by lr x gradient. Pass torch.optim.SGD(parameters, lr={_LR})."
        )
    wanted = {"lr": _LR, "momentum": 0, "weight_decay": 0, "nesterov": False, "maximize": False}
    for group in optimizer.param_groups:
        for key, value in wanted.items():
            if float(group[key]) != float(value):
                got = float(group[key])
                return f"`optimizer`: expected {key}={value}, got {got}. Make a plain SGD for this step."
    return ""


def _loop_problem(scaler: object, clip_norm: float | None, n_accumulated: int) -> str:
    is_enabled = getattr(scaler, "is_enabled", None)
    if scaler is not None and (is_enabled is None or is_enabled()):
        return (
            "`scaler`: expected none, got a GradScaler, which multiplies the step. Leave it out of this step."
        )
    if clip_norm is not None:
        return f"`clip_norm`: expected none, got {clip_norm}, which shortens the step. Switch it off for this step."
    if n_accumulated != 1:
        return f"`n_accumulated`: expected 1 backward pass, got {n_accumulated}, which multiply the step. Take one."
    return ""


def _module_problem(module: nn.Module) -> str:
    ddp = module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
    if isinstance(ddp, DistributedDataParallel):
        if ddp._comm_hooks:
            names = [getattr(hook, "__name__", str(hook)) for hook, _ in ddp._comm_hooks]
            return f"`module`: expected DDP's own mean, got comm hook {names[0]}. Register it afterwards."
        if not ddp.require_backward_grad_sync:
            return "`module`: expected a synchronised backward, got one under no_sync. Leave that block."
    for name, parameter in unwrap(module).named_parameters():
        if parameter.grad is not None and bool(parameter.grad.any()):
            return (
                f"`{name}`: expected no gradient before the step, got one. Call optimizer.zero_grad() first."
            )
    return ""


def _missed(name: str, before: Tensor, target: Tensor, after: Tensor) -> str:
    """Return what went wrong when `after` is not `target` up to rounding; empty when it is."""
    wide = torch.float64
    p, t, got = before.to(wide), target.to(wide), after.to(wide)
    # Rounding: of p - t, x W, / W and the update; each at most eps/2 of the larger operand.
    bound = 4 * torch.finfo(after.dtype).eps * (p.abs() + t.abs()) + torch.finfo(after.dtype).tiny
    off = ~((got - t).abs() <= bound)
    if not bool(off.any()):
        return ""
    share = float(((got - p) * (t - p)).sum() / (t - p).square().sum())
    n = target.numel()
    why = "another optimizer, clipping or a compression hook changes it"
    if share != share or share in (float("inf"), float("-inf")):
        why = "the gradient left the range of its dtype"
    elif share == 0:
        why = "the optimizer does not hold it"
    elif abs(share * n - 1) < 0.01 and n > 1:
        why = "the loss was averaged over elements, not summed"
    elif share > 1.5 and abs(share - round(share)) < 0.01:
        why = "the loss was scaled, or gradients were accumulated"
    return (
        f"`{name}`: expected the target after the step, got {int(off.sum())} of {n} elements off; the step went "
        f"{share:.6g} of the way: {why}. Initialize by broadcast."
    )
