"""Checks of arguments that all schedules share; each returns the value in its canonical type."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

__all__ = ["choice", "factor", "factors", "increasing", "whole"]

_MOST = 2**63 - 1  # beyond it, whole numbers stop being exact in what reads our files


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int of at least `least`; floats and booleans are refused, so boundaries stay exact."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= _MOST:
        raise ValueError(f"`{name}`: expected a whole number of at least {least}, got {value!r}.")
    return number


def factor(name: str, value: Any, *, positive: bool = False) -> float:
    """Return `value` as a finite float that is not negative (or is above 0)."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        bound = "above 0" if positive else "of at least 0"
        raise ValueError(f"`{name}`: expected a finite number {bound}, got {value!r}.")
    return number


def factors(name: str, values: Any) -> tuple[float, ...]:
    """Return `values` as a tuple of factors."""
    return tuple(factor(f"{name}[{i}]", value) for i, value in enumerate(_sequence(name, values)))


def increasing(name: str, values: Any) -> tuple[int, ...]:
    """Return `values` as a tuple of whole numbers that never fall; equal neighbours are an empty phase."""
    numbers = tuple(whole(f"{name}[{i}]", value) for i, value in enumerate(_sequence(name, values)))
    for i, (left, right) in enumerate(itertools.pairwise(numbers)):
        if right < left:
            raise ValueError(
                f"`{name}`: expected steps in order, got {left} before {right} at [{i}]. Sort them."
            )
    return numbers


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the names in `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}`: expected one of {', '.join(choices)}; got {value!r}.")
    return value


def _sequence(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"`{name}`: expected a list, got {values!r}.")
    return list(values)
