"""Warm-ups, under the conventions that trainers use, and the ways to put one in front of a schedule.

What "5 steps of warm-up from 0.1" means differs between trainers. The conventions by name, each from the same
recipe, at updates 0 to 5:

=================  ==========================================  ================================
`convention`       who                                         factors
=================  ==========================================  ================================
"from_start"       Detectron, torch LinearLR, fvcore           0.1  0.28  0.46  0.64  0.82  1
"end_early"        video-nonlocal-net, MMEngine                0.1  0.325 0.55  0.775 1     1
"count_from_one"   torchtitan, nanochat, OLMo-core, Horovod    0.2  0.4   0.6   0.8   1     1
"from_zero"        Transformers, Megatron, Composer, Keras     0    0.2   0.4   0.6   0.8   1
"delayed"          DeepSpeed                                   0    0     0.2   0.4   0.6   0.8
=================  ==========================================  ================================

The last three start from a factor of 0; "from_zero" can do nothing else, and the other two take a start factor too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from samestep.schedules import _check
from samestep.schedules._base import Schedule

__all__ = ["Convention", "constant_warmup", "exponential_warmup", "gradual_warmup", "linear_warmup"]

Convention = Literal["from_start", "end_early", "count_from_one", "from_zero", "delayed"]
_CONVENTIONS = ("from_start", "end_early", "count_from_one", "from_zero", "delayed")


@dataclass(frozen=True, repr=False)
class Warmup(Schedule):
    """A schedule that reaches 1 after `length` steps and stays there, and can also head for another value."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Steps that belong to the warm-up; from this step on the factor is 1."""

    @abstractmethod
    def toward(self, step: int, target: float) -> float:
        """Return the factor at `step` when the warm-up heads for `target` in place of 1."""

    @property
    def never_falls(self) -> bool:
        return self._factor(0) <= 1.0

    def _factor(self, step: int) -> float:
        return 1.0 if step >= self.length else self.toward(step, 1.0)

    def _boundaries(self, end: int | None) -> tuple[int, ...]:
        return (self.length,)


@dataclass(frozen=True, repr=False)
class _Ramp(Warmup):
    steps: int
    start_factor: float = 0.0
    convention: str = "from_start"

    def __post_init__(self) -> None:
        steps, start = _check.whole("steps", self.steps), _check.factor("start_factor", self.start_factor)
        convention = _check.choice("convention", self.convention, _CONVENTIONS)
        if convention == "from_zero" and start != 0.0:
            raise ValueError(
                f"`start_factor`: expected 0 with the convention 'from_zero', got {start}. Take 'from_start'."
            )
        self._set(steps=steps, start_factor=start, convention=convention)

    @property
    def length(self) -> int:
        # The delayed convention is one update behind to the end, so that is where its warm-up ends.
        return self.steps + (1 if self.convention == "delayed" and self.steps else 0)

    def _progress(self, step: int) -> tuple[int, int]:
        # As a pair of whole numbers: a quotient would be rounded before it is used.
        if self.convention == "end_early":
            return (step, self.steps - 1) if self.steps > 1 else (1, 1)
        if self.convention == "count_from_one":
            return step + 1, self.steps
        if self.convention == "delayed":
            return max(0, step - 1), self.steps
        return step, self.steps

    def describe(self) -> str:
        kind = self.kind.replace("_warmup", " warm-up")
        tail = "" if self.convention == "from_start" else f" ({self.convention})"
        return f"{kind} from {self.start_factor:g} over {self.steps} steps{tail}"


@dataclass(frozen=True, repr=False)
class _LinearWarmup(_Ramp, kind="linear_warmup"):
    def toward(self, step: int, target: float) -> float:
        done, of = self._progress(step)
        if done >= of:
            return target
        return self.start_factor + (target - self.start_factor) * done / of


@dataclass(frozen=True, repr=False)
class _ExponentialWarmup(_Ramp, kind="exponential_warmup"):
    start_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.factor("start_factor", self.start_factor, positive=True)

    def toward(self, step: int, target: float) -> float:
        done, of = self._progress(step)
        if done >= of:
            return target
        if done == 0:
            return self.start_factor
        return float(self.start_factor * (target / self.start_factor) ** (done / of))


@dataclass(frozen=True, repr=False)
class _ConstantWarmup(Warmup, kind="constant_warmup"):
    steps: int
    factor: float

    def __post_init__(self) -> None:
        self._set(steps=_check.whole("steps", self.steps), factor=_check.factor("factor", self.factor))

    @property
    def length(self) -> int:
        return self.steps

    def toward(self, step: int, target: float) -> float:
        return self.factor

    def describe(self) -> str:
        return f"constant warm-up at {self.factor:g} for {self.steps} steps"


