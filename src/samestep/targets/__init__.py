"""Start values computed from all workers' data, ready for `start.initialize`.

Each function takes this worker's rows or batches and a `Pool`, and returns the same bits on every worker: rows may
be split over any number of workers in any way. Functions that run a module see whole batches; for them it does not
matter which worker holds which batch.
"""

from __future__ import annotations

from samestep.targets._codebook import ema_start, ema_update, restart_dead
from samestep.targets._exact import cross_moments
from samestep.targets._layers import batch_norm, lsuv, weight_norm
from samestep.targets._statistics import RunningNormalizer, act_norm, normalizer
from samestep.targets._whitening import whitening

__all__ = [
    "RunningNormalizer",
    "act_norm",
    "batch_norm",
    "cross_moments",
    "ema_start",
    "ema_update",
    "lsuv",
    "normalizer",
    "restart_dead",
    "weight_norm",
    "whitening",
]
