"""Backward or reduction: whose fault is a wrong mean gradient?

Per call of the loss function on a rank, *f* is the factor between the gradient that comes back into the model and
the reference's for the same samples; *v* is the weight with which that call's gradient went into the reduced one.
Right is f x v = 1 everywhere: 4 x 1/4 for a mean over four ranks, 1 x 1 for a sum. Where it is not, the side that
is irregular has the fault.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from samestep.explain._explanation import Finding
from samestep.explain._reference import TOLERANCE
from samestep.explain._tape import module_of
from samestep.explain._words import each, number, on_ranks

__all__ = ["backward_and_reduction"]

_ALIKE = 1e-8
_HEAVY = 1e-3  # gradients below this share of the largest one say nothing about factors

Figures = dict[str, Any]


def backward_and_reduction(reference: Figures, workers: list[Figures]) -> Finding | None:
    """Return the finding of the stages backward and reduction, None when every reduced gradient is right."""
    order = list(reference["reduced"])
    bad = [name for name in order if any(w["reduced"][name]["error"] > TOLERANCE for w in workers)]
    if not bad:
        return None
    presence = _presence(bad, workers)
    if presence:
        return presence
    coupled = _coupled(reference, workers, bad)
    if coupled:
        return coupled
    factors = _factors(workers)
    common = _common(order, workers)
    odd = [name for name in bad if common and not _made_like(name, workers, common)]
    if common is None or _known(factors) is None:
        return _reduction(bad[0], reference, workers, factors, everywhere=len(bad) == len(order))
    if not odd and _alike(_carried(common, factors), 1e-4 if _lossy(bad[0], workers) else _ALIKE):
        wrong = _loss(bad, reference, workers, factors, common)
        if wrong:
            return wrong
    products = [f * v for f, v in zip(factors, common) if f is not None]
    fine = all(abs(p - 1) < _ALIKE for p in products)
    first = odd[0] if odd and fine else bad[0]
    return _reduction(first, reference, workers, factors, everywhere=not fine or len(odd) == len(order))


def _presence(bad: list[str], workers: list[Figures]) -> Finding | None:
    for name in bad:
        for presence in ("extra", "none"):
            ranks = [r for r, w in enumerate(workers) if w["reduced"][name]["presence"] == presence]
            if not ranks:
                continue
            where = on_ranks(ranks, len(workers))
            if presence == "none":
                text = f"`{name}` has no gradient {where}: it is not reduced, or not reached by the backward pass."
                return Finding("reduction", name, tuple(ranks), "no gradient", text, math.inf)
            text = (
                f"`{name}` has a gradient {where} where one worker has none: zeros in place of none let weight "
                "decay and momentum move a parameter that no sample used."
            )
            return Finding("reduction", name, tuple(ranks), "gradient of an unused parameter", text, math.inf)
    return None


def _coupled(reference: Figures, workers: list[Figures], bad: list[str]) -> Finding | None:
    """Return where, going backward, a gradient is no longer one and the same multiple of the reference's."""
    found: dict[str, tuple[list[int], float, str]] = {}
    for rank, worker in enumerate(workers):
        for call in worker["calls"]:
            lead, before = None, None
            for key, (k, left, weight) in call["backward"].items():
                if weight < _HEAVY or k is None:
                    continue
                changed = lead is not None and abs(k - lead) > _ALIKE * abs(lead)
                if left > _ALIKE or changed:
                    culprit = "" if before is None else before
                    ranks, size, _ = found.setdefault(culprit, ([], 0.0, key))
                    if rank not in ranks:
                        ranks.append(rank)
                    found[culprit] = (ranks, max(size, min(left, 1e9)), key)
                    break
                lead = k if lead is None else lead
                before = key
    if not found:
        return None
    leaves = [key for key in reference["outputs"] if _is_leaf(module_of(key), reference)]
    if "" in found:
        ranks, size, _ = found[""]
        name = (module_of(leaves[-1]) if leaves else "") or "model"
        sentence = (
            f"Backward parts at the last layer, `{name}`, {on_ranks(ranks, len(workers))}, where forward is equal: "
            "the gradient that comes into the model is not a multiple of the reference's. The loss couples samples "
            "of different ranks, and sees only its own here."
        )
        return Finding(
            "backward", name, tuple(ranks), "loss couples samples of different ranks", sentence, size
        )
    last = max(found, key=lambda key: list(reference["outputs"]).index(key))
    ranks, size, key = found[last]
    name = module_of(last) or "model"
    kind = reference["types"].get(name, "module")
    why = (
        "a BatchNorm that is not synchronised"
        if "batchnorm" in kind.lower()
        else f"{kind}, whose backward differs"
    )
    cause = "BatchNorm not synchronised" if "batchnorm" in kind.lower() else "unknown"
    sentence = (
        f"Backward parts at `{name}` {on_ranks(ranks, len(workers))}: the gradient that goes on to "
        f"`{module_of(key) or 'model'}` is no longer the same multiple of the reference's. It is {why}."
    )
    return Finding("backward", name, tuple(ranks), cause, sentence, size)


def _is_leaf(name: str, reference: Figures) -> bool:
    return not any(
        other != name and other.startswith(f"{name}." if name else "") for other in reference["types"]
    )


