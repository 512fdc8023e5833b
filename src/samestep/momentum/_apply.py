"""Move the momentum history of an optimizer when its learning rates change."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.momentum._forms import Form, group_form
from samestep.momentum._policies import free

__all__ = ["apply", "check_pair", "rescale"]

_log = logging.getLogger("samestep.momentum")
_FREE = free()


def apply(
    optimizer: torch.optim.Optimizer,
    policy: Callable[[float, float], float],
    old_lrs: Sequence[float],
    new_lrs: Sequence[float],
) -> list[float]:
    """Treat the history as the recipe says, in place, and return the factor on the velocity form per param group.

    Call it before the update that uses the new rates. A buffer that carries the rate to the power e is multiplied
    by ``factor * (old/new) ** (1 - e)``: by the factor alone in velocity form, by factor times old/new in gradient
    form. Each param group goes by its own two rates. Only parameters that are trained and have history are
    touched; tensors are multiplied together on their device, without a host sync.

    A rate of 0: from 0 the factor is 1, to 0 it is the policy's (0, which clears a velocity-form history, or 1). In
    gradient form, `free` never touches anything. The other policies reproduce the velocity form: a history that
    passed an update at rate 0 is cleared when the rate rises again; a policy that leaves the history alone on the
    way to 0 moves the weights at rate 0, which the gradient form cannot express: an error.

    Args:
        optimizer: of a known form.
        policy: one of the five, or any ``policy(old_lr, new_lr) -> factor``.
        old_lrs: rate of the last applied update, one per param group.
        new_lrs: rate of the update to come, one per param group.

    Returns:
        One factor per param group, 1.0 for none, whatever form the optimizer keeps.

    Raises:
        SpecError: when the optimizer cannot follow; nothing has been changed then.
        ValueError: when the number of rates is not the number of param groups, or a rate is negative or not finite.

    Numerics: one multiplication per element, in the dtype of the buffer.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
        >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(1)
        >>> apply(optimizer, lambda old, new: 1.0, [0.5], [0.25])
        [1.0]
        >>> optimizer.state[weight]["momentum_buffer"].item()
        2.0
    """
    n_groups = len(optimizer.param_groups)
    if not len(old_lrs) == len(new_lrs) == n_groups:
        raise ValueError(
            f"`old_lrs`, `new_lrs`: expected {n_groups} rates each, one per param group, got {len(old_lrs)} and "
            f"{len(new_lrs)}."
        )
    factors = [policy(old, new) for old, new in zip(old_lrs, new_lrs, strict=True)]
    work: dict[float, list[Tensor]] = {}
    changed = [
        index for index in range(n_groups) if old_lrs[index] != new_lrs[index] or factors[index] != 1.0
    ]
    for index in changed:
        found = group_form(optimizer, index)
        _check_policy(optimizer, found, policy)
        for key, exponent in found.buffers:
            multiplier = _multiplier(policy, factors[index], old_lrs[index], new_lrs[index], exponent)
            if multiplier != 1.0:
                work.setdefault(multiplier, []).extend(_history(optimizer, index, key))
    for multiplier, tensors in work.items():
        _multiply(tensors, multiplier)
    for index in changed:
        _finish(optimizer, index, old_lrs[index], new_lrs[index], factors[index], policy)
    return factors


def rescale(optimizer: torch.optim.Optimizer, ratio: float) -> None:
    """Multiply the momentum history of every param group by `ratio`, in place.

    The raw operation, for people who keep their own policy: no rate is read and none is changed.

    Args:
        optimizer: of a known form.
        ratio: finite, >= 0; 0 clears the history.

    Raises:
        SpecError: when the optimizer has no history that can be rescaled.
        ValueError: when `ratio` is negative or not finite.

    Numerics: one multiplication per element, in the dtype of the buffer.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
        >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(1)
        >>> rescale(optimizer, 0.25)
        >>> optimizer.state[weight]["momentum_buffer"].item()
        0.25
    """
    if not (math.isfinite(ratio) and ratio >= 0.0):
        raise ValueError(f"`ratio`: expected a finite number >= 0, got {ratio!r}.")
    tensors: list[Tensor] = []
    for index in range(len(optimizer.param_groups)):
        found = group_form(optimizer, index)
        if not found.buffers:
            reason = found.reason or "it keeps no momentum history, only statistics"
            raise SpecError(f"`optimizer`: {type(optimizer).__name__} cannot be rescaled: {reason}.")
        for key, _ in found.buffers:
            tensors.extend(_history(optimizer, index, key))
    _multiply(tensors, ratio)


def check_pair(
    optimizer: torch.optim.Optimizer,
    schedule_is_constant: bool,
    *,
    schedule_decays: bool | None = None,
    policy: Callable[[float, float], float] | None = None,
) -> None:
    """Refuse a pair of optimizer and schedule that makes no sense.

    Args:
        optimizer: of a known form.
        schedule_is_constant: whether the schedule never changes the rate.
        schedule_decays: whether it ever lowers the rate; None counts every schedule that changes as one that does.
        policy: also refuse a momentum policy that this optimizer cannot follow.

    Raises:
        SpecError: with the reason, or when the class is unknown.

    Example:
        >>> check_pair(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), False)
    """
    for index in range(len(optimizer.param_groups)):
        found = group_form(optimizer, index)
        if policy is not None:
            _check_policy(optimizer, found, policy)
        decays = not schedule_is_constant if schedule_decays is None else schedule_decays
        refused = {"never": False, "decay": decays, "schedule": not schedule_is_constant}[found.refuses]
        if refused:
            allowed = "constant, or a warm-up only" if found.refuses == "decay" else "constant"
            name = type(optimizer).__name__
            raise SpecError(
                f"`schedule`: expected a schedule that is {allowed} for {name}, got one that is not. {name}: "
                f"{found.reason}. Use a constant rate or another optimizer.",
                name=name,
            )


def _check_policy(
    optimizer: torch.optim.Optimizer, found: Form, policy: Callable[[float, float], float]
) -> None:
    if policy == _FREE or (found.kind in ("gradient", "velocity") and found.buffers):
        return
    reason = found.reason or "its history holds normalised statistics without a learning rate"
    raise SpecError(
        f"`momentum`: expected the policy free() for {type(optimizer).__name__}, got {policy!r}. No other has a "
        f"meaning: {reason}.",
        name=type(optimizer).__name__,
    )


def _multiplier(
    policy: Callable[[float, float], float], factor: float, old_lr: float, new_lr: float, exponent: int
) -> float:
    """Return what a buffer that carries the rate to the power `exponent` is multiplied by."""
    if exponent == 1:
        return factor
    if policy == _FREE:
        # Not factor * old/new, so that a plain gradient form stays untouched to the last bit, also at rate 0.
        return 1.0 if exponent == 0 or not old_lr or not new_lr else (new_lr / old_lr) ** exponent
    if new_lr == 0.0:
        if factor != 0.0 and old_lr != 0.0:
            raise SpecError(
                f"`momentum`: expected a policy that clears the history on the way from {old_lr!r} to a rate of 0, "
                f"got {policy!r}. The gradient form cannot move weights at rate 0: use VelocitySGD.",
                name="momentum",
            )
        return 1.0
    quotient = new_lr / old_lr if old_lr else math.inf
    return 1.0 if exponent == 0 and factor == quotient else factor * (old_lr / new_lr) ** (1 - exponent)


def _history(optimizer: torch.optim.Optimizer, index: int, key: str) -> list[Tensor]:
    found: list[Tensor] = []
    for param in optimizer.param_groups[index]["params"]:
        value = optimizer.state.get(param, {}).get(key) if param.requires_grad else None
        if isinstance(value, dict):  # one buffer per momentum factor (AggMo)
            found.extend(value.values())
        elif value is not None:
            found.append(value)
    return found


def _multiply(tensors: list[Tensor], multiplier: float) -> None:
    if not tensors:
        return
    with torch.no_grad():
        if multiplier == 0.0:
            torch._foreach_zero_(tensors)  # 0 times an overflowed history would be NaN
        else:
            torch._foreach_mul_(tensors, multiplier)


def _finish(
    optimizer: torch.optim.Optimizer,
    index: int,
    old_lr: float,
    new_lr: float,
    factor: float,
    policy: Callable[[float, float], float],
) -> None:
    found = group_form(optimizer, index)
    if found.also is not None:
        found.also(optimizer, index, old_lr, new_lr)
    # Under `free`, a gradient form is corrected at every change by what it is: nothing is done and nothing is said.
    if factor != 1.0 and (found.kind == "velocity" or policy != _FREE):
        _log.info(
            "momentum correction in param group %d: learning rate %.9g -> %.9g, history x %.9g",
            index,
            old_lr,
            new_lr,
            factor,
        )
