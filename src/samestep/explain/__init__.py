"""Why a step on N workers is not the step on one worker: which stage, which tensor, which ranks, and the reason.

::

    one worker, whole batch:  initial values ─ samples ─ forward ─ backward ─ mean gradient ─ clip ─ update ─ buffers
                                    │             │          │          │            │          │       │         │
    N workers, each stage           ▼             ▼          ▼          ▼            ▼          ▼       ▼         ▼
    given the reference's:      same bits?   each once?   module by module     sum of w x local?   factor?   equal?

Everything runs in float64, where rounding cannot be taken for a fault nor a fault for rounding. One step is
looked at, and only what float64 shows: a kernel or a cast that exists in low precision only is seen in the
figures of `Explanation.as_built`, not judged. Steps from which nothing could be learned are refused.
"""

from __future__ import annotations

from samestep.explain._explanation import AsBuilt, Explanation, Finding
from samestep.explain._program import Program
from samestep.explain._run import many, one_step

__all__ = ["AsBuilt", "Explanation", "Finding", "Program", "many", "one_step"]
