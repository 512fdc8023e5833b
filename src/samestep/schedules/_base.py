"""What a schedule is, and how schedules are joined.

A schedule is frozen data that is called with the number of applied updates and returns a factor of the base LR.
It never looks at an optimizer, keeps no state and has no memory: the value at step n is the same however one got
there, which is why a resumed run cannot go wrong by it.

::

    a * b             both at once                      a(step) * b(step)
    a.then(b, at=n)   one after the other               a(step) before n, b(step - n) from n on
    minimum(a, b)     the lower of them; also maximum
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from samestep.errors import SpecError
from samestep.schedules import _check

__all__ = ["Schedule", "from_dict"]

_KINDS: dict[str, type[Schedule]] = {}


@dataclass(frozen=True, repr=False)
class Schedule(ABC):
    """A factor of the base LR as a pure function of the number of applied updates.

    Schedules are made by the functions of this package (`cosine`, `linear_warmup`, ...). They compare by value,
    can be keys of a dict, travel by pickle and JSON, and print as an expression that `parse` reads back.

    Example:
        >>> from samestep import schedules
        >>> schedule = schedules.multistep([30, 60], 0.1) * schedules.linear_warmup(5, 0.1)
        >>> [round(schedule(step), 3) for step in (0, 1, 5, 29, 30, 60)]
        [0.1, 0.28, 1.0, 1.0, 0.1, 0.01]
        >>> schedule
        multistep([30, 60], 0.1) * linear_warmup(5, 0.1)
        >>> schedules.from_dict(schedule.to_dict()) == schedule
        True
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if kind:
            cls.kind = kind
            _KINDS[kind] = cls

    @abstractmethod
    def _factor(self, step: int) -> float:
        """Return the factor at a step that is known to be a whole number of at least 0."""

    @abstractmethod
    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        """Return the steps where the formula changes, in any order; a schedule that repeats stops at `end`."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line that says in words what the factor does."""

    def __call__(self, step: int) -> float:
        """Return the factor of the base LR that the update after `step` applied updates uses.

        Args:
            step: whole number of at least 0; 0 is the first update.

        Raises:
            ValueError: `step` is negative or not a whole number.
        """
        if type(step) is not int or step < 0:
            step = _check.whole("step", step)
        return self._factor(step)

    @property
    def is_constant(self) -> bool:
        """Whether the factor is known to be the same at every step."""
        return False

    @property
    def never_falls(self) -> bool:
        """Whether the factor is known never to fall: a constant or a warm-up, but no decay."""
        return self.is_constant

    def boundaries(self, end: int | None = None) -> tuple[int, ...]:
        """Return the steps above 0 at which the formula changes, in order: what a table or a plot must show.

        Args:
            end: leave out what lies above it. Without it, a schedule that repeats for ever gives its first
                repetition only.

        Example:
            >>> from samestep import schedules
            >>> (schedules.cosine(90) * schedules.linear_warmup(5, 0.1)).boundaries()
            (5, 90)
        """
        if end is not None:
            end = _check.whole("end", end)
        return tuple(sorted({b for b in self._boundaries(end) if b > 0 and (end is None or b <= end)}))

    def then(self, other: Schedule, *, at: int) -> Schedule:
        """Return the schedule that is this one before step `at`, and `other` from there on, counted anew.

        Args:
            other: called with `step - at`.
            at: 0 leaves nothing of this schedule.

        Example:
            >>> from samestep import schedules
            >>> schedule = schedules.linear_warmup(2).then(schedules.linear(4), at=2)
            >>> [schedule(step) for step in range(7)]
            [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        joined: Schedule = _joined().sequence(self, other, at)
        return joined

    def __mul__(self, other: Schedule | float) -> Schedule:
        """Return the product with another schedule, or with a number."""
        if not isinstance(other, (Schedule, int, float)):
            return NotImplemented
        product: Schedule = _joined().product(self, other)
        return product

    def __rmul__(self, other: float) -> Schedule:
        if not isinstance(other, (int, float)):
            return NotImplemented
        product: Schedule = _joined().product(other, self)
        return product

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain data for JSON; `from_dict` reads it back."""
        fields = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **fields}

    def __repr__(self) -> str:
        arguments: list[str] = []
        named = ""  # once a default is left out, what follows needs its name
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                named = "named"
                continue
            text = repr(list(value) if isinstance(value, tuple) else value)
            arguments.append(f"{field.name}={text}" if named else text)
        return f"{self.kind}({', '.join(arguments)})"

    def _set(self, **values: Any) -> None:
        # Frozen dataclasses offer no other way to store a checked value in its canonical type.
        for name, value in values.items():
            object.__setattr__(self, name, value)


def from_dict(data: dict[str, Any]) -> Schedule:
    """Return the schedule that `Schedule.to_dict` wrote.

    Args:
        data: as read from JSON.

    Raises:
        SpecError: no such kind of schedule, or an argument is missing, unknown or wrong.

    Example:
        >>> from samestep import schedules
        >>> schedules.from_dict({"kind": "cosine", "steps": 100, "final": 0.1})
        cosine(100, 0.1)
    """
    if not isinstance(data, dict) or data.get("kind") not in _KINDS:
        kind = data.get("kind") if isinstance(data, dict) else data
        raise SpecError(f"`kind`: expected one of {', '.join(sorted(_KINDS))}; got {kind!r}.", name="kind")
    cls = _KINDS[data["kind"]]
    try:
        return cls(**{name: _rich(value) for name, value in data.items() if name != "kind"})
    except SpecError:
        raise
    except (TypeError, ValueError) as error:
        raise SpecError(f"schedule of kind {data['kind']!r}: {error}", name=str(data["kind"])) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return from_dict(value)
    return tuple(_rich(item) for item in value) if isinstance(value, list) else value


def _joined() -> Any:
    # The joined schedules are schedules themselves, so their module needs this one first.
    from samestep.schedules import _joined as joined

    return joined
