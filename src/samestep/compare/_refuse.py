"""Why a comparison would prove nothing, however well the two runs agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestep.compare._pair import Pair
from samestep.compare._result import TWO_WORKERS, Cell
from samestep.compare._trace import Entry, Trace

__all__ = ["refusals", "warnings"]


def refusals(pair: Pair, cells: Sequence[Cell], smallest_fault: float) -> Iterator[str]:
    """Yield the reasons; none when the verdict means something.

    Args:
        pair: two traces.
        cells: the verdicts on them.
        smallest_fault: relative effect on a gradient that must not hide in a bound.
    """
    if pair.a.folder.resolve() == pair.b.folder.resolve():
        yield f"{pair.a.name} is compared with itself: record two runs"
    for trace in {pair.a.folder: pair.a, pair.b.folder: pair.b}.values():
        yield from _of_trace(trace)
    updates = [step for step in pair.steps if pair.a.ranks[0][step].has_gradients]
    if len(updates) < 2:
        yield (
            f"{len(updates)} common step{'s' * (len(updates) != 1)} with gradients: expected at least 2, since "
            "state, buckets and samplers show from the second on; record more, before gradients are cleared"
        )
    gaps = [(s, t) for s, t in zip(pair.steps, pair.steps[1:]) if t != s + 1]
    if gaps:
        yield f"steps {gaps[0][0]} and {gaps[0][1]} follow each other: record every step"
    gradients = [cell for cell in cells if cell.phase == "gradients"]
    blind = [cell.step for cell in gradients if not cell.judged]
    if gradients and len(gradients) - len(blind) < 2 and len(gradients) >= 2:
        yield (
            f"from step {blind[0]} on the bound is wider than {smallest_fault:.2g} of the gradient, so that "
            "the smallest fault would hide in it; use float32 or float64, a smaller rate, or an exact mode"
        )


def warnings(pair: Pair, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield what the comparison cannot see.

    Args:
        pair: two traces.
        cells: the verdicts on them.
    """
    yield from dict.fromkeys([*pair.a.notes, *pair.b.notes])
    most = max(pair.a.world_size, pair.b.world_size)
    if most == 2:
        yield TWO_WORKERS
    if most > 1 and any(
        next(iter(t.ranks[0].values())).samples is None for t in (pair.a, pair.b) if t.ranks[0]
    ):
        recorded = any(entry.samples is not None for t in (pair.a, pair.b) for entry in t.ranks[0].values())
        if not recorded:
            yield "samples were not recorded: pass samples= to see whether both runs read the same ones"
    parted = any(cell.verdict == "different" for cell in cells)  # then what was not judged changes nothing
    blind = [cell.step for cell in cells if cell.phase == "gradients" and not cell.judged]
    if blind and not parted:
        yield (
            f"step {blind[0]}{_others(len(blind) - 1)} not judged: rounding has grown, or a ReLU or maximum "
            "has flipped within it, so far that one wrong sample would hide; explain that step in float64"
        )
    loose = [cell.step for cell in cells if cell.phase == "parameters" and not cell.judged]
    if loose and loose != blind and not parted:
        yield (
            f"from step {loose[0]} on the bound of an update is wider than the smallest fault (an adaptive "
            "optimizer makes full steps of rounding); gradients and options are judged"
        )
    ends = [max(t.ranks[0], default=0) for t in (pair.a, pair.b)]
    if ends[0] != ends[1]:
        yield f"the runs end at steps {ends[0]} and {ends[1]}: only common steps are compared"


def _others(number: int) -> str:
    return " is" if not number else f" and {number} other{'s' * (number > 1)} are"


def _of_trace(trace: Trace) -> Iterator[str]:
    entries = list(trace.ranks[0].values())
    if entries and entries[0].has_gradients:
        yield (
            f"{trace.name} begins after step {entries[0].step}: call record({entries[0].step - 1}, model, "
            "optimizer) before the first step"
        )
    updates = [entry for entry in entries if entry.has_gradients]
    if updates and all(not _gradient(entry) for entry in updates):
        yield f"{trace.name}: every gradient is zero, so nothing is trained"
    losses = [entry.loss for entry in updates if entry.loss is not None]
    if len(losses) > 1 and len(set(losses)) == 1:
        yield f"{trace.name}: the loss is {losses[0]:.6g} at every step, so nothing is learned"
    if trace.world_size > 1 and updates:
        yield from _alike(trace, [entry.step for entry in updates])


def _gradient(entry: Entry) -> bool:
    return any(entry.norm("gradients", name) != 0.0 for name in entry.names("gradients"))


def _alike(trace: Trace, steps: list[int]) -> Iterator[str]:
    """Yield what shows that all workers did the same work, so that a missing reduction could not be seen."""
    for field, what in (("samples", "samples"), ("local", "gradients before reduction")):
        same = []
        for step in steps:
            values = [getattr(rank[step], field) for rank in trace.ranks]
            same.append(values[0] is not None and all(value == values[0] for value in values))
        if same and all(same):
            yield (
                f"{trace.name}: all {trace.world_size} workers have the same {what} at every step, so a missing "
                "average could not show; give each its own part of the batch"
            )
            return
