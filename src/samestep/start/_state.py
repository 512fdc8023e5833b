"""State that is more than tensors, taken apart for the journey and put together again.

::

    {"step": 3, "exp_avg": tensor}  ──>  {"step": 3, "exp_avg": Slot(shape, dtype, ...)}  +  [tensor]
                                         travels as an object                                travels as bytes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.fingerprint import named_state, named_values
from samestep.start._structure import unwrap

__all__ = ["OptimizerPart", "Part", "Slot", "StatePart", "parts_of"]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a state that travels.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        kind: kind of device.
        beside_parameter: whether the tensor lies on the device of the parameter that it belongs to.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    beside_parameter: bool


def take_apart(value: Any, owner: Tensor | None, tensors: list[Tensor]) -> Any:
    """Return `value` with slots for its tensors, which are appended to `tensors`."""
    if isinstance(value, Tensor):
        is_spread = any(stride == 0 and n > 1 for n, stride in zip(value.shape, value.stride()))
        tensors.append(value.detach().clone() if is_spread else value.detach())
        beside = owner is not None and owner.device == value.device
        return Slot(tuple(value.shape), value.dtype, value.device.type, beside)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, take_apart(part, owner, tensors)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(take_apart(part, owner, tensors) for part in value)
    return value


def put_together(
    tree: Any, old: Any, owner: Tensor | None, device: torch.device, tensors: list[Tensor]
) -> Any:
    """Return `tree` with tensors in its slots, those of `old` where they fit; append them to `tensors`."""
    if isinstance(tree, Slot):
        if tree.beside_parameter and owner is not None:
            device = owner.device
        elif tree.kind == "cpu":
            device = torch.device("cpu")
        tensor = old if _fits(old, tree, device) else _fresh(tree, owner, device)
        tensors.append(tensor)
        return tensor
    if type(tree) in (dict, OrderedDict):
        known = old if isinstance(old, dict) else {}
        return type(tree)(
            (key, put_together(part, known.get(key), owner, device, tensors)) for key, part in tree.items()
        )
    if type(tree) in (list, tuple):
        parts = list(old) if isinstance(old, list | tuple) and len(old) == len(tree) else [None] * len(tree)
        return type(tree)(put_together(p, o, owner, device, tensors) for p, o in zip(tree, parts))
    return tree


def _fits(old: Any, slot: Slot, device: torch.device) -> bool:
    return (
        isinstance(old, Tensor)
        and tuple(old.shape) == slot.shape
        and old.dtype == slot.dtype
        and old.device == device
        and not any(stride == 0 and n > 1 for n, stride in zip(old.shape, old.stride()))
    )


def _fresh(slot: Slot, owner: Tensor | None, device: torch.device) -> Tensor:
    if owner is not None and tuple(owner.shape) == slot.shape:
        return torch.empty_like(owner, dtype=slot.dtype, device=device, requires_grad=False)
    return torch.empty(slot.shape, dtype=slot.dtype, device=device)


class Part:
    """Something with state, as the source takes it apart and the others put it together."""

    label: str

    def take(self, tensors: list[Tensor]) -> Any:
        """Return the state with slots; append its tensors."""
        raise NotImplementedError

    def receive(self, tree: Any, device: torch.device, tensors: list[Tensor]) -> Callable[[], None]:
        """Make room for the state, append the tensors to fill, and return what puts it in its place."""
        raise NotImplementedError

    def named(self) -> dict[str, Tensor]:
        """Return the state as tensors by name, for the proof of agreement."""
        raise NotImplementedError


class StatePart(Part):
    """Anything with a getter and a setter of its whole state."""

    def __init__(self, label: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self.label = label
        self._get, self._put = get, put

    def take(self, tensors: list[Tensor]) -> Any:
        """Return the state with slots; append its tensors."""
        return take_apart(self._get(), None, tensors)

    def receive(self, tree: Any, device: torch.device, tensors: list[Tensor]) -> Callable[[], None]:
        """Make room for the state, append the tensors to fill, and return what puts it in its place."""
        state = put_together(tree, None, None, device, tensors)
        return lambda: void(self._put(state))

    def named(self) -> dict[str, Tensor]:
        """Return the state as tensors by name."""
        return named_values(self._get(), self.label)


def void(_: object) -> None:
    """Drop a result."""


class OptimizerPart(Part):
    """An optimizer: options of its param groups, and state, which may not exist yet on some workers."""

    def __init__(self, label: str, optimizer: Optimizer, names: dict[str, Tensor]) -> None:
        self.label = label
        self._optimizer = optimizer
        self._names = names

    def _parameters(self) -> list[Tensor]:
        return [p for options in self._optimizer.param_groups for p in options["params"]]

    def take(self, tensors: list[Tensor]) -> Any:
        """Return options and state with slots; append their tensors."""
        state = self._optimizer.state
        numbers = {id(p): i for i, p in enumerate(self._parameters())}
        options = [take_apart(_plain(group), None, tensors) for group in self._optimizer.param_groups]
        kept = [
            (numbers.get(id(key), key), take_apart(value, key if isinstance(key, Tensor) else None, tensors))
            for key, value in state.items()
        ]
        return options, kept

    def receive(self, tree: Any, device: torch.device, tensors: list[Tensor]) -> Callable[[], None]:
        """Make room for options and state, and return what puts them in their places."""
        parameters = self._parameters()
        groups = self._optimizer.param_groups
        options = [
            put_together(new, _plain(group), None, device, tensors) for new, group in zip(tree[0], groups)
        ]
        state = {}
        for number, kept in tree[1]:
            key = parameters[number] if isinstance(number, int) else number
            owner = key if isinstance(key, Tensor) else None
            old = self._optimizer.state.get(key)
            state[key] = put_together(kept, old, owner, device, tensors)

        def install() -> None:
            for group, new in zip(groups, options, strict=True):
                for key in _plain(group).keys() - new.keys():
                    del group[key]
                group.update(new)
            self._optimizer.state.clear()
            self._optimizer.state.update(state)

        return install

    def named(self) -> dict[str, Tensor]:
        """Return options and state as tensors by name."""
        found = named_state(self._optimizer, self._names)
        return {f"{self.label}.{name}": tensor for name, tensor in found.items()}


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def parts_of(things: tuple[object, ...], names: dict[str, Tensor]) -> Iterator[Part]:
    """Return what has state besides tensors of modules, in order."""
    for i, thing in enumerate(things):
        label = f"things[{i}]"
        if isinstance(thing, nn.Module):
            for name, module in unwrap(thing).named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    place = ".".join(filter(None, (label, name, "extra_state")))
                    yield StatePart(place, module.get_extra_state, module.set_extra_state)
        elif isinstance(thing, Optimizer):
            yield OptimizerPart(label, thing, names)
        else:
            yield StatePart(label, thing.state_dict, thing.load_state_dict)  # type: ignore[attr-defined]
