"""LR schedules as data: pure functions of the number of applied updates, that return a factor of the base LR.

See `Schedule` for how they are joined, and `linear_warmup` for the conventions of warm-ups.

Example:
    >>> from samestep import schedules
    >>> schedule = schedules.multistep([30, 60, 80], 0.1) * schedules.linear_warmup(5, 0.1)
    >>> schedule.describe()
    'times 0.1 at steps 30, 60, 80, times linear warm-up from 0.1 over 5 steps'
"""

from samestep.schedules._base import Schedule, from_dict
from samestep.schedules._cycles import one_cycle, trapezoid, warm_restarts
from samestep.schedules._decays import cosine, exponential, inverse_sqrt, linear, polynomial
from samestep.schedules._expression import parse
from samestep.schedules._joined import constant, maximum, minimum
from samestep.schedules._lengths import BatchSizes, Unit, length, seen
from samestep.schedules._steps import absolute, multistep, piecewise, step
from samestep.schedules._warmup import (
    Convention,
    constant_warmup,
    exponential_warmup,
    gradual_warmup,
    linear_warmup,
)
from samestep.schedules._with_warmup import Combination, with_warmup

__all__ = [
    "BatchSizes",
    "Combination",
    "Convention",
    "Schedule",
    "Unit",
    "absolute",
    "constant",
    "constant_warmup",
    "cosine",
    "exponential",
    "exponential_warmup",
    "from_dict",
    "gradual_warmup",
    "inverse_sqrt",
    "length",
    "linear",
    "linear_warmup",
    "maximum",
    "minimum",
    "multistep",
    "one_cycle",
    "parse",
    "piecewise",
    "polynomial",
    "seen",
    "step",
    "trapezoid",
    "warm_restarts",
    "with_warmup",
]
