"""Schedules of flat phases with jumps between them. A step at a boundary already belongs to what begins there."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from samestep.schedules import _check
from samestep.schedules._base import Schedule

__all__ = ["absolute", "multistep", "piecewise", "step"]


@dataclass(frozen=True, repr=False)
class _Step(Schedule, kind="step"):
    size: int
    gamma: float

    def __post_init__(self) -> None:
        self._set(size=_check.whole("size", self.size, least=1), gamma=_check.factor("gamma", self.gamma))

    def _factor(self, step: int) -> float:
        return float(self.gamma ** (step // self.size))

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return (self.size,) if end is None else tuple(range(self.size, end + 1, self.size))

    def describe(self) -> str:
        return f"times {self.gamma:g} every {self.size} steps"


@dataclass(frozen=True, repr=False)
class _Multistep(Schedule, kind="multistep"):
    milestones: tuple[int, ...]
    gamma: float

    def __post_init__(self) -> None:
        milestones = _check.increasing("milestones", self.milestones)
        self._set(milestones=milestones, gamma=_check.factor("gamma", self.gamma))

    def _factor(self, step: int) -> float:
        # A power in place of a running product: the product drifts, and cast to float32 it shows.
        return float(self.gamma ** bisect_right(self.milestones, step))

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return self.milestones

    def describe(self) -> str:
        return f"times {self.gamma:g} at steps {', '.join(map(str, self.milestones)) or '(none)'}"


@dataclass(frozen=True, repr=False)
class _Piecewise(Schedule, kind="piecewise"):
    values: tuple[float, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        values, starts = _check.factors("values", self.values), _check.increasing("starts", self.starts)
        if len(values) != len(starts) + 1:
            raise ValueError(
                f"`values`: expected one more than the {len(starts)} boundaries, got {len(values)}. The first "
                "value runs from step 0 and needs no boundary."
            )
        self._set(values=values, starts=starts)

    def _factor(self, step: int) -> float:
        return self.values[bisect_right(self.starts, step)]

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return self.starts

    def describe(self) -> str:
        rest = (f", {value:g} from step {at}" for value, at in zip(self.values[1:], self.starts))
        return f"{self.values[0]:g}{''.join(rest)}"


def absolute(lr_value: float, base_lr: float) -> float:
    """Return the factor that gives the LR `lr_value` in a param group whose base LR is `base_lr`.

    For recipes that speak in absolute LRs: all factors of one schedule are relative to the same base.

    Args:
        lr_value: LR wanted, at least 0.
        base_lr: LR at factor 1, above 0.

    Raises:
        ValueError: an LR is negative, not finite, or `base_lr` is 0.

    Example:
        >>> from samestep import schedules
        >>> schedules.linear_warmup(500, schedules.absolute(0.005, base_lr=0.02))
        linear_warmup(500, 0.25)
    """
    return _check.factor("lr_value", lr_value) / _check.factor("base_lr", base_lr, positive=True)


def step(size: int, gamma: float) -> Schedule:
    """Return ``gamma ** (step // size)``: the same drop again and again.

    Args:
        size: steps from one drop to the next, at least 1.
        gamma: ratio of one drop, at least 0.

    Example:
        >>> from samestep import schedules
        >>> [schedules.step(2, 0.5)(step) for step in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    return _Step(size, gamma)


def multistep(milestones: list[int], gamma: float) -> Schedule:
    """Return ``gamma ** k``, with k the number of milestones at or below the step.

    Args:
        milestones: steps in order; the update at a milestone already uses the lower LR. The same milestone twice
            drops twice.
        gamma: ratio of one drop, at least 0.

    Example:
        >>> from samestep import schedules
        >>> [schedules.multistep([2, 3], 0.5)(step) for step in range(5)]
        [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    return _Multistep(tuple(milestones) if isinstance(milestones, list) else milestones, gamma)


def piecewise(values: list[float], starts: list[int]) -> Schedule:
    """Return ``values[k]``, with k the number of `starts` at or below the step.

    Args:
        values: factors, one more than `starts`.
        starts: steps in order at which values[1], values[2], ... begin. Equal neighbours skip a value.

    Example:
        >>> from samestep import schedules
        >>> [schedules.piecewise([1, 0.1, 0.5], [2, 3])(step) for step in range(5)]
        [1.0, 1.0, 0.1, 0.5, 0.5]
    """
    return _Piecewise(
        tuple(values) if isinstance(values, list) else values,
        tuple(starts) if isinstance(starts, list) else starts,
    )
