"""LR schedules as data: pure functions of the number of applied updates, that return a factor of the base LR.

See `Schedule` for how they are joined, and `linear_warmup` for the conventions of warm-ups.

Example:
    >>> from samestep import schedules
    >>> schedule = schedules.multistep([30, 60, 80], 0.1) * schedules.linear_warmup(5, 0.1)
    >>> schedule.describe()
    'times 0.1 at steps 30, 60, 80, times linear warm-up from 0.1 over 5 steps'
"""

from samestep.schedules._base import Schedule, from_dict
from samestep.schedules._decays import cosine, exponential, inverse_sqrt, linear, polynomial
from samestep.schedules._joined import constant, maximum, minimum
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
    "Combination",
    "Convention",
    "Schedule",
    "absolute",
    "constant",
    "constant_warmup",
    "cosine",
    "exponential",
    "exponential_warmup",
    "from_dict",
    "gradual_warmup",
    "inverse_sqrt",
    "linear",
    "linear_warmup",
    "maximum",
    "minimum",
    "multistep",
    "piecewise",
    "polynomial",
    "step",
    "with_warmup",
]
