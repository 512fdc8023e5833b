"""Differences between two tensors, and the factors and weights that explain them. Pure arithmetic in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Fit", "aligned", "difference", "factor", "weights"]

_FLOOR = 1e-3
_CONDITION = 1e-4


def difference(found: Tensor | None, right: Tensor | None, largest: float) -> float:
    """Return the largest deviation relative to the largest right value, with a floor for small tensors.

    A tensor whose true value is 0, such as the gradient of a bias before a BatchNorm, holds rounding noise only;
    relative to itself every noise is a difference. So nothing is measured against less than a thousandth of
    the largest value of its kind in the model.

    Args:
        found: any shape; None where there is none.
        right: the reference.
        largest: the largest absolute value of all tensors of this kind in the model.

    Returns:
        max |found - right| / max(max |right|, 1e-3 x largest); inf where one is missing or the shapes differ.

    Numerics: computed in float64.

    Example:
        >>> difference(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 2.0)
        0.25
    """
    if found is None or right is None:
        return 0.0 if found is right else math.inf
    if found.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    right, found = right.detach().double(), found.detach().double()
    apart = float((found - right).abs().max())
    if not math.isfinite(apart):
        return 0.0 if torch.equal(found.nan_to_num(), right.nan_to_num()) else math.inf
    scale = max(float(right.abs().max()), _FLOOR * largest)
    return apart / scale if scale else (0.0 if apart == 0 else math.inf)


class Fit(NamedTuple):
    """A least-squares fit: its coefficients (empty when they cannot be told) and what it leaves unexplained."""

    coefficients: tuple[float, ...]
    residual: float


def factor(found: Tensor, right: Tensor) -> Fit:
    """Return the k for which found = k x right is nearest, and the deviation left, relative to k x right.

    Example:
        >>> factor(torch.tensor([4.0, 8.0]), torch.tensor([1.0, 2.0]))
        Fit(coefficients=(4.0,), residual=0.0)
    """
    found, right = found.detach().double().reshape(-1), right.detach().double().reshape(-1)
    scale = float(right.abs().max()) if right.numel() else 0.0
    if not scale or found.shape != right.shape:
        return Fit((), math.inf)
    # Scaled first, so that the squares of small values do not vanish.
    unit = right / scale
    k = float(found @ unit / (unit @ unit)) / scale
    left = float((found - k * right).abs().max())
    return Fit((k,), left / (abs(k) * scale) if k else (math.inf if left else 0.0))


def weights(columns: list[Tensor], total: Tensor, largest: float) -> Fit:
    """Return the weights w for which total = sum of w_i x column_i is nearest.

    Args:
        columns: tensors of one shape: a parameter's gradient on each rank.
        total: the same shape: its reduced gradient.
        largest: as in `difference`.

    Returns:
        Coefficients, 0 for a column of zeros; none when they cannot be told apart (fewer elements than columns,
        or columns that are nearly multiples of each other). The residual is measured as in `difference`.

    Numerics: least squares by orthogonal factors, in float64.

    Example:
        >>> a, b = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 1.0])
        >>> [round(w, 12) for w in weights([a, b], 0.25 * a + 0.5 * b, 1.0).coefficients]
        [0.25, 0.5]
    """
    norms = [float(column.detach().double().norm()) for column in columns]
    biggest = max(norms, default=0.0)
    kept = [i for i, norm in enumerate(norms) if norm > 1e-9 * biggest]
    if not kept or total.numel() < len(kept):
        return Fit((), math.inf)
    matrix = torch.stack([columns[i].detach().double().reshape(-1) / norms[i] for i in kept], dim=1)
    target = total.detach().double().reshape(-1)
    spread = torch.linalg.svdvals(torch.linalg.qr(matrix).R)
    if float(spread[-1]) < _CONDITION * float(spread[0]):
        return Fit((), math.inf)
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1)).solution.squeeze(1)
    residual = difference(matrix @ solution, target, largest)
    found = [0.0] * len(columns)
    for place, i in enumerate(kept):
        found[i] = float(solution[place]) / norms[i]
    return Fit(tuple(found), residual)


def aligned(right: Tensor, shape: torch.Size, rows: list[int], n_rows: int) -> list[Tensor]:
    """Return what a tensor of the whole batch holds for some rows, as candidates of the given shape.

    The samples may stand on any axis, and may be flattened together with another one, in front of it or behind.

    Args:
        right: the reference's tensor.
        shape: of the tensor that one worker has in its place.
        rows: that worker's rows, as numbers in the whole batch.
        n_rows: rows of the whole batch.

    Returns:
        One tensor, two where the order of a flattened axis is open, none where there is no sample axis: such a
        tensor, a loss or a statistic, may rightly be another one for a part of the batch.

    Example:
        >>> aligned(torch.arange(6).reshape(3, 2), torch.Size([2, 2]), [2, 0], 3)
        [tensor([[4, 5],
                [0, 1]])]
    """
    if right.dim() != len(shape):
        return []
    axes = [a for a in range(right.dim()) if right.shape[a] != shape[a]]
    if not axes and len(rows) == n_rows:
        axes = [a for a in range(right.dim()) if right.shape[a] == n_rows][:1]
    if not axes:
        return []
    axis = axes[0]
    times, rest = divmod(right.shape[axis], n_rows)
    if len(axes) > 1 or rest or not times or shape[axis] != len(rows) * times:
        return []
    index = torch.tensor(rows, dtype=torch.int64, device=right.device)
    if times == 1:
        return [right.index_select(axis, index)]
    ahead, after = right.shape[:axis], right.shape[axis + 1 :]
    behind = right.reshape(*ahead, n_rows, times, *after).index_select(axis, index)
    front = right.reshape(*ahead, times, n_rows, *after).index_select(axis + 1, index)
    return [behind.flatten(axis, axis + 1), front.flatten(axis, axis + 1)]
