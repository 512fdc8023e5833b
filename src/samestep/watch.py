"""What torch's DDP lets pass in silence: parameters frozen, unfrozen, added or replaced after wrapping.

DDP looks at the parameters once. One that is added or replaced later is never reduced, and the replicas part
without a message. The watch looks again at the start of every step, in a few microseconds. `problem` looks once,
before anything is wrapped, at what could never go well.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor, nn

from samestep.carrier import sparse_parameters
from samestep.errors import SpecError
from samestep.group import Group

__all__ = ["ModelWatch", "check", "check_same_structure"]


class ModelWatch:
    """Remembers a model's parameters and says what has changed.

    Args:
        model: as it was wrapped.

    Attributes:
        moved: whether a parameter was found on another device or in another dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self.moved = False
        self._modules = [
            (prefix, module, tuple(module._modules.items()), tuple(module._parameters))
            for prefix, module in model.named_modules()
        ]
        self._places = [
            (module._parameters, key, parameter, *_traits(parameter), f"{prefix}.{key}" if prefix else key)
            for prefix, module, _, keys in self._modules
            for key in keys
            for parameter in [module._parameters[key]]
        ]

    def change(self) -> str:
        """Return in words what has changed since the model was wrapped; empty when nothing has.

        Where a parameter was `moved` to another dtype or device, DDP's own memory may have gone with it.
        """
        for table, key, parameter, trainable, dtype, device, name in self._places:
            now = table.get(key)
            if now is not parameter:
                return f"parameter `{name}` was {'replaced' if parameter is not None else 'added'}"
            if now is None:
                continue
            if now.requires_grad != trainable:
                return f"parameter `{name}` was {'frozen' if trainable else 'unfrozen'}"
            if now.dtype != dtype or now.device != device:
                self.moved = True
                return f"parameter `{name}` was moved from {dtype} on {device} to {now.dtype} on {now.device}"
        for prefix, module, children, keys in self._modules:
            if len(module._parameters) != len(keys):
                return f"a parameter of `{prefix or 'the model'}` was added or removed"
            if tuple(module._modules.items()) != children:
                return f"a module in `{prefix or 'the model'}` was added, removed or replaced"
        return ""


def _traits(parameter: nn.Parameter | None) -> tuple[bool, torch.dtype | None, torch.device | None]:
    return (
        (False, None, None)
        if parameter is None
        else (parameter.requires_grad, parameter.dtype, parameter.device)
    )


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
    shards: int | None,
    options: dict[str, Any],
) -> None:
    """Refuse settings of a `TrainStep` that do not fit each other, the model or the other workers.

    Args:
        model: plain module.
        optimizer: over its parameters.
        group: the workers.
        shards: S, or None.
        options: `mode`, `clip_norm`, `micro_batch_size`, `on_nonfinite`.

    Raises:
        SpecError: on all workers, naming those that found something.

    Collective: all ranks of the group.
    """
    found = _settings_problem(group, shards, **options) or _model_problem(
        model, optimizer, group, options["mode"]
    )
    group.agree(not found, found, SpecError)
    check_same_structure(model, group, {"shards": shards, **options})


def _settings_problem(
    group: Group,
    shards: int | None,
    mode: str,
    clip_norm: float | None,
    micro_batch_size: int | None,
    on_nonfinite: str,
) -> str:
    if mode not in ("fast", "exact"):
        return f"`mode`: expected 'fast' or 'exact', got {mode!r}."
    if mode == "exact" and shards is None:
        return "`shards`: exact mode needs their number. Pass shards=S, at least the largest world size."
    if shards is not None and shards < group.world_size:
        return (
            f"`shards`: expected at least world_size={group.world_size}, got {shards}. "
            "Use fewer workers or more shards."
        )
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        return f"`clip_norm`: expected a finite number > 0, got {clip_norm}."
    if micro_batch_size is not None and micro_batch_size < 1:
        return f"`micro_batch_size`: expected at least 1, got {micro_batch_size}."
    if on_nonfinite not in ("raise", "skip"):
        return f"`on_nonfinite`: expected 'raise' or 'skip', got {on_nonfinite!r}."
    return ""


def _model_problem(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, mode: str) -> str:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        return "`model`: expected at least one trainable parameter, got none."
    everything: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in everything.items():
        if tensor.device != group.device:
            return (
                f"`model`: expected all its tensors on {group.device}, got `{name}` on {tensor.device}. "
                "Call model.to(group.device) before making the optimizer."
            )
    if mode == "exact" and any(p.requires_grad for p in sparse_parameters(model)):
        return (
            "`model`: exact mode got an embedding with sparse=True; additions of sparse gradients have no fixed "
            "order. Use sparse=False, or mode='fast'."
        )
    held = {id(p) for options in optimizer.param_groups for p in options["params"]}
    missing = [name for name, p in trainable.items() if id(p) not in held]
    if missing:
        return (
            f"`optimizer`: expected every trainable parameter of the model, got none for `{missing[0]}` "
            f"({len(missing)} in all). Add them, or freeze them with requires_grad_(False)."
        )
    if held - {id(p) for p in model.parameters()}:
        return (
            "`optimizer`: holds a parameter that is not the model's, whose gradient would not be summed over "
            "workers. Make the optimizer from the model that is passed here, after moving it."
        )
    return ""


def check_same_structure(model: nn.Module, group: Group, options: dict[str, Any]) -> None:
    """Refuse workers whose models or settings differ.

    Args:
        model: plain module.
        group: the workers.
        options: JSON data that must be equal on all workers.

    Raises:
        SpecError: on all workers, naming the first difference and both sides of it.

    Collective: all ranks of the group.
    """
    mine = [f"{name}={value!r}" for name, value in options.items()]
    mine += [
        f"`{name}` {tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    ]
    mine += [f"buffer `{name}` {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    each = [json.loads(text) for text in group.gather_text(json.dumps(mine))]
    for rank, theirs in enumerate(each):
        for here, there in zip(
            [*each[0], *["nothing"] * len(theirs)], [*theirs, *["nothing"] * len(each[0])]
        ):
            if here != there:
                raise SpecError(
                    f"TrainStep: expected the same model and settings on all workers, got {here} on rank 0 and "
                    f"{there} on rank {rank} of {group.world_size}.",
                    rank=rank,
                )
