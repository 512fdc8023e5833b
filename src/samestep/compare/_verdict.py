"""The verdict on two traces: which cell is exact, within or different, and where the first difference is."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from samestep.compare._allow import Allowance
from samestep.compare._pair import Pair
from samestep.compare._refuse import refusals, warnings
from samestep.compare._result import Cell, Comparison, Difference, Verdict, worse
from samestep.compare._trace import PHASES, Trace, read
from samestep.environment import differences

__all__ = ["compare"]

_CAUSES = {
    "start": "The workers did not begin with the same values: see that rank 0's are broadcast, or seeds agree.",
    "samples": "The global batch holds other samples: see the sampler, its seed and set_epoch.",
    "gradients": "The mean over the global batch differs: see how the loss is weighted, what is reduced, and "
    "layers that mix samples, such as BatchNorm. `samestep explain` says which.",
    "options": "The optimizer was set up otherwise: see whether the rate is scaled by the number of workers.",
    "optimizer": "The optimizer's state does not follow from the gradients: see what is restored on resume.",
    "parameters": "The update does not follow from the gradients: see the rate, decay and clipping.",
    "buffers": "Statistics of the forward are kept per worker: see that they are merged over workers.",
}


def compare(trace_a: Trace | str | Path, trace_b: Trace | str | Path) -> Comparison:
    """Return whether two recorded runs are the same, step by step, phase by phase, tensor by tensor.

    Args:
        trace_a: the reference: a trace or its folder.
        trace_b: the other run, with as many workers or with others.

    Returns:
        The verdicts, the first difference in words, and what the comparison cannot see. ``proves`` is false when
        it could not have failed.

    Raises:
        SpecError: when a folder holds no whole trace.

    Numerics: distances are those of the tensors where both runs kept them, else estimated from sketches to about
        a third; bounds as derived in `bounds`.
    """
    a, b = (t if isinstance(t, Trace) else read(t) for t in (trace_a, trace_b))
    return _Judge(Pair(a, b)).run()


class _Judge:
    """Goes through a pair of traces once."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._allow = Allowance(pair, _batch(pair))
        self._cells: list[Cell] = []
        self._first: Difference | None = None
        self._parted: tuple[int, str, str] | None = None
        self._before: int | None = None

    def run(self) -> Comparison:
        """Return the finished comparison."""
        pair = self._pair
        for step in pair.steps:
            if self._before is not None and step != self._before + 1:
                break  # a gap, which is refused
            self._allow.begin(step, self._before)
            for phase in PHASES:
                cell = self._samples(step) if phase == "samples" else self._phase(phase, step)
                if cell is not None:
                    self._cells.append(cell)
            self._before = step
        verdict: Verdict = "exact"
        for cell in self._cells:
            verdict = worse(verdict, cell.verdict)
        return Comparison(
            verdict=verdict,
            reference=pair.a.name,
            other=pair.b.name,
            world_sizes=(pair.a.world_size, pair.b.world_size),
            cells=tuple(self._cells),
            first=self._first,
            parted=self._parted,
            refusals=tuple(refusals(pair, self._cells, self._allow.smallest_fault)),
            warnings=tuple(warnings(pair, self._cells)),
            unlike=tuple(_unlike(pair.a, pair.b)),
        )

    def _phase(self, phase: str, step: int) -> Cell | None:
        names = self._pair.names(phase, step)
        # A run that was resumed here has the state of this step, not its gradients.
        if not names or (phase == "gradients" and self._before is None):
            return None
        self._look_at_replicas(phase, step, names)
        verdict: Verdict = "exact"
        shown: tuple[float, str, float, float] | None = None  # excess, tensor, gap, allowed
        for name in names:
            gap, ranks = self._pair.gap(phase, name, step)
            if gap == 0.0:
                self._allow.observe(phase, name, gap)
                continue
            self._parted = self._parted or (step, phase, name)
            # After the first difference all others may follow from it, so nothing is explained by rounding.
            judge = self._first is None and math.isfinite(gap)
            allowed = self._allow.of(phase, name, gap) if judge else 0.0
            self._allow.observe(phase, name, gap)
            found: Verdict = "within" if gap <= allowed else "different"
            excess = math.inf if not allowed else gap / allowed
            if found == "different" and self._first is None:
                self._first = self._difference(phase, name, step, ranks, gap, allowed)
            if shown is None or (found == "different" != verdict) or (found == verdict and excess > shown[0]):
                shown = (excess, name, gap, allowed)
            verdict = worse(verdict, found)
        return self._cell(phase, step, verdict, shown)

    def _cell(
        self, phase: str, step: int, verdict: Verdict, shown: tuple[float, str, float, float] | None
    ) -> Cell:
        first = self._first
        if first is not None and first.kind == "replicas" and (first.step, first.phase) == (step, phase):
            return Cell(step, phase, "different", first.tensor, first.relative, 0.0)
        if shown is None:
            return Cell(step, phase, verdict)
        _, name, gap, allowed = shown
        norm = self._pair.norm(phase, name, step)
        judged = self._allow.update_judged if phase in ("parameters", "optimizer") else self._allow.judged
        return Cell(step, phase, verdict, name, _over(gap, norm), _over(allowed, norm), judged)

    def _look_at_replicas(self, phase: str, step: int, names: list[str]) -> None:
        """Find workers of one run that do not agree; buffers may be a worker's own."""
        if phase == "buffers" or self._first is not None:
            return
        for trace in (self._pair.a, self._pair.b):
            for name in names:
                marks = [rank[step].marks.get(phase, {}).get(name, ("missing", "")) for rank in trace.ranks]
                odd = tuple(rank for rank, mark in enumerate(marks) if mark[0] != marks[0][0])
                if odd:
                    self._first = self._disagreement(trace, phase, name, step, odd)
                    self._parted = self._parted or (step, phase, name)
                    return

    def _disagreement(
        self, trace: Trace, phase: str, name: str, step: int, odd: tuple[int, ...]
    ) -> Difference:
        own = Pair(trace, trace)
        own.ranks = [(0, rank) for rank in odd]
        gap, _ = own.gap(phase, name, step)
        relative = _over(gap, own.norm(phase, name, step))
        values: dict[str, list[int]] = {}
        for rank, entries in enumerate(trace.ranks):
            digest = entries[step].marks.get(phase, {}).get(name, ("missing", ""))[0]
            values.setdefault(digest, []).append(rank)
        # The majority is right more often than rank 0.
        sets = sorted(values.values(), key=lambda ranks: (-len(ranks), ranks))
        told = " | ".join(", ".join(map(str, ranks)) for ranks in sets)
        cause = self._cause(phase, step)
        if phase == "gradients":
            cause = (
                "It is not reduced over the workers: see parameters added after wrapping, no_sync and hooks."
            )
        sentence = (
            f"step {step}, {phase}: the {trace.world_size} workers of {trace.name} do not agree on `{name}` "
            f"(ranks {told}){_by(relative)}. {cause}"
        )
        ranks = tuple(rank for group in sets[1:] for rank in group)
        return Difference(step, phase, name, "replicas", trace.name, ranks, relative, 0.0, None, sentence)

    def _difference(
        self, phase: str, name: str, step: int, ranks: list[int], gap: float, allowed: float
    ) -> Difference:
        pair = self._pair
        norm = pair.norm(phase, name, step)
        relative, bound = _over(gap, norm), _over(allowed, norm)
        ulps = pair.ulps(phase, name, step, ranks[0]) if math.isfinite(gap) else None
        words = f"step {step}, {phase}: `{name}` of {pair.b.name} parts from {pair.a.name}{_by(relative)}"
        if math.isinf(gap):
            words += " (missing, of another shape or not finite)"
        if ulps is not None:
            words += f", {ulps} ulps"
        if allowed and math.isfinite(gap):
            words += f", {gap / allowed:.3g} times what rounding explains"
        words += self._factor(phase, name, step, ranks[0])
        sentence = f"{words}. {self._cause(phase, step)}"
        return Difference(
            step, phase, name, "runs", pair.b.name, tuple(ranks), relative, bound, ulps, sentence
        )

    def _factor(self, phase: str, name: str, step: int, rank: int) -> str:
        if phase not in ("gradients", "parameters", "options") or (
            phase == "parameters" and self._before is None
        ):
            return ""
        ratio = self._pair.factor(phase, name, self._before if phase == "parameters" else None, step, rank)
        what = {"gradients": "gradient", "parameters": "update", "options": "value"}[phase]
        return "" if ratio is None else f"; the {what} is {ratio:.4g} x the reference"

    def _cause(self, phase: str, step: int) -> str:
        start = step == self._pair.steps[0] and phase in ("parameters", "buffers")
        return _CAUSES["start" if start else phase]

    def _samples(self, step: int) -> Cell | None:
        """Compare which samples make the global batch; their order within it changes roundings only."""
        sides = [_samples_of(trace, step) for trace in (self._pair.a, self._pair.b)]
        left, right = sides
        if left is None or right is None:
            return None
        if left == right:
            return Cell(step, "samples", "exact")
        if sorted(left) == sorted(right):
            self._parted = self._parted or (step, "samples", "samples")
            return Cell(step, "samples", "within", "samples")
        if self._first is None:
            foreign = len(right) - _common(left, right)
            sentence = (
                f"step {step}, samples: {foreign} of the {len(right)} samples of {self._pair.b.name} are not among "
                f"the {len(left)} of {self._pair.a.name}. {_CAUSES['samples']}"
            )
            everyone = tuple(range(self._pair.b.world_size))
            self._first = Difference(
                step, "samples", "samples", "runs", self._pair.b.name, everyone, None, 0.0, None, sentence
            )
        self._parted = self._parted or (step, "samples", "samples")
        return Cell(step, "samples", "different", "samples")


def _unlike(a: Trace, b: Trace) -> list[str]:
    if not (a.environment and b.environment):
        return []
    return differences(a.environment, b.environment, (f"in {a.name}", f"in {b.name}"))


def _samples_of(trace: Trace, step: int) -> list[str] | None:
    """Return the digests of a step's samples, over the workers in rank order; None when they were not recorded."""
    found: list[str] = []
    for entries in trace.ranks:
        samples = entries[step].samples
        if samples is None:
            return None
        found += samples
    return found


def _common(left: list[str], right: list[str]) -> int:
    return sum((Counter(left) & Counter(right)).values())


def _batch(pair: Pair) -> int | None:
    """Return the largest number of samples of a recorded global batch, None when samples were not recorded."""
    sizes = [len(_samples_of(pair.a, step) or ()) for step in pair.steps]
    return max(sizes, default=0) or None


def _over(gap: float, norm: float) -> float | None:
    """Return a difference in units of a norm, None when there is no such number."""
    return gap / norm if norm and math.isfinite(gap) and math.isfinite(norm) else None


def _by(relative: float | None) -> str:
    return "" if relative is None else f" by {relative:.3g} of its size"
