"""How far two runs of the same mathematics may part by rounding alone, and by how much that may grow.

**One sum.** Two orders of adding the same K numbers differ, with probability 1 - p for each element, by at most
``lambda * u * sqrt(K)`` times the sum of their absolute values, where u is the unit roundoff of the dtype and
``lambda = sqrt(2 ln(2 / p))``. With n elements to compare, p = 1e-9 / n.

**One gradient.** K counts the additions on the way to an element: each layer's inner dimension, forward and
backward, and the samples of the global batch. For the sum of absolute values stands the norm G of the whole
model's gradient, the largest so far: a parameter whose true gradient is 0 (a bias before a normalisation) carries
the rounding of its neighbours, not of its own size.

**From step to step.** Every phase is held against the *observed* difference of the phase before it, so nothing is
assumed about the past. A difference dw in the parameters moves the next gradient by at most ``L * dw``, where L is
the sharpness of the loss. A run that trains is stable, which bounds L: ``lr * L <= 2 (1 + m) / (1 - m)`` for
momentum m, when the update is written as lr times a (preconditioned) average gradient. With U the norm of the
last update and G / U in place of 1 / lr this is ``dg <= 2 (1 + m) / (1 - m) * G * dw / U`` for SGD and Adam alike.

That bound holds for the worst direction, and a transformer under Adam leaves it far behind: key biases, which move
by rounding alone, change nothing. So a gradient's difference that the rounding of its own step explains is held
against that alone, and a step is judged when either all its gradients are such or the whole bound is narrower than
the smallest fault. An update is judged also when twice the difference that it was *seen* to add is narrower: noise
that hides a fault would have to be as large as the fault, and opposite to it.

**Updates.** SGD moves parameters by lr times what its state differs by. Adam divides by ``sqrt(v) + eps``: an
element whose gradient is only rounding moves by up to lr in any direction, so each element is allowed
``lr * min(2, 2 dg / (sqrt(v) + eps))``.

**Kinks.** A unit of a ReLU, a maximum or an argmax that lies within rounding of its kink may flip, and the gradient
then jumps by up to one sample's share. Once the parameters have parted, a jump that is larger than smooth carrying
explains and smaller than that share can be a kink or a fault: it is not called different, and neither that step nor
those after it are judged. `explain` tells which it is, in float64.

Reference: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem 2.4; Cohen et
al., "Gradient descent on neural networks typically occurs at the edge of stability", 2021, and "Adaptive gradient
methods at the edge of stability", 2022, for the bound on L.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

__all__ = ["SMALLEST_FAULT", "amplification", "confidence", "rounding", "roundings", "unit_roundoff"]

_MISS = 1e-9

SMALLEST_FAULT = 0.01
"""Relative effect that a comparison must be able to see when samples were not recorded; otherwise one sample's
share of the global batch."""

_UNKNOWN_BATCH = 1024


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number of a dtype; 0 for integers.

    Args:
        dtype: any.

    Example:
        >>> unit_roundoff(torch.float32) == 2.0**-24
        True
    """
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def confidence(n_elements: int) -> float:
    """Return lambda: how many standard sizes of rounding none of `n_elements` exceeds, but for one case in 1e9.

    Args:
        n_elements: numbers to compare, >= 1.

    Example:
        >>> round(confidence(1), 2)
        6.54
    """
    return math.sqrt(2 * math.log(2 * max(1, n_elements) / _MISS))


def roundings(shapes: Iterable[Sequence[int]], n_samples: int | None) -> int:
    """Return K, the additions on the way to one element of a gradient.

    Args:
        shapes: of the parameters; of a shape (out, a, b, ...) the inner dimension is a * b * ...
        n_samples: of the global batch; None stands for 1024.

    Example:
        >>> roundings([(10, 4), (10,), (3, 10)], 64)
        92
    """
    inner = sum(math.prod(shape[1:]) for shape in shapes if len(shape) > 1)
    # Backward sums over the outer dimension, which is the inner one of the next layer.
    return 2 * inner + (n_samples or _UNKNOWN_BATCH)


def rounding(dtype: torch.dtype, shapes: Sequence[Sequence[int]], n_samples: int | None) -> float:
    """Return the relative difference that the order of additions alone may make in a gradient.

    Args:
        dtype: the least exact one that the sums are computed in.
        shapes: of the parameters.
        n_samples: of the global batch, None when unknown.

    Example:
        >>> 3e-6 < rounding(torch.float32, [(16, 16)], 32) < 6e-6
        True
    """
    n_elements = sum(math.prod(shape) for shape in shapes)
    return confidence(n_elements) * unit_roundoff(dtype) * math.sqrt(roundings(shapes, n_samples))


def amplification(momentum: float) -> float:
    """Return how much a relative difference of the parameters, in units of the last update, may move a gradient.

    Args:
        momentum: in [0, 1); the first beta of Adam.

    Example:
        >>> amplification(0.0), round(amplification(0.9), 6)
        (2.0, 38.0)
    """
    return 2 * (1 + momentum) / (1 - momentum)
