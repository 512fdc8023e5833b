"""Building a program in float64 or as it is, and the named tensors of its state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.explain._program import Program, opened

__all__ = [
    "built",
    "gradients",
    "load",
    "load_optimizer_state",
    "optimizer_state",
    "option_table",
    "quiet",
    "seeded",
    "state",
    "wide",
]


@contextmanager
def wide(on: bool) -> Iterator[None]:
    """Make new float tensors float64 inside the block, when `on`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if on else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def seeded(seed: int = 0) -> None:
    """Seed torch's, NumPy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def built(build: Callable[[], Any], in_float64: bool) -> tuple[Program, list[str]]:
    """Return a program made under a fixed seed, without dropout, and the names of the modules that had some.

    Raises:
        SpecError: when `build` does not return a program, or one that cannot be made float64.
    """
    seeded()
    program = opened(build())
    if in_float64:
        _widen(program)
    dropped = quiet(program.bare)
    return program, dropped


def _widen(program: Program) -> None:
    tensors = [*program.bare.named_parameters(), *program.bare.named_buffers()]
    narrow = [name for name, t in tensors if t.is_floating_point() and t.dtype != torch.float64]
    if narrow and program.model is not program.bare:
        raise SpecError(
            f"`build`: expected `{narrow[0]}` to follow torch's default dtype, float64 in a replay, got an "
            "explicit narrower one inside DDP. Leave out dtype= where the tensor is made.",
            name=narrow[0],
        )
    if narrow:
        program.model.double()
    for entries in program.optimizer.state.values():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                entries[key] = value.double()


def quiet(model: nn.Module) -> list[str]:
    """Set every dropout to 0 and return the names of those that were not.

    Masks for the whole batch and for its parts cannot be the same ones, and are not what is looked for.

    Example:
        >>> quiet(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
        ['1']
    """
    found = []
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        kinds = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)
        if isinstance(module, kinds) and getattr(module, attribute) and module.training:
            setattr(module, attribute, 0.0)
            found.append(name)
    return found


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, by name in registration order."""
    return {
        name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy values into parameters and buffers in place, so that wrappers and optimizers keep them."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(values[name])


def gradients(program: Program) -> dict[str, Tensor | None]:
    """Return copies of the parameters' gradients, dense, by name; None where there is none."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in program.parameters().items():
        gradient = parameter.grad
        if gradient is None:
            found[name] = None
        else:
            found[name] = (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()
    return found


def optimizer_state(program: Program) -> dict[str, Tensor]:
    """Return the optimizer's tensors and numbers, as ``parameter: entry``."""
    found = {}
    for name, parameter in program.bare.named_parameters():
        for key, value in program.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor | int | float):
                found[f"{name}: {key}"] = torch.as_tensor(value).detach().clone()
    return found


def load_optimizer_state(program: Program, values: dict[str, Tensor]) -> None:
    """Give the optimizer these entries."""
    for name, parameter in program.bare.named_parameters():
        mine = {key: v for key, v in values.items() if key.rpartition(": ")[0] == name}
        if mine:
            entries = program.optimizer.state[parameter]
            for key, value in mine.items():
                old = entries.get(key.rpartition(": ")[2])
                new = value.clone() if isinstance(old, Tensor) or old is None else type(old)(value.item())
                entries[key.rpartition(": ")[2]] = new
        else:
            program.optimizer.state.pop(parameter, None)


def option_table(program: Program) -> list[dict[str, Any]]:
    """Return the options of each param group that are plain values."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if isinstance(value, bool | int | float | str | tuple | Tensor)
        }
        for group in program.optimizer.param_groups
    ]
