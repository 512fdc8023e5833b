"""The momentum update of Caffe2 as a torch optimizer: the learning rate is inside the history."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from samestep.errors import SpecError

__all__ = ["VelocitySGD"]


class VelocitySGD(torch.optim.Optimizer):
    """SGD in velocity form, ``V = mu V + lr g; w -= V``, with Nesterov ``w -= (1 + mu) V_new - mu V_old``.

    This is what Caffe2 trainers run. Weight decay is added to the gradient before anything else, V starts at 0
    and there is no dampening. When the rate changes, V still holds the old one: a momentum policy (see
    `momentum.apply`) says what happens to it. All tensors of a group are updated together, on their device.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, >= 0.
        momentum: mu, in [0, 1).
        weight_decay: added to the gradient as ``weight_decay * w``, >= 0.
        nesterov: look ahead by one step; needs a momentum above 0.

    Raises:
        ValueError: when a number is out of its range or not finite.

    Numerics: elementwise, in the dtype of the parameter; equal on any number of workers for equal gradients.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        >>> optimizer = VelocitySGD([weight], lr=0.5, momentum=0.5)
        >>> for _ in range(2):
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        >>> weight.item()  # V is 0.5, then 0.75
        -1.25

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, equation 10; caffe2/sgd/momentum_sgd_op.h.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, after a check of its settings.

        Raises:
            ValueError: when a number is out of its range or not finite.
        """
        settings = {**self.defaults, **param_group}
        for key in ("lr", "weight_decay"):
            if not (math.isfinite(settings[key]) and settings[key] >= 0.0):
                raise ValueError(f"`{key}`: expected a finite number >= 0, got {settings[key]!r}.")
        if not 0.0 <= settings["momentum"] < 1.0:
            raise ValueError(f"`momentum`: expected 0 <= momentum < 1, got {settings['momentum']!r}.")
        if settings["nesterov"] and settings["momentum"] == 0.0:
            raise ValueError(
                "`nesterov`: expected a momentum above 0 with it, got 0.0. Give one or turn it off."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one update with the current rate of every group; return the loss of `closure`, if given.

        Raises:
            SpecError: when a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [cast(Tensor, param.grad) for param in params]
        if any(grad.is_sparse for grad in grads):
            raise SpecError("`grad`: expected dense gradients, got a sparse one. Turn off sparse embeddings.")
        lr, momentum = group["lr"], group["momentum"]
        if group["weight_decay"] != 0.0:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        if momentum == 0.0:
            torch._foreach_add_(params, grads, alpha=-lr)
            return
        history = [self._velocity(param) for param in params]
        torch._foreach_mul_(history, momentum)
        torch._foreach_add_(history, grads, alpha=lr)
        if group["nesterov"]:
            # (1 + mu) V_new - mu V_old is lr g + mu V_new.
            torch._foreach_add_(params, history, alpha=-momentum)
            torch._foreach_add_(params, grads, alpha=-lr)
        else:
            torch._foreach_sub_(params, history)

    def _velocity(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return cast(Tensor, state["momentum_buffer"])

    @classmethod
    def from_sgd(cls, optimizer: torch.optim.SGD) -> VelocitySGD:
        """Return the velocity form of a torch SGD: the same parameters and settings, ``V = lr * momentum_buffer``.

        Each group's own current rate is used, so call this before the rate of the next update is set.

        Args:
            optimizer: with dampening 0, and neither `maximize` nor `differentiable`.

        Raises:
            SpecError: when a setting has no counterpart in the velocity form.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> sgd = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
            >>> sgd.state[weight]["momentum_buffer"] = torch.ones(1)
            >>> VelocitySGD.from_sgd(sgd).state[weight]["momentum_buffer"].item()
            0.5
        """
        for group in optimizer.param_groups:
            for key in ("dampening", "maximize", "differentiable"):
                if group.get(key):
                    raise SpecError(
                        f"`{key}`: expected {type(group[key])(0)!r} in every group, got {group[key]!r}. "
                        "The velocity form has no counterpart for it.",
                        name=key,
                    )
        keys = ("params", "lr", "momentum", "weight_decay", "nesterov")
        groups = [{key: group[key] for key in keys} for group in optimizer.param_groups]
        for group in groups:
            group["lr"] = float(group["lr"])
        result = cls(groups)
        _carry_over(optimizer, result, [float(group["lr"]) for group in groups])
        return result

    def to_sgd(self) -> torch.optim.SGD:
        """Return the gradient form: a torch SGD with ``momentum_buffer = V / lr``, by each group's own rate.

        The rate must be the one that the last update used.

        Raises:
            SpecError: when a group with history has a rate of 0, where the quotient does not exist.

        Example:
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> optimizer = VelocitySGD([weight], lr=0.5, momentum=0.5)
            >>> optimizer.state[weight]["momentum_buffer"] = torch.ones(1)
            >>> optimizer.to_sgd().state[weight]["momentum_buffer"].item()
            2.0
        """
        factors = []
        for index, group in enumerate(self.param_groups):
            lr = float(group["lr"])
            if lr == 0.0 and _has_history(self, group["params"]):
                raise SpecError(
                    f"`lr`: expected a rate above 0 in param group {index}, which has history, got 0.0. Convert "
                    "before the rate reaches 0, or stay with VelocitySGD.",
                    name="lr",
                )
            factors.append(1.0 / lr if lr else 1.0)
        keys = ("params", "lr", "momentum", "weight_decay", "nesterov")
        result = torch.optim.SGD([{key: group[key] for key in keys} for group in self.param_groups], lr=1e-3)
        _carry_over(self, result, factors)
        return result


def _carry_over(
    source: torch.optim.Optimizer, target: torch.optim.Optimizer, factors: Iterable[float]
) -> None:
    for group, factor in zip(source.param_groups, factors, strict=True):
        for param in group["params"]:
            buffer = source.state.get(param, {}).get("momentum_buffer")
            if buffer is not None:
                target.state[param]["momentum_buffer"] = buffer * factor


def _has_history(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> bool:
    return any(optimizer.state.get(param, {}).get("momentum_buffer") is not None for param in params)
