"""Schedules made of other schedules: one after the other, multiplied, the lowest, the highest."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from samestep.schedules import _check
from samestep.schedules._base import Schedule

__all__ = ["constant", "maximum", "minimum", "product", "sequence"]


@dataclass(frozen=True, repr=False)
class _Constant(Schedule, kind="constant"):
    factor: float = 1.0

    def __post_init__(self) -> None:
        self._set(factor=_check.factor("factor", self.factor))

    def _factor(self, step: int) -> float:
        return self.factor

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return ()

    @property
    def is_constant(self) -> bool:
        return True

    def describe(self) -> str:
        return f"constant {self.factor:g}"


@dataclass(frozen=True, repr=False)
class _Sequence(Schedule, kind="then"):
    parts: tuple[Schedule, ...]
    starts: tuple[int, ...]  # parts[i] runs from starts[i] to starts[i + 1]; starts[0] is 0

    def __post_init__(self) -> None:
        parts, starts = _members("parts", self.parts), _check.increasing("starts", self.starts)
        if len(parts) != len(starts) or starts[0] != 0 or len(set(starts)) != len(starts):
            raise ValueError(f"`starts`: expected {len(parts)} rising steps from 0, got {list(starts)}.")
        self._set(parts=parts, starts=starts)

    def _factor(self, step: int) -> float:
        index = bisect_right(self.starts, step) - 1
        return self.parts[index]._factor(step - self.starts[index])

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        found = list(self.starts)
        for i, (part, start) in enumerate(zip(self.parts, self.starts)):
            last = self.starts[i + 1] if i + 1 < len(self.starts) else end
            if last is not None and end is not None:
                last = min(last, end)
            if last is None or last >= start:
                inside = part.boundaries(None if last is None else last - start)
                found.extend(start + boundary for boundary in inside)
        return tuple(found)

    @property
    def is_constant(self) -> bool:
        return (
            all(part.is_constant for part in self.parts)
            and len({part._factor(0) for part in self.parts}) == 1
        )

    @property
    def never_falls(self) -> bool:
        ends = [
            part._factor(at - start - 1) for part, start, at in zip(self.parts, self.starts, self.starts[1:])
        ]
        begins = [part._factor(0) for part in self.parts[1:]]
        return all(part.never_falls for part in self.parts) and all(a <= b for a, b in zip(ends, begins))

    def describe(self) -> str:
        first, *rest = (part.describe() for part in self.parts)
        return first + "".join(f"; from step {at}: {text}" for at, text in zip(self.starts[1:], rest))

    def __repr__(self) -> str:
        text = f"({self.parts[0]!r})" if isinstance(self.parts[0], _Product) else repr(self.parts[0])
        return text + "".join(
            f".then({part!r}, at={at})" for part, at in zip(self.parts[1:], self.starts[1:])
        )


@dataclass(frozen=True, repr=False)
class _Members(Schedule):
    members: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        self._set(members=_members("members", self.members))

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return tuple(boundary for member in self.members for boundary in member._boundaries(end))

    @property
    def is_constant(self) -> bool:
        return all(member.is_constant for member in self.members)

    @property
    def never_falls(self) -> bool:
        return all(member.never_falls for member in self.members)

    def describe(self) -> str:
        return f"{self.kind} of ({'), ('.join(member.describe() for member in self.members)})"

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(repr, self.members))})"


@dataclass(frozen=True, repr=False)
class _Product(_Members, kind="product"):
    def _factor(self, step: int) -> float:
        # Sorted, so that neither the order nor the grouping of the members changes the last bit.
        return math.prod(sorted(member._factor(step) for member in self.members))

    def describe(self) -> str:
        return ", times ".join(member.describe() for member in self.members)

    def __repr__(self) -> str:
        return " * ".join(map(repr, self.members))


@dataclass(frozen=True, repr=False)
class _Minimum(_Members, kind="minimum"):
    def _factor(self, step: int) -> float:
        return min(member._factor(step) for member in self.members)


@dataclass(frozen=True, repr=False)
class _Maximum(_Members, kind="maximum"):
    def _factor(self, step: int) -> float:
        return max(member._factor(step) for member in self.members)


def _as_schedule(name: str, value: Any) -> Schedule:
    return value if isinstance(value, Schedule) else _Constant(_check.factor(name, value))


def _members(name: str, values: Any) -> tuple[Schedule, ...]:
    if (
        not isinstance(values, (list, tuple))
        or not values
        or not all(isinstance(v, Schedule) for v in values)
    ):
        raise ValueError(f"`{name}`: expected a list of at least one schedule, got {values!r}.")
    return tuple(values)


def _flat(cls: type[_Members], values: tuple[Any, ...]) -> tuple[Schedule, ...]:
    schedules = [_as_schedule(f"argument {i}", value) for i, value in enumerate(values)]
    return tuple(inner for s in schedules for inner in (s.members if isinstance(s, cls) else (s,)))


def constant(factor: float = 1.0) -> Schedule:
    """Return the schedule that never changes.

    Args:
        factor: of the base LR, at least 0.

    Example:
        >>> from samestep import schedules
        >>> schedules.constant(0.5)(1000)
        0.5
    """
    return _Constant(factor)


def sequence(first: Schedule, other: Schedule | float, at: int) -> Schedule:
    """Return `first` before step `at` and `other` from there on, counted anew; see `Schedule.then`."""
    at = _check.whole("at", at)
    later = _as_schedule("other", other)
    # Nested sequences are flattened, so that depth costs nothing and grouping does not change what equals what.
    parts, starts = (first.parts, first.starts) if isinstance(first, _Sequence) else ((first,), (0,))
    tail, offsets = (later.parts, later.starts) if isinstance(later, _Sequence) else ((later,), (0,))
    kept = bisect_right(starts, at - 1)
    parts, starts = parts[:kept] + tail, starts[:kept] + tuple(at + offset for offset in offsets)
    return _Sequence(parts, starts) if len(parts) > 1 else parts[0]


def product(first: Schedule | float, second: Schedule | float) -> Schedule:
    """Return the product of two schedules; see `Schedule`."""
    members = (_as_schedule("other", first), _as_schedule("other", second))
    return _Product(_flat(_Product, members))


def minimum(first: Schedule | float, *others: Schedule | float) -> Schedule:
    """Return the schedule that is, at every step, the lowest of several.

    Args:
        first: a schedule, or a number for a constant one.
        others: more of them.

    Example:
        >>> from samestep import schedules
        >>> [schedules.minimum(schedules.linear(4), 0.5)(step) for step in range(5)]
        [0.5, 0.5, 0.5, 0.25, 0.0]
    """
    return _Minimum(_flat(_Minimum, (first, *others)))


def maximum(first: Schedule | float, *others: Schedule | float) -> Schedule:
    """Return the schedule that is, at every step, the highest of several.

    Args:
        first: a schedule, or a number for a constant one.
        others: more of them.

    Example:
        >>> from samestep import schedules
        >>> [schedules.maximum(schedules.linear(4), 0.5)(step) for step in range(5)]
        [1.0, 0.75, 0.5, 0.5, 0.5]
    """
    return _Maximum(_flat(_Maximum, (first, *others)))
