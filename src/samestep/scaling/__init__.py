"""Carry a recipe from the batch it was tuned for to another one, and give parameters their own rates and decays.

Everything starts from the stored *reference* pair (rate, global batch), never from a rate that is in use: a run
that restarts, or restarts with other workers, gets the same numbers again. Nothing is clamped: a scale at which a
rule has no meaning is refused, with the largest one that has.
"""

from samestep.scaling._groups import param_groups
from samestep.scaling._rules import Rule, Scaled, adascale_gain, noise_scale, scale

__all__ = ["Rule", "Scaled", "adascale_gain", "noise_scale", "param_groups", "scale"]
