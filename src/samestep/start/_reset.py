"""The optimizer's memory of values that are gone: dropped for the rows that were replaced, kept for the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.group import Group
from samestep.reduce import reduce

__all__ = ["forget", "replaced_rows"]

# State of torch's optimizers that is laid out like its parameter and starts at zero.
_FROM_ZERO = frozenset(
    {
        "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg",
        "acc_delta",
    }
)  # fmt: skip


def replaced_rows(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], group: Group
) -> dict[str, Tensor]:
    """Return, for each tensor, which of its rows some worker holds another value in than before.

    Args:
        before: copies by name.
        after: the tensors under the same names, of the same shapes.
        group: the workers.

    Returns:
        (n_rows,) bool by name, equal on all workers, also where their values differed before.

    Collective: all ranks of `group`.
    """
    masks = [_changed(before[name], after[name]).cpu().to(torch.int64) for name in after]
    together = reduce(torch.cat([torch.zeros(1, dtype=torch.int64), *masks]), group, "max")[1:].bool()
    return dict(zip(after, torch.split(together, [len(mask) for mask in masks]), strict=True))


def forget(optimizer: Optimizer, parameter: Tensor, rows: Tensor) -> None:
    """Drop an optimizer's state of some rows of a parameter; counters of steps are the whole parameter's and stay.

    State that no row can be cut out of, since it is laid out otherwise or does not start at zero, is dropped whole.

    Args:
        optimizer: changed in place.
        parameter: whose state it is.
        rows: (n_rows,) bool; the rows that were replaced.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 1))
        >>> sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> weight.sum().backward(); sgd.step()
        >>> forget(sgd, weight, torch.tensor([False, True]))
        >>> sgd.state[weight]["momentum_buffer"].tolist()
        [[1.0], [0.0]]
    """
    state = optimizer.state.get(parameter)
    if not state or not bool(rows.any()):
        return
    kept = {name: value for name, value in state.items() if name in _FROM_ZERO and isinstance(value, Tensor)}
    rest = [value for name, value in state.items() if name not in kept and value is not None]
    by_rows = all(value.shape == parameter.shape for value in kept.values()) and all(map(_is_counter, rest))
    if bool(rows.all()) or not by_rows or not parameter.ndim:
        optimizer.state.pop(parameter)
        return
    with torch.no_grad():
        for value in kept.values():
            value[rows.to(value.device)] = 0


def _changed(before: Tensor, after: Tensor) -> Tensor:
    differs = before != after
    return (
        differs.reshape(1) if not differs.ndim else differs.flatten(1).any(1) if differs.ndim > 1 else differs
    )


def _is_counter(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
