"""What a comparison found: cells, the first difference, and whether it proves anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from samestep.compare._trace import PHASES

__all__ = ["TWO_WORKERS", "Cell", "Comparison", "Difference", "Verdict", "worse"]

TWO_WORKERS = "2 workers only: additions of two numbers have one order; compare with 4 as well"

Verdict = Literal["exact", "within", "different"]

_ORDER: dict[str, int] = {"exact": 0, "within": 1, "different": 2}


def worse(a: Verdict, b: Verdict) -> Verdict:
    """Return the worse of two verdicts.

    Example:
        >>> worse("exact", "within")
        'within'
    """
    return a if _ORDER[a] >= _ORDER[b] else b


@dataclass(frozen=True)
class Cell:
    """The verdict on one phase of one step.

    Attributes:
        step: updates applied.
        phase: samples, gradients, options, optimizer, parameters or buffers.
        verdict: exact, within or different.
        tensor: the first that is different; else the one nearest to its bound; None when all are exact.
        relative: its difference over its norm; None when that is 0 or there is nothing to measure.
        allowed: the bound, over the same norm.
        judged: false when the bound is wider than the smallest fault that must be seen.
    """

    step: int
    phase: str
    verdict: Verdict
    tensor: str | None = None
    relative: float | None = None
    allowed: float | None = None
    judged: bool = True


@dataclass(frozen=True)
class Difference:
    """The first tensor that parts by more than rounding explains.

    Attributes:
        step: updates applied.
        phase: where it was seen first.
        tensor: its name; a phase's first in registration order.
        kind: "runs" when the two runs differ, "replicas" when the workers of one run do.
        trace: the run whose workers differ, or the second run.
        ranks: those that differ from the reference.
        relative: difference over the reference's norm, None when that is 0 or there is nothing to measure.
        allowed: the bound, over the same norm; 0 where the same bits are right.
        ulps: the largest distance of two elements in units in the last place, where whole tensors were kept.
        sentence: all that in words, with the usual cause.
    """

    step: int
    phase: str
    tensor: str
    kind: Literal["runs", "replicas"]
    trace: str
    ranks: tuple[int, ...]
    relative: float | None
    allowed: float | None
    ulps: int | None
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """Two runs, step by step and phase by phase.

    Attributes:
        verdict: the worst of all cells.
        reference: name of the first trace.
        other: name of the second one.
        world_sizes: of the two.
        cells: in order of step and phase.
        first: the first difference, or None.
        parted: the first (step, phase, tensor) whose bits differ, within its bound or not; None when all agree.
        refusals: why the comparison proves nothing, in words; empty when it does.
        warnings: what it cannot see.
        unlike: in which surroundings or settings the runs differ before their first step, in words.
    """

    verdict: Verdict
    reference: str
    other: str
    world_sizes: tuple[int, int]
    cells: tuple[Cell, ...]
    first: Difference | None = None
    parted: tuple[int, str, str] | None = None
    refusals: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())
    unlike: tuple[str, ...] = field(default=())

    @property
    def proves(self) -> bool:
        """Whether the verdict means something: it could have been another one."""
        return self.verdict == "different" or not self.refusals

    @property
    def exit_code(self) -> int:
        """0 agreed, 1 different, 2 proves nothing."""
        return 1 if self.verdict == "different" else 0 if self.proves else 2

    def beside_more_workers(self) -> Comparison:
        """Return this one of several comparisons of a script, without the warning that two workers are few."""
        return replace(self, warnings=tuple(text for text in self.warnings if text != TWO_WORKERS))

    def phase_verdicts(self) -> dict[str, Verdict]:
        """Return the worst verdict of each phase, in the order of phases."""
        found: dict[str, Verdict] = {}
        for cell in self.cells:
            found[cell.phase] = worse(found.get(cell.phase, "exact"), cell.verdict)
        # The first record has no samples and no gradients, so its phases would come first.
        return {phase: found[phase] for phase in PHASES if phase in found}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        return asdict(self) | {"proves": self.proves, "phases": self.phase_verdicts()}

    def sentence(self) -> str:
        """Return the outcome in words.

        Example:
            >>> Comparison("exact", "a", "b", (1, 4), ()).sentence()
            'exact: the same bits at every step'
        """
        if self.first is not None:
            return f"different: {self.first.sentence}"
        if self.refusals:
            return "proves nothing: " + "; ".join(self.refusals)
        if self.verdict == "exact":
            return "exact: the same bits at every step"
        assert self.parted is not None
        step, phase, tensor = self.parted
        return (
            f"within: rounding only; the first bits that part are those of {phase} `{tensor}` at step {step}"
        )
