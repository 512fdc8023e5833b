"""What the weights of a reduction say about the program that made it."""

from __future__ import annotations

import math
from typing import Any

from samestep.explain._reference import TOLERANCE
from samestep.explain._words import each, number, on_ranks

__all__ = ["describe"]

Figures = dict[str, Any]
_ALIKE = 1e-6


def describe(
    name: str,
    reference: Figures,
    workers: list[Figures],
    factors: list[float | None],
    ranks: tuple[int, ...],
    everywhere: bool,
) -> tuple[str, str]:
    """Return the cause and the sentence for a gradient that was reduced wrongly.

    Args:
        name: the parameter to show, the first that is wrong.
        reference: of `_reference`.
        workers: figures of all ranks.
        factors: of the loss, by call and rank; None where unknown.
        ranks: on which the gradient is wrong.
        everywhere: whether all parameters share the fault.
    """
    world_size = len(workers)
    made = [w["reduced"][name].get("made") for w in workers]
    subject = "Gradients are" if everywhere else f"`{name}` is"
    where = on_ranks(ranks, world_size)
    size = max(w["reduced"][name]["error"] for w in workers)
    if any(fit is None or not fit.coefficients for fit in made):
        if ranks and all(workers[r]["reduced"][name].get("own") for r in ranks):
            text = f"`{name}` is not reduced {where}: it keeps each rank's own gradient."
            return "not reduced", text
        told = _borrowed(reference, workers)
        if told is None or not everywhere:
            text = (
                f"The reduced gradient of `{name}` is off by {number(size)} relative {where}; it is too small to "
                "tell the weights of the ranks."
            )
            return "unknown", text
        made = told
    shown = ranks[0] if ranks else 0
    weights, residual = list(made[shown].coefficients), made[shown].residual
    needed = _needed(name, workers, factors)
    said = f"weights {each(weights, needed[0] if needed else None)} on rank {shown}"
    alone = [_only_own(fit.coefficients, r, world_size) for r, fit in enumerate(made)]
    if all(alone[r] for r in ranks):
        what = "no parameter is reduced" if everywhere else "it keeps each rank's own gradient"
        return "not reduced", f"{subject} not reduced {where}: {said}; {what}."
    if residual > max(TOLERANCE, 1e-9):
        text = (
            f"{subject} reduced with {said}, but a part of {number(residual)} relative is no combination of the "
            "local gradients: they are compressed or rounded on the way (a bf16 or fp16 reduction)."
        )
        return "lossy reduction", text
    apart = any(_apart(a.coefficients, b.coefficients) for a in made for b in made)
    right = f" where {each(needed, weights[0])} is right" if needed else ""
    cause, why = _reason(name, workers, weights, needed, factors, world_size)
    if apart:
        cause, why = "ranks disagree", "the ranks do not hold the same gradient"
    return cause, f"{subject} reduced with {said}{right}: {why}."


def _borrowed(reference: Figures, workers: list[Figures]) -> list[Any] | None:
    """Return the fits of the first parameter that could be told, for one that is too small."""
    for name in reference["reduced"]:
        made = [w["reduced"][name].get("made") for w in workers]
        if all(fit is not None and fit.coefficients for fit in made):
            return made
    return None


def _needed(name: str, workers: list[Figures], factors: list[float | None]) -> list[float] | None:
    """Return the weights that would have been right: from the loss, or else fitted to the reference."""
    if all(f is not None for f in factors):
        return [1 / f if f else 0.0 for f in factors if f is not None]
    fit = workers[0]["reduced"][name].get("needed")
    return list(fit.coefficients) if fit is not None and fit.coefficients and fit.residual < _ALIKE else None


def _only_own(weights: tuple[float, ...], rank: int, world_size: int) -> bool:
    others = [abs(w) for i, w in enumerate(weights) if i % world_size != rank]
    own = [abs(w) for i, w in enumerate(weights) if i % world_size == rank]
    return max(own) > 0 and max(others, default=0.0) < _ALIKE * max(own)


def _apart(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    largest = max(map(abs, a), default=0.0)
    return any(abs(x - y) > _ALIKE * largest for x, y in zip(a, b))


def _reason(
    name: str,
    workers: list[Figures],
    weights: list[float],
    needed: list[float] | None,
    factors: list[float | None],
    world_size: int,
) -> tuple[str, str]:
    n_calls = len(weights) // world_size
    by_call = [weights[c * world_size : (c + 1) * world_size] for c in range(n_calls)]
    largest = max(map(abs, weights))
    empty = [c for c, part in enumerate(by_call) if max(map(abs, part)) < _ALIKE * largest]
    if empty and n_calls > 1:
        which = ", ".join(str(c) for c in empty)
        return "micro-batches left out", f"micro-batch {which} of {n_calls} does not count"
    left_out = [r for r in range(world_size) if all(abs(part[r]) < _ALIKE * largest for part in by_call)]
    if left_out:
        return "ranks left out", f"the samples {on_ranks(left_out, world_size)} do not count"
    spread = max(weights) - min(weights)
    if spread <= 1e-6 * largest:
        cause, why = _uniform(weights[0], needed, world_size, n_calls)
        if cause == "reduction scaled" and "clip" not in workers[0]:
            why += ", where it enters the optimizer; look at the clipping too"
        return cause, why
    if n_calls == 1 and _clipped_before(workers, weights):
        return "clipped before reduction", "each rank clips its own gradient before it is reduced"
    return "wrong weights", "the ranks' weights do not follow what stands behind their loss"


def _uniform(
    weight: float,
    needed: list[float] | None,
    world_size: int,
    n_calls: int,
) -> tuple[str, str]:
    if needed is None or not needed[0]:
        return "unknown", "the reduction has another scale"
    times = weight / needed[0]
    if abs(weight - 1) < _ALIKE and abs(times / world_size - 1) < _ALIKE:
        return "sum in place of mean", "a sum over ranks in place of the mean"
    if n_calls > 1 and abs(times / n_calls - 1) < _ALIKE:
        text = f"the loss of a micro-batch is not divided by their number, {n_calls}"
        return "accumulation not divided", text
    if abs(times * world_size - 1) < _ALIKE:
        return (
            "averaged twice",
            "the reduction averages over ranks what is divided by the global count already",
        )
    return "reduction scaled", f"the reduced gradient is {number(times, 1.0)} x the reference's"


def _clipped_before(workers: list[Figures], weights: list[float]) -> bool:
    """Return whether the weights are those of gradients that were each brought to one norm."""
    squares = [0.0] * len(weights)
    for entry in workers[0]["reduced"].values():
        for i, norm in enumerate(entry.get("norms", squares)):
            squares[i] += norm * norm
    norms = [w * math.sqrt(s) for w, s in zip(weights, squares)]
    # Clipping divides by the norm plus 1e-6, so the lengths agree to about that.
    largest = max(weights)
    clipped = [n for n, w in zip(norms, weights) if w < largest * (1 - _ALIKE)]
    return max(clipped) - min(clipped) < 1e-4 * max(norms) and max(norms) < (1 + 1e-4) * max(clipped)
