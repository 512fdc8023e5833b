"""Which optimizers keep the learning rate in their history, and to which power.

A buffer has an *exponent*: 0 when it holds gradients only (torch SGD), 1 when it holds rate times gradient
(Caffe2, timm RMSpropTF), -1 when it holds gradient over rate. The table is by class for torch and for registered
classes, and by package and class name for the rest, so that none of those packages is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from samestep.errors import SpecError

__all__ = ["Action", "Form", "Kind", "form", "group_form", "register"]

Kind = Literal["gradient", "velocity", "statistics", "unsafe"]
Action = Callable[[torch.optim.Optimizer, int, float, float], None]
Group = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How an optimizer keeps its history.

    `kind` is "gradient" (no rate in the history), "velocity" (the rate, or a power of it, is in it), "statistics"
    (only normalised gradient statistics: no policy but `free` means anything) or "unsafe" (cannot be rescaled; the
    reason says why). `buffers` lists (state key, exponent of the rate). `refuses` says which schedules make no
    sense: "never", "decay" or "schedule". `also` is what else must move when the rate does.
    """

    kind: Kind
    buffers: tuple[tuple[str, int], ...] = ()
    refuses: Literal["never", "decay", "schedule"] = "never"
    reason: str = ""
    also: Action | None = None


Entry = Form | Callable[[torch.optim.Optimizer, Group], Form]
_BY_CLASS: dict[type, Entry] = {}
_BY_NAME: dict[str, Entry] = {}


def register(
    optimizer_class: type | str,
    buffers: Mapping[str, int] | Literal["unsafe"],
    *,
    refuses: Literal["never", "decay", "schedule"] = "never",
    reason: str = "",
    also: Action | None = None,
) -> None:
    """Tell samestep how an optimizer class keeps its history.

    Args:
        optimizer_class: the class, or "package.ClassName" for one that is not imported yet.
        buffers: state key -> exponent of the rate that the buffer carries: 0 for gradients, 1 for rate times
            gradient, -1 for gradient over rate. Empty for an optimizer that keeps normalised statistics only,
            "unsafe" for one whose history cannot be rescaled.
        refuses: the schedules that make no sense with it: "never", "decay" (anything but a warm-up) or "schedule".
        reason: why, in words; shown when a pair is refused.
        also: called as ``also(optimizer, group_index, old_lr, new_lr)`` whenever the rate of a group changes.

    Raises:
        ValueError: when an exponent is no integer, or an unsafe or refusing entry gives no reason.

    Example:
        >>> class Heavy(torch.optim.Optimizer): ...
        >>> register(Heavy, {"velocity": 1})
        >>> form(Heavy([torch.nn.Parameter(torch.zeros(1))], {"lr": 0.1})).kind
        'velocity'
    """
    if (buffers == "unsafe" or refuses != "never") and not reason:
        raise ValueError(
            "`reason`: expected words for an entry that is unsafe or refuses, got none. Say why."
        )
    entry: Form
    if isinstance(buffers, str):
        if buffers != "unsafe":
            raise ValueError(f'`buffers`: expected a mapping or "unsafe", got {buffers!r}.')
        entry = Form("unsafe", refuses=refuses, reason=reason, also=also)
    else:
        for key, exponent in buffers.items():
            if isinstance(exponent, bool) or not isinstance(exponent, int):
                raise ValueError(f"`buffers[{key!r}]`: expected an integer exponent, got {exponent!r}.")
        entry = Form(_kind_of(buffers), tuple(buffers.items()), refuses, reason, also)
    if isinstance(optimizer_class, str):
        _BY_NAME[optimizer_class] = entry
    else:
        _BY_CLASS[optimizer_class] = entry


def form(optimizer: torch.optim.Optimizer) -> Form:
    """Return how this optimizer keeps its history.

    Args:
        optimizer: of a class that samestep knows or that was registered.

    Raises:
        SpecError: when the class is unknown, or its param groups are of different forms.

    Example:
        >>> form(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)).kind
        'gradient'
    """
    forms = {group_form(optimizer, index) for index in range(len(optimizer.param_groups))}
    if len(forms) != 1:
        raise SpecError(
            f"`optimizer`: expected param groups of one form, got {sorted(one.kind for one in forms)}. "
            "Look at each group with group_form."
        )
    return forms.pop()


def group_form(optimizer: torch.optim.Optimizer, group_index: int) -> Form:
    """Return how one param group of this optimizer keeps its history (some settings change the form).

    Raises:
        SpecError: when the class is unknown, or a subclass has a `step` of its own.
    """
    entry = _entry(type(optimizer))
    if isinstance(entry, Form):
        return entry
    return entry(optimizer, optimizer.param_groups[group_index])


def _entry(optimizer_class: type) -> Entry:
    for parent in optimizer_class.__mro__:
        entry = _BY_CLASS.get(parent) or _BY_NAME.get(f"{parent.__module__.split('.')[0]}.{parent.__name__}")
        if entry is not None:
            return entry
        if _has_own_step(parent):
            break
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    raise SpecError(
        f"`optimizer`: expected a class whose momentum form is known, got {name}. Tell how it keeps its history "
        f'with momentum.register({optimizer_class.__name__}, {{"<state key>": exponent}}): exponent 0 when the '
        "buffer holds gradients, 1 when it holds learning rate times gradient, and {} when there is none.",
        name=name,
    )


def _has_own_step(parent: type) -> bool:
    # torch wraps `step` on the first instance and stores the wrapper on the concrete class, also when it is
    # inherited: the qualified name tells who wrote the function.
    step = vars(parent).get("step")
    return step is not None and getattr(step, "__qualname__", "").rsplit(".", 1)[0] == parent.__qualname__


def _kind_of(buffers: Mapping[str, int]) -> Kind:
    if not buffers:
        return "statistics"
    return "velocity" if any(buffers.values()) else "gradient"
