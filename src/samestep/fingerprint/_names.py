"""One naming of parameters, buffers, optimizer state and options, for audits, broadcasts and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["named_state", "named_tensors", "named_values"]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters, then its buffers, by name, in registration order.

    These are the names that audits, broadcasts and checkpoints use. Non-persistent buffers are included: a replica
    that differs there computes something else. A tensor that is shared stands once, under its first name.

    Args:
        module: any module; a DDP wrapper gives names that begin with ``module.``, so pass what it wraps.

    Returns:
        The tensors themselves, not copies.

    Example:
        >>> from torch import nn
        >>> list(named_tensors(nn.Linear(3, 2)))
        ['weight', 'bias']
    """
    return dict([*module.named_parameters(), *module.named_buffers()])


def named_state(
    optimizer: Optimizer, param_names: Mapping[str, Tensor] | nn.Module | None = None
) -> dict[str, Tensor]:
    """Return an optimizer's state and options as tensors, under stable names, in registration order.

    State is named ``state.<parameter>.<key>``; the options of each param group (learning rate, betas, weight decay,
    flags) ``options.<group index>.<key>``; the names of its parameters ``options.<group index>.params``. Options
    become tensors by `named_values`.

    Args:
        optimizer: any torch optimizer. State that its first step creates is absent before that.
        param_names: what the parameters are called, or the module that owns them; None calls them
            ``<group index>.<index in the group>``. Parameters without a name there are called so too.

    Returns:
        State tensors themselves, and small new CPU tensors for what is not a tensor.

    Raises:
        TypeError: when a state or option value has no stable digest.

    Example:
        >>> from torch import nn, optim
        >>> linear = nn.Linear(3, 2, bias=False)
        >>> found = named_state(optim.SGD(linear.parameters(), lr=0.5), linear)
        >>> found["options.0.lr"].item()
        0.5
    """
    if isinstance(param_names, nn.Module):
        param_names = dict(param_names.named_parameters())
    names = {id(parameter): name for name, parameter in (param_names or {}).items()}
    found: dict[str, Tensor] = {}
    options: dict[str, Tensor] = {}
    for g, group in enumerate(optimizer.param_groups):
        members = [names.get(id(parameter), f"{g}.{i}") for i, parameter in enumerate(group["params"])]
        for name, parameter in zip(members, group["params"], strict=True):
            if kept := optimizer.state.get(parameter):
                found.update(named_values(kept, f"state.{name}"))
        # torch keeps its own list of names in a group only when the caller gave names; `members` says it already.
        plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        options.update(named_values({**plain, "params": members}, f"options.{g}"))
    return found | options


def named_values(value: object, name: str) -> dict[str, Tensor]:
    """Return a nested value as tensors by name, so that it can be compared like one.

    Args:
        value: a tensor, bool, int, float, complex, str, bytes or None, or mappings and sequences of such.
        name: of the whole; parts are called ``<name>.<key>`` and ``<name>.<index>``.

    Returns:
        A tensor itself; a float as float64, an int as int64 (or its decimal digits, when wider), text as its
        UTF-8 bytes, None and an empty collection as an empty bool tensor of shape (0,) and (0, 0).

    Raises:
        TypeError: when a part is of another type; the message names it.

    Example:
        >>> list(named_values({"lr": 0.1, "betas": (0.9, 0.999)}, "adam"))
        ['adam.lr', 'adam.betas.0', 'adam.betas.1']
    """
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        found: dict[str, Tensor] = {}
        for key, part in pairs:
            found.update(named_values(part, f"{name}.{key}"))
        return found or {name: torch.empty(0, 0, dtype=torch.bool)}
    return {name: value if isinstance(value, Tensor) else _encoded(value, name)}


def _encoded(value: object, name: str) -> Tensor:
    if value is None:
        return torch.empty(0, dtype=torch.bool)
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return torch.tensor(value, dtype=torch.int64)
        value = str(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, complex):
        return torch.tensor(value, dtype=torch.complex128)
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return torch.tensor(list(raw), dtype=torch.uint8)
    raise TypeError(
        f"`{name}`: expected a tensor, a number, text, None or collections of such, got {type(value).__name__}. "
        "Leave it out, or pass what identifies it."
    )