def _factors(workers: list[Figures]) -> list[float | None]:
    """Return f by call and rank, in the order of the columns: (call 0, rank 0), (call 0, rank 1), ..."""
    n_calls = max((len(w["calls"]) for w in workers), default=0)
    found: list[float | None] = []
    for call in range(max(n_calls, 1)):
        for worker in workers:
            seen = worker["calls"][call]["backward"].values() if call < len(worker["calls"]) else ()
            found.append(next((k for k, _, weight in seen if k is not None and weight >= _HEAVY), None))
    return found


def _known(factors: list[float | None]) -> list[float] | None:
    known = [f for f in factors if f is not None]
    return known or None


def _common(order: list[str], workers: list[Figures]) -> list[float] | None:
    """Return the weights with which most parameters were reduced, None when no fit could tell them."""
    fits = [w["reduced"][n].get("made") for w in workers for n in order]
    told = [fit.coefficients for fit in fits if fit is not None and fit.coefficients]
    return [median(values) for values in zip(*told)] if told else None


def _made_like(name: str, workers: list[Figures], common: list[float]) -> bool:
    """Return whether a parameter was reduced with the weights of the others on every rank, where that shows."""
    largest = max(abs(v) for v in common)
    for worker in workers:
        made = worker["reduced"][name].get("made")
        if made is None or not made.coefficients:
            continue
        slack = max(1e-6, 10 * made.residual) * largest
        if any(abs(a - b) > slack for a, b in zip(made.coefficients, common)):
            return False
    return True


def _carried(common: list[float], factors: list[float | None]) -> list[float]:
    return [v for v, f in zip(common, factors) if f is not None]


def _alike(values: list[float], tolerance: float = _ALIKE) -> bool:
    return bool(values) and max(values) - min(values) <= tolerance * max(abs(v) for v in values)


def _lossy(name: str, workers: list[Figures]) -> bool:
    made = [w["reduced"][name].get("made") for w in workers]
    return any(fit is not None and fit.coefficients and fit.residual > TOLERANCE for fit in made)


def _loss(
    bad: list[str],
    reference: Figures,
    workers: list[Figures],
    factors: list[float | None],
    common: list[float],
) -> Finding | None:
    """Return the finding that the loss has the wrong weight, None if its weights are regular.

    The reduction is regular here: one weight for all.
    """
    known, world_size = _known(factors) or [], len(workers)
    counts = _counts(workers)
    n_rows = reference["n_rows"]
    v = median(_carried(common, factors))
    # A mean over own samples, or over all of them, times the number of ranks or not: each can be right.
    regular = {1.0, float(world_size), reference["count"]} | (
        {n_rows / counts[0]} if counts and len(set(counts)) == 1 else set()
    )
    # A sum, divided by the count of all ranks and then averaged by DDP: right only where it is averaged.
    likely = regular | {reference["count"] * world_size}
    right = min(likely, key=lambda r: abs(math.log(abs(r * v) or 1e-300)))
    if _alike(known) and any(abs(known[0] / r - 1) < TOLERANCE for r in (*regular, right)):
        return None
    wrong = [
        i % world_size for i, f in enumerate(factors) if f is not None and abs(f / right - 1) > TOLERANCE
    ]
    ranks = tuple(sorted(set(wrong)))
    size = max(abs(f / right - 1) for f in known)
    said = f"loss weights {each(known, right)}, exact multiples, where {number(right)} is right"
    cause, why = (
        "loss scaled",
        f"the loss {on_ranks(ranks, world_size)} is scaled by {number(known[0] / right, 1.0)}",
    )
    if not _alike(known) and abs(sum(1 / f for f in known) - 1) < TOLERANCE:
        cause, why = "mean of means", "a mean of means, " + _shares(known, counts, n_rows)
    elif size < 0.01:
        cause = "loss count wrong"
        where = on_ranks(ranks, world_size)
        why = f"the count that the loss is divided by is off by {number(size)} relative {where}"
    elif _alike(known) and abs(known[0] / right / world_size - 1) < _ALIKE:
        cause, why = "loss times world size", "the loss is multiplied by the world size once too often"
    last = [key for key in reference["outputs"] if _is_leaf(module_of(key), reference)]
    name = (module_of(last[-1]) or "model") if last else bad[0]
    sentence = f"Backward parts at the last layer, `{name}`, where forward is equal: {said}: {why}."
    return Finding("backward", name, ranks, cause, sentence, size)


def _counts(workers: list[Figures]) -> list[int]:
    n_calls = max((len(w["calls"]) for w in workers), default=0)
    found = []
    for call in range(n_calls):
        for worker in workers:
            rows = worker["calls"][call]["rows"] if call < len(worker["calls"]) else None
            found += [len(rows)] if rows else []
    return found


def _shares(known: list[float], counts: list[int], n_rows: int) -> str:
    if len(counts) == len(known) and all(abs(f * n / n_rows - 1) < _ALIKE for f, n in zip(known, counts)):
        return "counts " + ", ".join(map(str, counts))
    return f"shares of the count {each([1 / f for f in known])}"


def _reduction(
    name: str, reference: Figures, workers: list[Figures], factors: list[float | None], everywhere: bool
) -> Finding:
    from samestep.explain._weights import describe

    ranks = tuple(r for r, w in enumerate(workers) if w["reduced"][name]["error"] > TOLERANCE)
    size = max(w["reduced"][name]["error"] for w in workers)
    cause, text = describe(name, reference, workers, factors, ranks, everywhere)
    return Finding("reduction", name, ranks, cause, text, size)