@dataclass(frozen=True, repr=False)
class _GradualWarmup(Warmup, kind="gradual_warmup"):
    start_factor: float
    increment: float
    hold_steps: int = 1

    def __post_init__(self) -> None:
        start = _check.factor("start_factor", self.start_factor)
        increment = _check.factor("increment", self.increment)
        if start > 1.0:
            raise ValueError(f"`start_factor`: expected at most 1, got {start}.")
        if increment and (1.0 - start) / increment > 1e15:
            raise ValueError(f"`increment`: expected 0 or at least 1e-15, got {increment}: it never arrives.")
        hold = _check.whole("hold_steps", self.hold_steps)
        self._set(start_factor=start, increment=increment, hold_steps=hold)

    @property
    def length(self) -> int:
        if self.increment == 0.0:
            return self.hold_steps
        needed = (1.0 - self.start_factor) / self.increment
        # A quotient of decimals such as 0.3 / 0.1 may land a last bit beside its whole number.
        nearest = round(needed)
        rises = nearest if abs(needed - nearest) <= 1e-9 * max(1.0, needed) else math.ceil(needed)
        return self.hold_steps + rises

    def toward(self, step: int, target: float) -> float:
        return min(target, self.start_factor + self.increment * max(0, step + 1 - self.hold_steps))

    def describe(self) -> str:
        rise = f", then {self.increment:g} more every step" if self.increment else ""
        return f"warm-up at {self.start_factor:g} for {self.hold_steps} steps{rise}"


def linear_warmup(steps: int, start_factor: float = 0.0, convention: Convention = "from_start") -> Schedule:
    """Return a straight line up to 1: ``start_factor + (1 - start_factor) * step / steps``.

    Args:
        steps: 0 is no warm-up.
        start_factor: factor at update 0 under the default convention.
        convention: which trainer's meaning of `steps`; see the table in `samestep.schedules`.

    Raises:
        ValueError: a bad argument, or "from_zero" with a start factor above 0.

    Example:
        >>> from samestep import schedules
        >>> [round(schedules.linear_warmup(5, 0.1)(step), 3) for step in range(7)]
        [0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.0]
        >>> [schedules.linear_warmup(4, convention="count_from_one")(step) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]

    Reference: Goyal et al., Accurate, large minibatch SGD, 2017, section 2.2, gradual warm-up.
    """
    return _LinearWarmup(steps, start_factor, convention)


def exponential_warmup(steps: int, start_factor: float, convention: Convention = "from_start") -> Schedule:
    """Return a rise to 1 by equal ratios: ``start_factor ** (1 - step / steps)``.

    Args:
        steps: 0 is no warm-up.
        start_factor: above 0, and so no use for the convention "from_zero".
        convention: which trainer's meaning of `steps`; see the table in `samestep.schedules`.

    Example:
        >>> from samestep import schedules
        >>> [schedules.exponential_warmup(2, 0.25)(step) for step in range(4)]
        [0.25, 0.5, 1.0, 1.0]
    """
    return _ExponentialWarmup(steps, start_factor, convention)


def constant_warmup(steps: int, factor: float) -> Schedule:
    """Return `factor` before step `steps`, and 1 from there on.

    Args:
        steps: 0 is no warm-up.
        factor: at least 0.

    Example:
        >>> from samestep import schedules
        >>> [schedules.constant_warmup(2, 0.1)(step) for step in range(4)]
        [0.1, 0.1, 1.0, 1.0]

    Reference: Goyal et al., 2017, section 2.2, constant warm-up.
    """
    return _ConstantWarmup(steps, factor)


def gradual_warmup(start_factor: float, increment: float, hold_steps: int = 1) -> Schedule:
    """Return a rise to 1 by a fixed increment at every step, after a hold.

    The three kinds of Large-Scale-VRD are: a hold alone (`increment` 0), a hold and then the rise, and the rise
    alone (`hold_steps` 1: the first update uses the start factor). There they replace the schedule while they
    last: put them in front of it by `with_warmup(..., combine="overlay")`.

    Args:
        start_factor: at most 1; with `absolute`, from LRs.
        increment: added to the factor at each step after the hold; the sum stops at 1.
        hold_steps: updates that use `start_factor`; with 0 the first update is one increment up already.

    Example:
        >>> from samestep import schedules
        >>> [schedules.gradual_warmup(0.25, 0.5, hold_steps=2)(step) for step in range(5)]
        [0.25, 0.25, 0.75, 1.0, 1.0]
    """
    return _GradualWarmup(start_factor, increment, hold_steps)
