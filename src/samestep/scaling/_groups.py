"""Param groups: parameters by kind and name, each with its own rate and decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from samestep.scaling._check import check_number

__all__ = ["param_groups"]


@dataclass
class _Names:
    """The parameters to train, each once, with all their names."""

    names: dict[int, list[str]] = field(default_factory=dict)
    params: dict[int, nn.Parameter] = field(default_factory=dict)
    owners: dict[int, nn.Module] = field(default_factory=dict)


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float = 0.0,
    bias_lr_factor: float = 1.0,
    bias_weight_decay: float = 0.0,
    norm_lr_factor: float = 1.0,
    norm_weight_decay: float = 0.0,
    lr_factors: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
    layers: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return torch param groups of the trainable parameters, by kind, decay and rate.

    A parameter shared by several modules is listed once, under its first name. Parameters of normalisation layers
    are "norms", their biases included; of the rest, those named "bias" or "..._bias" are "biases".

    Args:
        model: its parameters with `requires_grad` are grouped.
        lr: rate of a group with factor 1.
        weight_decay: of ordinary weights.
        bias_lr_factor: factor on the rate of biases (Detectron: 2).
        bias_weight_decay: of biases.
        norm_lr_factor: factor on the rate of scale and shift of normalisation layers; 0 keeps them as they are.
        norm_weight_decay: of scale and shift of normalisation layers.
        lr_factors: pattern of full names, such as "head.*", -> factor on the rate (VRD's second rate).
        layer_decay: each layer's rate is this times that of the next one; the parameters of no layer have factor 1.
        layers: patterns of full names from the input to the output.

    Returns:
        Groups with the keys params, lr, weight_decay and name, in order of first appearance.

    Raises:
        ValueError: when a pattern matches nothing, two patterns of a kind match one parameter, a number is out of
            its range, or nothing is trainable.

    Example:
        >>> groups = param_groups(nn.Linear(2, 1), 0.5, weight_decay=0.1, bias_lr_factor=2.0)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('weights', 0.5, 0.1), ('biases', 1.0, 0.0)]
    """
    numbers = {
        "lr": lr,
        "weight_decay": weight_decay,
        "bias_lr_factor": bias_lr_factor,
        "bias_weight_decay": bias_weight_decay,
        "norm_lr_factor": norm_lr_factor,
        "norm_weight_decay": norm_weight_decay,
        "layer_decay": layer_decay,
        **{f"lr_factors[{pattern!r}]": factor for pattern, factor in (lr_factors or {}).items()},
    }
    for name, value in numbers.items():
        check_number(name, value, low=0.0)
    if layer_decay != 1.0 and not layers:
        raise ValueError(
            "`layers`: expected patterns for a layer decay, got none. List them from input to output."
        )
    table = _collect(model)
    kinds = {
        "weights": (1.0, weight_decay),
        "biases": (bias_lr_factor, bias_weight_decay),
        "norms": (norm_lr_factor, norm_weight_decay),
    }
    depth_factors = {layer: layer_decay ** (len(layers) - index) for index, layer in enumerate(layers)}
    by_layer = _match("layers", depth_factors, table)
    by_name = _match("lr_factors", lr_factors or {}, table)
    return _grouped(table, lr, kinds, by_layer, by_name)


def _grouped(
    table: _Names,
    lr: float,
    kinds: Mapping[str, tuple[float, float]],
    by_layer: Mapping[int, float],
    by_name: Mapping[int, float],
) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float], dict[str, Any]] = {}
    for key, param in table.params.items():
        kind = _kind(table.names[key][0], param, table.owners[key])
        kind_factor, decay = kinds[kind]
        factor = by_layer.get(key, 1.0) * by_name.get(key, 1.0)
        name = kind if factor == 1.0 else f"{kind} x {factor:.6g}"
        fresh = {"params": [], "lr": lr * (factor * kind_factor), "weight_decay": decay, "name": name}
        groups.setdefault((kind, factor), fresh)["params"].append(param)
    return list(groups.values())


def _collect(model: nn.Module) -> _Names:
    table = _Names()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.requires_grad:
                table.names.setdefault(id(param), []).append(f"{prefix}.{name}" if prefix else name)
                table.params.setdefault(id(param), param)
                table.owners.setdefault(id(param), module)
    if not table.params:
        raise ValueError("`model`: expected parameters with requires_grad, got none.")
    return table


def _match(argument: str, factors: Mapping[str, float], table: _Names) -> dict[int, float]:
    owner: dict[int, str] = {}
    for pattern in factors:
        hits = [
            key for key, names in table.names.items() if any(fnmatchcase(name, pattern) for name in names)
        ]
        if not hits:
            raise ValueError(
                f"`{argument}`: expected patterns that match a trainable parameter, got {pattern!r}, which matches "
                "none. Compare it with the names in model.named_parameters()."
            )
        for key in hits:
            if key in owner:
                raise ValueError(
                    f"`{argument}`: expected one pattern per parameter, got {owner[key]!r} and {pattern!r} for "
                    f"{table.names[key][0]!r}. Make them disjoint."
                )
            owner[key] = pattern
    return {key: factors[pattern] for key, pattern in owner.items()}


def _kind(name: str, param: torch.Tensor, owner: nn.Module) -> str:
    last = name.rsplit(".", 1)[-1]
    # By class name too: model libraries bring normalisation layers of their own, always named after what they are.
    if isinstance(owner, nn.LayerNorm) or ("norm" in type(owner).__name__.lower() and param.ndim <= 1):
        return "norms"
    return "biases" if last == "bias" or last.endswith("_bias") else "weights"
