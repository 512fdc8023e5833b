"""Range checks of numbers, with both numbers in the message."""

from __future__ import annotations

import math

__all__ = ["check_count", "check_number"]


def check_number(
    name: str,
    value: float,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise a ValueError that names the argument when a number is outside its range or not finite."""
    ok = math.isfinite(value) and low <= value <= high
    if not ok or (open_low and value == low) or (open_high and value == high):
        bounds = f"{'above' if open_low else 'at least'} {low:g}"
        if high != math.inf:
            bounds += f" and {'below' if open_high else 'at most'} {high:g}"
        raise ValueError(f"`{name}`: expected a finite number {bounds}, got {value!r}.")


def check_count(name: str, value: int, low: int) -> None:
    """Raise a ValueError that names the argument when it is no integer, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"`{name}`: expected an integer >= {low}, got {value!r}.")
