"""What a recipe does to the momentum history when the learning rate changes, as data.

Every policy answers one question: by which factor is the history of the *velocity form* (``V = mu V + lr g``)
multiplied before the update that uses the new rate? 1.0 means that it is left alone.

Rule for a rate of 0, the same for all policies: *from* 0 the factor is 1.0, because a history that was built at
rate 0 has nothing in it to rescale; *to* 0 the factor is what the policy says for the quotient 0, so that a
correcting policy clears the history and `frozen` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from samestep.errors import SpecError

__all__ = ["Policy", "every_change", "free", "frozen", "policy_from_dict", "relative", "threshold"]

# Caffe2 trainers keep a floor under both denominators of the ratio that they compare with the threshold.
_DENOMINATOR_FLOOR = 1e-10


@dataclass(frozen=True)
class Policy:
    """Base of the five policies: frozen, comparable, picklable data, callable with the two rates."""

    name: ClassVar[str] = ""

    def __call__(self, old_lr: float, new_lr: float) -> float:
        """Return the factor on the velocity-form history; 1.0 means none.

        Args:
            old_lr: rate of the last applied update.
            new_lr: rate of the update to come.

        Raises:
            ValueError: when a rate is negative or not finite.
        """
        _check_rate("old_lr", old_lr)
        _check_rate("new_lr", new_lr)
        if old_lr == new_lr or old_lr == 0.0:
            return 1.0
        return self._factor(old_lr, new_lr)

    def _factor(self, old_lr: float, new_lr: float) -> float:
        raise NotImplementedError(f"{type(self).__name__} does not say what its factor is")

    def to_dict(self) -> dict[str, object]:
        """Return the policy as JSON data, for `policy_from_dict`."""
        return {"policy": self.name, **asdict(self)}


@dataclass(frozen=True)
class _Free(Policy):
    name: ClassVar[str] = "free"

    def _factor(self, old_lr: float, new_lr: float) -> float:
        return new_lr / old_lr


@dataclass(frozen=True)
class _Frozen(Policy):
    name: ClassVar[str] = "frozen"

    def _factor(self, old_lr: float, new_lr: float) -> float:
        return 1.0


@dataclass(frozen=True)
class _EveryChange(Policy):
    name: ClassVar[str] = "every_change"
    times: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or self.times != int(self.times) or self.times < 1:
            raise ValueError(f"`times`: expected an integer >= 1, got {self.times!r}.")
        object.__setattr__(self, "times", int(self.times))

    def _factor(self, old_lr: float, new_lr: float) -> float:
        return float((new_lr / old_lr) ** self.times)


@dataclass(frozen=True)
class _Threshold(Policy):
    name: ClassVar[str] = "threshold"
    ratio: float = 1.1
    floor: float = 1e-7

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio >= 1.0):
            raise ValueError(
                f"`ratio`: expected a finite number >= 1, got {self.ratio!r}. Give for example 1.1."
            )
        _check_rate("floor", self.floor)

    def compared(self, old_lr: float, new_lr: float) -> float:
        """Return the number that is compared with `ratio`: the larger of new/old and old/new.

        Float64 quotient of the two rates rounded to float32; each denominator is at least 1e-10.

        Example:
            >>> round(threshold().compared(1.0, 1.1), 12)
            1.100000023842
        """
        old, new = _single(old_lr), _single(new_lr)
        return max(new / max(old, _DENOMINATOR_FLOOR), old / max(new, _DENOMINATOR_FLOOR))

    def _factor(self, old_lr: float, new_lr: float) -> float:
        if _single(old_lr) > self.floor and self.compared(old_lr, new_lr) > self.ratio:
            return _single_quotient(new_lr, old_lr)
        return 1.0


@dataclass(frozen=True)
class _Relative(Policy):
    name: ClassVar[str] = "relative"
    tolerance: float = 1e-7

    def __post_init__(self) -> None:
        _check_rate("tolerance", self.tolerance)

    def _factor(self, old_lr: float, new_lr: float) -> float:
        old, new = _single(old_lr), _single(new_lr)
        if abs(new - old) > self.tolerance * abs(new) and old > 0.0:
            return _single_quotient(new_lr, old_lr)
        return 1.0


def free() -> Policy:
    """Return the policy of the gradient form: the history follows every change of the rate.

    An optimizer in gradient form (torch SGD) does this by itself: nothing in it is touched. A velocity-form
    history is multiplied by new/old, in float64.

    Example:
        >>> free()(0.5, 0.25)
        0.5

    Reference: Goyal et al., Accurate, Large Minibatch SGD, 2017, remark 2 (momentum correction).
    """
    return _Free()


def frozen() -> Policy:
    """Return the policy of the plain velocity form: the history is never corrected.

    Example:
        >>> frozen()(0.5, 0.25)
        1.0
    """
    return _Frozen()


def threshold(ratio: float = 1.1, floor: float = 1e-7) -> _Threshold:
    """Return Detectron's policy: correct when the rate changes by more than `ratio`, between two updates.

    The test is strict and compares two consecutive updates only, in the float64 quotient of the rates rounded to
    float32, so that 1.0 -> 1.1 is corrected and 0.1 -> 0.11 is not. The factor is the float32 quotient. Skipped
    changes are never made up for, and a slow warm-up is therefore never corrected.

    Args:
        ratio: changes up to this factor, up or down, are left alone; >= 1.
        floor: an old rate (as float32, compared in float64) up to this one is not corrected.

    Raises:
        ValueError: when `ratio` is below 1 or not finite, or `floor` negative or not finite.

    Example:
        >>> threshold()(1.0, 0.5)
        0.5
        >>> threshold()(1.0, 0.95)
        1.0
    """
    return _Threshold(float(ratio), float(floor))


def relative(tolerance: float = 1e-7) -> Policy:
    """Return the policy of the nonlocal trainer: correct every change that float32 rates can show.

    Args:
        tolerance: changes up to this fraction of the new rate are left alone; >= 0.

    Raises:
        ValueError: when `tolerance` is negative or not finite.

    Example:
        >>> relative()(0.5, 0.25)
        0.5
    """
    return _Relative(float(tolerance))


def every_change(times: int = 1) -> Policy:
    """Return the policy of the VRD trainer: correct whenever the two rates differ, by their float64 quotient.

    The same factors as `free`; on a gradient-form optimizer it differs in one point only: passing through a rate
    of 0 clears the history, as it does in the velocity form.

    Args:
        times: how many times over the factor is applied. 1 is right; the VRD trainer on n devices did it n times,
            by a mistake that only an exact repetition of its runs wants back.

    Raises:
        ValueError: when `times` is no integer of at least 1.

    Example:
        >>> every_change()(0.5, 0.25)
        0.5
    """
    return _EveryChange(times)


_KINDS: dict[str, type[Policy]] = {
    kind.name: kind for kind in (_EveryChange, _Free, _Frozen, _Relative, _Threshold)
}


def policy_from_dict(data: Mapping[str, object]) -> Policy:
    """Return the policy that `Policy.to_dict` wrote.

    Args:
        data: a mapping with the key "policy" and the settings of that policy.

    Raises:
        SpecError: when the policy is unknown, or a setting is unknown, missing or no number.

    Example:
        >>> policy_from_dict(threshold(1.5).to_dict()) == threshold(1.5)
        True
    """
    settings = dict(data)
    name = settings.pop("policy", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SpecError(
            f"`policy`: expected one of {', '.join(sorted(_KINDS))}, got {name!r}.", name="policy"
        )
    expected = asdict(kind())
    if set(settings) != set(expected):
        raise SpecError(
            f"`{name}`: expected the settings {sorted(expected)}, got {sorted(settings)}.", name=str(name)
        )
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"`{key}`: expected a number, got {value!r}.", name=key)
    return kind(**{key: float(str(value)) for key, value in settings.items()})


def _single(value: float) -> float:
    return float(np.float32(value))


def _single_quotient(numerator: float, denominator: float) -> float:
    # The originals divide two float32 numbers and keep the float32 result (0.100000009, not 0.1).
    return float(np.float32(numerator) / np.float32(denominator))


def _check_rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"`{name}`: expected a finite number >= 0, got {value!r}.")
