"""Record runs, and say whether two of them are the same: step by step, phase by phase, tensor by tensor.

::

    script ── record(step, ...) ──> trace A  (1 worker)  ─┐
    script ── record(step, ...) ──> trace B  (4 workers) ─┴─ compare ──> exact | within | different

    phases of a step, in this order:
    samples ─> gradients ─> options ─> optimizer ─> parameters ─> buffers
    (which)    (reduced)    (lr, ...)  (its state)  (after it)

A script calls `record` once before its first step and once after every update, before gradients are cleared. It
does nothing unless ``samestep compare`` (or a `Recorder`) asks for a trace, and never talks to other workers: each
one writes its own file.

What is ``within`` is derived, not chosen: see `bounds`. A comparison that could not have failed proves nothing and
is refused: no gradient, a constant loss, one step only, the same samples on every worker, or rounding so large that
one wrong sample would hide in it. It warns of fewer than four workers, where the order of additions cannot show.
"""

from __future__ import annotations

from samestep.compare import _bounds as bounds
from samestep.compare._junit import junit
from samestep.compare._record import Recorder, record
from samestep.compare._result import Cell, Comparison, Difference
from samestep.compare._run import run_script
from samestep.compare._trace import Trace, read
from samestep.compare._verdict import compare

__all__ = [
    "Cell",
    "Comparison",
    "Difference",
    "Recorder",
    "Trace",
    "bounds",
    "compare",
    "junit",
    "read",
    "record",
    "run_script",
]
