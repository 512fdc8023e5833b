"""The four ways to put a warm-up in front of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from samestep.schedules import _check
from samestep.schedules._base import Schedule
from samestep.schedules._warmup import Warmup

__all__ = ["Combination", "with_warmup"]

Combination = Literal["product", "interpolate", "prefix", "overlay"]


@dataclass(frozen=True, repr=False)
class _Replaced(Schedule):
    schedule: Schedule
    warmup: Warmup

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule) or not isinstance(self.warmup, Warmup):
            raise ValueError(
                f"`warmup`: expected a schedule and a warm-up, got {self.schedule!r}, {self.warmup!r}."
            )

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        length = self.warmup.length
        inside = self.warmup.boundaries(length)
        return (*inside, length, *(step for step in self.schedule.boundaries(end) if step > length))

    def describe(self) -> str:
        return f"{self.warmup.describe()} ({self.kind}); {self.schedule.describe()}"

    def __repr__(self) -> str:
        return f"with_warmup({self.schedule!r}, {self.warmup!r}, {self.kind!r})"


@dataclass(frozen=True, repr=False)
class _Overlay(_Replaced, kind="overlay"):
    def _factor(self, step: int) -> float:
        return (self.warmup if step < self.warmup.length else self.schedule)._factor(step)


@dataclass(frozen=True, repr=False)
class _Interpolate(_Replaced, kind="interpolate"):
    def _factor(self, step: int) -> float:
        length = self.warmup.length
        if step >= length:
            return self.schedule._factor(step)
        return self.warmup.toward(step, self.schedule._factor(length))


def with_warmup(schedule: Schedule, warmup: Schedule, combine: Combination = "product") -> Schedule:
    """Return `schedule` with a warm-up in front, combined as one of the four kinds of trainer does.

    With a warm-up of W steps:

    - "product": the warm-up's factor times the schedule's at every step (Detectron);
    - "interpolate": from the start factor to ``schedule(W)``, then the schedule at its own steps (Detectron2,
      video-nonlocal-net);
    - "prefix": the warm-up up to 1, then the schedule from its beginning: it ends W steps later (Transformers,
      torchtitan);
    - "overlay": the warm-up up to 1, then the schedule as if it had run all along, so that the factor may drop
      where they meet (timm; Large-Scale-VRD).

    Args:
        schedule: what follows.
        warmup: made by one of the warm-up functions.
        combine: "product", "interpolate", "prefix" or "overlay".

    Raises:
        ValueError: `warmup` is not a warm-up, or `combine` is none of these.

    Example:
        >>> from samestep import schedules
        >>> warmup = schedules.linear_warmup(4, 0.25)
        >>> schedule = schedules.with_warmup(schedules.cosine(6), warmup, combine="prefix")
        >>> [round(schedule(step), 5) for step in range(7)]
        [0.25, 0.4375, 0.625, 0.8125, 1.0, 0.93301, 0.75]
    """
    how: Any = _check.choice("combine", combine, ("product", "interpolate", "prefix", "overlay"))
    if not isinstance(warmup, Warmup):
        raise ValueError(f"`warmup`: expected a warm-up such as linear_warmup(5, 0.1), got {warmup!r}.")
    if how == "product":
        return schedule * warmup
    if how == "prefix":
        return warmup.then(schedule, at=warmup.length)
    return _Overlay(schedule, warmup) if how == "overlay" else _Interpolate(schedule, warmup)
