"""Smooth decays from 1 to a final factor.

Every shape with a length holds its last value for ever once it is over, and may have length 0 (only the last
value is left) or 1. A step at a boundary already belongs to what begins there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from samestep.schedules import _check
from samestep.schedules._base import Schedule

__all__ = ["cosine", "exponential", "inverse_sqrt", "linear", "polynomial"]


@dataclass(frozen=True, repr=False)
class _Decay(Schedule):
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        self._set(steps=_check.whole("steps", self.steps), final=_check.factor("final", self.final))

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return (self.steps,)

    def describe(self) -> str:
        return f"{self.kind} from 1 to {self.final:g} over {self.steps} steps"


@dataclass(frozen=True, repr=False)
class _Polynomial(_Decay, kind="polynomial"):
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(power=_check.factor("power", self.power, positive=True))

    def _factor(self, step: int) -> float:
        if step >= self.steps:
            return self.final
        left = float(((self.steps - step) / self.steps) ** self.power)
        return self.final + (1.0 - self.final) * left

    def describe(self) -> str:
        return f"{super().describe()}, power {self.power:g}"


@dataclass(frozen=True, repr=False)
class _Linear(_Decay, kind="linear"):
    initial: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(initial=_check.factor("initial", self.initial))

    def _factor(self, step: int) -> float:
        if step >= self.steps:
            return self.final
        return self.initial + (self.final - self.initial) * step / self.steps

    def describe(self) -> str:
        return f"linear from {self.initial:g} to {self.final:g} over {self.steps} steps"


@dataclass(frozen=True, repr=False)
class _Cosine(_Decay, kind="cosine"):
    past_end: str = "hold"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(past_end=_check.choice("past_end", self.past_end, ("hold", "climb")))

    def _factor(self, step: int) -> float:
        if self.steps == 0 or (step >= self.steps and self.past_end == "hold"):
            return self.final
        # The angle is reduced in whole numbers, so that late steps of a climbing cosine lose nothing.
        angle = math.pi * (step % (2 * self.steps)) / self.steps
        return self.final + (1.0 - self.final) * (1.0 + math.cos(angle)) / 2.0

    def describe(self) -> str:
        return super().describe() + (", then up again" if self.past_end == "climb" else "")


@dataclass(frozen=True, repr=False)
class _Exponential(Schedule, kind="exponential"):
    steps: int
    final: float

    def __post_init__(self) -> None:
        final = _check.factor("final", self.final, positive=True)
        self._set(steps=_check.whole("steps", self.steps), final=final)

    def _factor(self, step: int) -> float:
        return self.final if step >= self.steps else float(self.final ** (step / self.steps))

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return (self.steps,)

    def describe(self) -> str:
        return f"exponential from 1 to {self.final:g} over {self.steps} steps"


@dataclass(frozen=True, repr=False)
class _InverseSqrt(Schedule, kind="inverse_sqrt"):
    steps: int

    def __post_init__(self) -> None:
        self._set(steps=_check.whole("steps", self.steps, least=1))

    def _factor(self, step: int) -> float:
        return 1.0 if step <= self.steps else math.sqrt(self.steps / step)

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return (self.steps,)

    def describe(self) -> str:
        return f"1 until step {self.steps}, then with the inverse square root of the step"


def linear(steps: int, final: float = 0.0, initial: float = 1.0) -> Schedule:
    """Return a straight line: ``initial + (final - initial) * step / steps``, then `final` for ever.

    Args:
        steps: length; at step `steps` the factor is `final` exactly. 0 is `final` at once.
        final: factor at the end.
        initial: factor at step 0.

    Example:
        >>> from samestep import schedules
        >>> [schedules.linear(4)(step) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return _Linear(steps, final, initial)


def polynomial(steps: int, final: float = 0.0, power: float = 1.0) -> Schedule:
    """Return ``final + (1 - final) * (1 - step / steps) ** power``, then `final` for ever.

    Args:
        steps: length; at step `steps` the factor is `final` exactly. 0 is `final` at once.
        final: factor at the end.
        power: above 0; 1 is a straight line, 2 a parabola that ends flat.

    Example:
        >>> from samestep import schedules
        >>> [schedules.polynomial(4, power=2)(step) for step in range(5)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    return _Polynomial(steps, final, power)


def cosine(steps: int, final: float = 0.0, past_end: Literal["hold", "climb"] = "hold") -> Schedule:
    """Return half a cosine wave: ``final + (1 - final) * (1 + cos(pi * step / steps)) / 2``.

    Args:
        steps: length; at step `steps` the factor is `final` exactly. 0 is `final` at once.
        final: factor at the end.
        past_end: "hold" stays at `final`; "climb" goes on along the wave, as trainers do that do not look at the
            end of the run (Detectron, torch's CosineAnnealingLR).

    Example:
        >>> from samestep import schedules
        >>> [round(schedules.cosine(4, final=0.1)(step), 6) for step in range(6)]
        [1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1]

    Reference: Loshchilov and Hutter, SGDR, 2017, equation 5, one period.
    """
    return _Cosine(steps, final, past_end)


def exponential(steps: int, final: float) -> Schedule:
    """Return ``final ** (step / steps)``, then `final` for ever: equal ratios in equal times.

    Args:
        steps: length; at step `steps` the factor is `final` exactly. 0 is `final` at once.
        final: factor at the end, above 0. For a ratio per step instead, use ``step(1, gamma)``.

    Example:
        >>> from samestep import schedules
        >>> [schedules.exponential(4, 0.0625)(step) for step in range(6)]
        [1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625]
    """
    return _Exponential(steps, final)


def inverse_sqrt(steps: int) -> Schedule:
    """Return 1 until step `steps`, then ``sqrt(steps / step)``; usually times a warm-up of as many steps.

    Args:
        steps: where the decay begins, at least 1.

    Example:
        >>> from samestep import schedules
        >>> schedule = schedules.inverse_sqrt(4) * schedules.linear_warmup(4)
        >>> [schedule(step) for step in (0, 2, 4, 16, 64)]
        [0.0, 0.5, 1.0, 0.5, 0.25]

    Reference: Vaswani et al., Attention is all you need, 2017, equation 3.
    """
    return _InverseSqrt(steps)
