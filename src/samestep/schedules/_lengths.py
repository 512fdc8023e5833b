"""Lengths in steps, samples, tokens or epochs, and the batch sizes that turn one into the other.

A schedule counts updates. How many updates 30 epochs are depends on the global batch at every update on the way,
so lengths are converted by adding up batch sizes, in whole numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from samestep.schedules import _check

__all__ = ["BatchSizes", "Unit", "length", "seen"]

Unit = Literal["steps", "samples", "tokens", "epochs"]
_UNITS = ("steps", "samples", "tokens", "epochs")


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size as a function of the step: constant, or growing in stages.

    Args:
        sizes: samples per update in each stage, at least 1.
        starts: steps at which sizes[1], sizes[2], ... begin, in order; one fewer than `sizes`.

    Raises:
        ValueError: a bad argument.

    Example:
        >>> from samestep import schedules
        >>> sizes = schedules.BatchSizes([256, 512], [1000])
        >>> sizes(999), sizes(1000), sizes.samples(1001)
        (256, 512, 256512)
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        starts = _check.increasing("starts", self.starts)
        sizes = _check.factors("sizes", self.sizes)
        if len(sizes) != len(starts) + 1:
            raise ValueError(f"`sizes`: expected one more than the {len(starts)} starts, got {len(sizes)}.")
        whole = tuple(_check.whole(f"sizes[{i}]", size, least=1) for i, size in enumerate(self.sizes))
        object.__setattr__(self, "sizes", whole)
        object.__setattr__(self, "starts", starts)

    def __call__(self, step: int) -> int:
        """Return the samples in the update after `step` applied ones."""
        return self.sizes[bisect_right(self.starts, _check.whole("step", step))]

    def samples(self, steps: int) -> int:
        """Return the samples seen after `steps` updates."""
        _check.whole("steps", steps)
        begins = (0, *self.starts)
        ends = (*self.starts, steps)
        return sum(
            size * max(0, min(end, steps) - begin) for size, begin, end in zip(self.sizes, begins, ends)
        )

    def steps(self, samples: int) -> tuple[int, int]:
        """Return how many updates fit into so many samples, and the samples that are left over."""
        left, begins, ends = _check.whole("samples", samples), (0, *self.starts), self.starts
        for size, begin, end in zip(self.sizes, begins, ends):
            if left < size * (end - begin):
                return begin + left // size, left % size
            left -= size * (end - begin)
        return begins[-1] + left // self.sizes[-1], left % self.sizes[-1]


def length(
    amount: float | Fraction,
    unit: Unit,
    *,
    batch_sizes: int | BatchSizes = 1,
    samples_per_epoch: int | None = None,
    tokens_per_sample: int | None = None,
    rounding: Literal["up", "down", "exact"] = "up",
) -> int:
    """Return a length in steps, for the functions of this package.

    Args:
        amount: at least 0; a float is taken as the decimal it prints as, so that 0.1 epochs are a tenth.
        unit: of `amount`.
        batch_sizes: samples per update; not needed for steps.
        samples_per_epoch: needed for epochs.
        tokens_per_sample: needed for tokens.
        rounding: "up" counts the update in which the amount is reached, "down" only whole updates, "exact" refuses
            an amount that falls inside an update.

    Raises:
        ValueError: a bad or missing argument, or no whole number of updates under "exact".

    Example:
        >>> from samestep import schedules
        >>> schedules.length(5, "epochs", batch_sizes=256, samples_per_epoch=1281167)
        25023
        >>> schedules.length(3000, "samples", batch_sizes=schedules.BatchSizes([100, 500], [10]))
        14
    """
    _check.choice("rounding", rounding, ("up", "down", "exact"))
    scale = _samples_per(unit, samples_per_epoch, tokens_per_sample)
    if not isinstance(amount, Fraction):
        _check.factor("amount", amount)
    wanted = (amount if isinstance(amount, Fraction) else Fraction(str(amount))) * scale
    if wanted < 0:
        raise ValueError(f"`amount`: expected at least 0, got {amount}.")
    whole = wanted.numerator // wanted.denominator
    sizes = BatchSizes((1,)) if unit == "steps" else _as_sizes(batch_sizes)
    steps, left = sizes.steps(whole)
    inside = left > 0 or wanted != whole
    if inside and rounding == "exact":
        raise ValueError(
            f"`amount`: expected whole updates, got {amount} {unit}, which end inside the update after {steps}. "
            "Choose rounding='up' or 'down'."
        )
    return steps + (1 if inside and rounding == "up" else 0)


def seen(
    steps: int,
    unit: Unit,
    *,
    batch_sizes: int | BatchSizes = 1,
    samples_per_epoch: int | None = None,
    tokens_per_sample: int | None = None,
) -> Fraction:
    """Return how much has been seen after `steps` updates, exactly; the inverse of `length`.

    Args:
        steps: updates.
        unit: of the answer.
        batch_sizes: samples per update; not needed for steps.
        samples_per_epoch: needed for epochs.
        tokens_per_sample: needed for tokens.

    Raises:
        ValueError: a bad or missing argument.

    Example:
        >>> from samestep import schedules
        >>> float(schedules.seen(10, "epochs", batch_sizes=25, samples_per_epoch=1000))
        0.25
    """
    scale = _samples_per(unit, samples_per_epoch, tokens_per_sample)
    sizes = BatchSizes((1,)) if unit == "steps" else _as_sizes(batch_sizes)
    return Fraction(sizes.samples(_check.whole("steps", steps))) / scale


def _as_sizes(batch_sizes: int | BatchSizes) -> BatchSizes:
    if isinstance(batch_sizes, BatchSizes):
        return batch_sizes
    return BatchSizes((_check.whole("batch_sizes", batch_sizes, least=1),))


def _samples_per(unit: str, samples_per_epoch: int | None, tokens_per_sample: int | None) -> Fraction:
    _check.choice("unit", unit, _UNITS)
    if unit == "epochs":
        return Fraction(_check.whole("samples_per_epoch", samples_per_epoch, least=1))
    if unit == "tokens":
        return Fraction(1, _check.whole("tokens_per_sample", tokens_per_sample, least=1))
    return Fraction(1)
