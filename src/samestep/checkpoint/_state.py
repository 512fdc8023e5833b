"""What the things of a run hold, as tensors by name and JSON data.

A tensor is called ``<thing>.<its name in the thing's state>``, such as ``model.layers.0.weight``; an optimizer's
``<optimizer>.<name of the parameter>.<key>``, such as ``optimizer.model.layers.0.weight.exp_avg``, so that another
order of parameters cannot mix them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint._codec import encode
from samestep.errors import CheckpointError

__all__ = ["State", "collect", "kind_of", "param_names", "present", "unwrap"]


@dataclass
class State:
    """Tensors by name (each memory once), further names of them, and what is not a tensor, by thing."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    _seen: dict[tuple[object, ...], str] = field(default_factory=dict)

    def keep(self, name: str, tensor: Tensor) -> str:
        """Take a tensor and return its name; one that is already here becomes a further name of that."""
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"`{name}`: expected a dense tensor that every worker holds whole, got {type(tensor).__name__} "
                f"({tensor.layout}). Gather sharded or sparse tensors in the thing's own state_dict().",
                name=name,
            )
        if tensor.is_quantized or tensor.device.type == "meta":
            raise CheckpointError(
                f"`{name}`: expected a tensor with values, got {tensor.dtype} on {tensor.device}. "
                "Materialize it before saving.",
                name=name,
            )
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in self._seen:
            self.aliases[name] = self._seen[key]
        else:
            self._seen[key] = name
            self.tensors[name] = tensor.detach()
        return name


def present(things: Mapping[str, Any]) -> dict[str, Any]:
    """Return the things that are not None, without their wrappers.

    Raises:
        CheckpointError: when one has no state that can be saved.
    """
    found = {name: unwrap(thing) for name, thing in things.items() if thing is not None}
    for name, thing in found.items():
        if kind_of(thing) == "state" and not (
            hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        ):
            raise CheckpointError(
                f"`{name}`: expected state_dict and load_state_dict, or a dict of JSON data, got "
                f"{type(thing).__name__}. Pass what holds the state.",
                name=name,
            )
    return found


def unwrap(thing: Any) -> Any:
    """Return the module inside torch's wrappers (DDP, compile), whose names would otherwise differ."""
    while isinstance(thing, nn.Module):
        if isinstance(thing, nn.parallel.DistributedDataParallel):
            thing = thing.module
        elif isinstance(inner := getattr(thing, "_orig_mod", None), nn.Module):
            thing = inner
        else:
            break
    return thing


def kind_of(thing: Any) -> str:
    """Return "module", "optimizer", "data" (a plain dict) or "state" (anything else)."""
    if isinstance(thing, nn.Module):
        return "module"
    if isinstance(thing, Optimizer):
        return "optimizer"
    return "data" if type(thing) is dict else "state"


def param_names(things: Mapping[str, Any], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters by param group.

    A parameter of a module among the things is called after it, another one ``<group index>.<index in it>``.
    """
    names: dict[int, str] = {}
    for thing_name, thing in things.items():
        if isinstance(thing, nn.Module):
            for name, parameter in thing.named_parameters():
                names.setdefault(id(parameter), f"{thing_name}.{name}")
    return [
        [names.get(id(parameter), f"{g}.{i}") for i, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def collect(things: Mapping[str, Any]) -> State:
    """Return the state of all things; the tensors are their own, not copies.

    Args:
        things: by name, from `present`.

    Raises:
        CheckpointError: when a state holds what a checkpoint cannot.
    """
    state = State()
    for name, thing in things.items():
        kind = kind_of(thing)
        if kind == "optimizer":
            content = _optimizer(name, thing, param_names(things, thing), state)
        elif kind == "module":
            content = _module(name, thing, state)
        else:
            value = thing if kind == "data" else thing.state_dict()
            content = {"value": encode(value, name, state.keep)}
        state.states[name] = {"kind": kind, "class": type(thing).__qualname__, **content}
    return state


def _module(name: str, module: nn.Module, state: State) -> dict[str, Any]:
    extra = {}
    for key, value in module.state_dict().items():
        if isinstance(value, Tensor):
            state.keep(f"{name}.{key}", value)
        else:
            extra[key] = encode(value, f"{name}.{key}", state.keep)
    return {"extra": extra}


def _optimizer(name: str, optimizer: Optimizer, names: list[list[str]], state: State) -> dict[str, Any]:
    saved = optimizer.state_dict()
    groups: list[dict[str, Any]] = []
    by_number: dict[Any, str] = {}
    for members, group in zip(names, saved["param_groups"], strict=True):
        by_number.update(zip(group["params"], members, strict=True))
        # torch keeps names in a group only where the caller gave some; `params` has ours.
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {"params": members, "options": encode(options, f"{name}.options.{len(groups)}", state.keep)}
        )
    kept = {
        by_number[number]: encode(values, f"{name}.{by_number[number]}", state.keep)
        for number, values in _in_order(saved["state"], by_number)
    }
    extra = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {"groups": groups, "state": kept, "extra": encode(extra, f"{name}.extra", state.keep)}


def _in_order(values: Mapping[Any, Any], numbers: Iterable[Any]) -> list[tuple[Any, Any]]:
    # State is made in the order of first updates, which may differ between workers.
    return [(number, values[number]) for number in numbers if number in values]
