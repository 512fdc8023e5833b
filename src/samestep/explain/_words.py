"""Numbers, names and ranks as words."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["each", "names", "number", "on_ranks", "rows"]


def number(value: float, right: float | None = None) -> str:
    """Return a figure with four digits, or as many as it takes to see that it is not `right`.

    Example:
        >>> number(3.66666), number(4.000004, 4.0)
        ('3.667', '4.000004')
    """
    if not math.isfinite(value):
        return "infinite" if value > 0 else "not a number"
    digits = 4
    while right is not None and abs(value - right) > 1e-9 * abs(right) and digits < 10:
        if f"{value:.{digits}g}" != f"{right:.{digits}g}":
            break
        digits += 1
    return f"{0.0 if abs(value) < 1e-11 else value:.{digits}g}"


def each(values: Sequence[float], right: float | None = None) -> str:
    """Return a list of figures; one figure and "each" where they are all alike.

    Example:
        >>> each([0.25, 0.25]), each([1.0, 0.0])
        ('0.25 each', '1, 0')
    """
    words = [number(value, right) for value in values]
    if len(words) > 1 and len(set(words)) == 1:
        return f"{words[0]} each"
    return ", ".join(words)


def names(items: Sequence[str], most: int = 3) -> str:
    """Return names in back-ticks, the first few of them.

    Example:
        >>> names(["a", "b", "c", "d"], most=2)
        '`a`, `b` and 2 more'
    """
    text = ", ".join(f"`{item}`" for item in items[:most])
    return text + (f" and {len(items) - most} more" if len(items) > most else "")


def rows(indices: Sequence[int], most: int = 4) -> str:
    """Return sample numbers.

    Example:
        >>> rows([3, 4])
        'samples 3, 4'
    """
    text = ", ".join(str(i) for i in indices[:most])
    more = f" and {len(indices) - most} more" if len(indices) > most else ""
    return ("sample " if len(indices) == 1 else "samples ") + text + more


def on_ranks(ranks: Sequence[int], world_size: int) -> str:
    """Return on which workers.

    Example:
        >>> on_ranks([1], 4), on_ranks([0, 1], 2)
        ('on rank 1', 'on all ranks')
    """
    if len(ranks) == world_size:
        return "on all ranks"
    return ("on rank " if len(ranks) == 1 else "on ranks ") + ", ".join(map(str, ranks))
