"""Why a step on N workers is not the step on one worker: which stage, which tensor, which ranks, and the reason.

::

    one worker:   initial ── samples ── forward ── backward ── mean ── clip ── update ── buffers
    whole batch      │          │       by module  by module gradient    │        │         │
                     ▼          ▼          ▼          ▼         ▼        ▼        ▼         ▼
    N workers:   same bits? once each?  equal?    multiple?   sum of   equal?  multiple?  equal?
                                                           w x local?

Everything runs in float64, where rounding cannot be taken for a fault nor a fault for rounding. One step is
looked at, and only what float64 shows: a kernel or a cast that exists in low precision only is seen in the
figures of `Explanation.as_built`, not judged. Steps from which nothing could be learned are refused.
"""

from __future__ import annotations

from samestep.explain._explanation import AsBuilt, Explanation, Finding
from samestep.explain._program import Program, by_train_step
from samestep.explain._run import many, one_step

__all__ = ["AsBuilt", "Explanation", "Finding", "Program", "by_train_step", "many", "one_step"]
