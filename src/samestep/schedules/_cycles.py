"""Whole-run shapes that rise as well as fall: trapezoid (warm-up, stable, decay), one cycle, warm restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from samestep.schedules import _check
from samestep.schedules._base import Schedule
from samestep.schedules._warmup import Convention, Warmup, linear_warmup

__all__ = ["one_cycle", "trapezoid", "warm_restarts"]

_DECAYS = ("linear", "cosine", "1-sqrt")


def _left(shape: str, done: int, of: int) -> float:
    """Return how much of a fall is still to come after `done` of `of` steps: 1 at its beginning, 0 at its end."""
    if shape == "cosine":
        return (1.0 + math.cos(math.pi * done / of)) / 2.0
    return 1.0 - math.sqrt(done / of) if shape == "1-sqrt" else (of - done) / of


@dataclass(frozen=True, repr=False)
class _Trapezoid(Schedule, kind="trapezoid"):
    steps: int
    warmup_steps: int
    decay_steps: int
    start_factor: float = 0.0
    final: float = 0.0
    decay: str = "linear"
    convention: str = "from_start"

    def __post_init__(self) -> None:
        steps, decay_steps = _check.whole("steps", self.steps), _check.whole("decay_steps", self.decay_steps)
        warmup_steps = _check.whole("warmup_steps", self.warmup_steps)
        convention: Any = self.convention
        warmup = linear_warmup(warmup_steps, self.start_factor, convention)
        assert isinstance(warmup, Warmup)
        if warmup.length + decay_steps > steps:
            raise ValueError(
                f"`steps`: expected at least the {warmup.length} of the warm-up and the {decay_steps} of the "
                f"decay, got {steps}. Shorten them or lengthen the run."
            )
        self._set(steps=steps, warmup_steps=warmup_steps, decay_steps=decay_steps)
        self._set(start_factor=float(self.start_factor), final=_check.factor("final", self.final))
        self._set(decay=_check.choice("decay", self.decay, _DECAYS))
        object.__setattr__(self, "_warmup", warmup)  # made of the fields, so not one itself

    def _factor(self, step: int) -> float:
        warmup: Warmup = self._warmup  # type: ignore[attr-defined]
        since = step - (self.steps - self.decay_steps)
        if step < warmup.length:
            return warmup._factor(step)
        if since < 0:
            return 1.0
        if step >= self.steps:
            return self.final
        return self.final + (1.0 - self.final) * _left(self.decay, since, self.decay_steps)

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        warmup: Warmup = self._warmup  # type: ignore[attr-defined]
        return (warmup.length, self.steps - self.decay_steps, self.steps)

    def describe(self) -> str:
        return (
            f"warm-up from {self.start_factor:g} over {self.warmup_steps} steps, stable at 1, {self.decay} decay "
            f"to {self.final:g} over the last {self.decay_steps} of {self.steps} steps"
        )


@dataclass(frozen=True, repr=False)
class _OneCycle(Schedule, kind="one_cycle"):
    steps: int
    peak: int | None = None
    initial: float = 0.04
    final: float = 4e-6
    shape: str = "cosine"

    def __post_init__(self) -> None:
        steps = _check.whole("steps", self.steps)
        peak = max(0, 3 * steps // 10 - 1) if self.peak is None else _check.whole("peak", self.peak)
        if peak > max(0, steps - 1):
            raise ValueError(f"`peak`: expected at most the last update, {max(0, steps - 1)}, got {peak}.")
        self._set(steps=steps, peak=peak, shape=_check.choice("shape", self.shape, ("linear", "cosine")))
        self._set(initial=_check.factor("initial", self.initial), final=_check.factor("final", self.final))

    def _factor(self, step: int) -> float:
        peak, last = self.peak or 0, self.steps - 1
        if step < peak:
            return 1.0 - (1.0 - self.initial) * _left(self.shape, step, peak)
        if step == peak and self.steps:
            return 1.0
        if step >= last:
            return self.final
        return self.final + (1.0 - self.final) * _left(self.shape, step - peak, last - peak)

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return (self.peak or 0, self.steps - 1)

    def describe(self) -> str:
        return f"one {self.shape} cycle of {self.steps} steps: {self.initial:g}, 1 at {self.peak}, {self.final:g}"


@dataclass(frozen=True, repr=False)
class _WarmRestarts(Schedule, kind="warm_restarts"):
    steps: int
    growth: int = 1
    final: float = 0.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        self._set(steps=_check.whole("steps", self.steps, least=1))
        self._set(growth=_check.whole("growth", self.growth, least=1))
        self._set(final=_check.factor("final", self.final), gamma=_check.factor("gamma", self.gamma))

    def _factor(self, step: int) -> float:
        cycle, length, since = 0, self.steps, step
        if self.growth == 1:
            cycle, since = divmod(step, length)
        while since >= length:
            since -= length
            length *= self.growth
            cycle += 1
        peak = float(self.gamma**cycle)
        return self.final + (peak - self.final) * _left("cosine", since, length)

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        found, length = [self.steps], self.steps * self.growth
        while end is not None and found[-1] + length <= end:
            found.append(found[-1] + length)
            length *= self.growth
        return tuple(found)

    def describe(self) -> str:
        grow = f", each {self.growth} times as long as the last" if self.growth > 1 else ""
        peaks = f", each peak {self.gamma:g} times the last" if self.gamma != 1.0 else ""
        return f"cosine cycles from 1 to {self.final:g}, the first {self.steps} steps long{grow}{peaks}"


def trapezoid(
    steps: int,
    warmup_steps: int,
    decay_steps: int,
    start_factor: float = 0.0,
    final: float = 0.0,
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear",
    convention: Convention = "from_start",
) -> Schedule:
    """Return a warm-up, a stable phase at 1 and a decay: WSD.

    Args:
        steps: length of it all; at step `steps` the factor is `final` exactly, and stays there.
        warmup_steps: of the linear warm-up; 0 is none.
        decay_steps: the last steps, in which the factor falls; 0 is a jump at the end.
        start_factor: of the warm-up.
        final: factor at the end.
        decay: how it falls; "1-sqrt" is ``1 - sqrt(fraction done)``, steep first.
        convention: of the warm-up, as in `linear_warmup`.

    Raises:
        ValueError: warm-up and decay do not fit into `steps`, or another bad argument.

    Example:
        >>> from samestep import schedules
        >>> [schedules.trapezoid(8, 2, 4)(step) for step in range(9)]
        [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]

    Reference: Haegele et al., Scaling laws and compute-optimal training beyond fixed durations, 2024 (1-sqrt).
    """
    return _Trapezoid(steps, warmup_steps, decay_steps, start_factor, final, decay, convention)


def one_cycle(
    steps: int,
    peak: int | None = None,
    initial: float = 0.04,
    final: float = 4e-6,
    shape: Literal["linear", "cosine"] = "cosine",
) -> Schedule:
    """Return one rise from `initial` to 1 and one fall to `final`, which the last update uses.

    Args:
        steps: number of updates; the last one, ``steps - 1``, and all after it use `final`.
        peak: the update that uses 1; by default the last one of the first three tenths.
        initial: factor at update 0.
        final: factor at the last update.
        shape: of both halves.

    Raises:
        ValueError: `peak` lies past the last update, or another bad argument.

    Example:
        >>> from samestep import schedules
        >>> [schedules.one_cycle(5, peak=2, initial=0.5, final=0.0, shape="linear")(step) for step in range(6)]
        [0.5, 0.75, 1.0, 0.5, 0.0, 0.0]

    Reference: Smith and Topin, Super-convergence, 2018.
    """
    return _OneCycle(steps, peak, initial, final, shape)


def warm_restarts(steps: int, growth: int = 1, final: float = 0.0, gamma: float = 1.0) -> Schedule:
    """Return cosine decays from 1 towards `final`, one after the other, each starting at its peak again.

    The end of a cycle is excluded: `final` itself is never used, its step is the first of the next cycle.

    Args:
        steps: length of the first cycle, at least 1.
        growth: each cycle is this many times as long as the one before; a whole number, so that restarts are.
        final: where each cycle heads.
        gamma: each peak is this times the one before.

    Example:
        >>> from samestep import schedules
        >>> [round(schedules.warm_restarts(4)(step), 5) for step in range(5)]
        [1.0, 0.85355, 0.5, 0.14645, 1.0]
        >>> schedules.warm_restarts(4, growth=2).boundaries(100)
        (4, 12, 28, 60)

    Reference: Loshchilov and Hutter, SGDR, 2017, equation 5.
    """
    return _WarmRestarts(steps, growth, final, gamma)
