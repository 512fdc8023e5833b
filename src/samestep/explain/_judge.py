"""From the figures of all workers to findings: stages in order, the first tensor of each, and the reason.

The two stages in the middle, backward and reduction, are in `_blame`, because which of the two is wrong shows only
when both are looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from samestep.explain import _measure
from samestep.explain._blame import backward_and_reduction
from samestep.explain._explanation import Finding
from samestep.explain._reference import TOLERANCE
from samestep.explain._tape import module_of
from samestep.explain._words import number, on_ranks, rows

__all__ = ["judge"]

Figures = dict[str, Any]


def judge(reference: dict[str, Any], workers: list[Figures]) -> list[Finding]:
    """Return the findings of all stages in order.

    Args:
        reference: of `_reference`.
        workers: of `_replay`, by rank.
    """
    shape = _structure(workers)
    if shape:
        return [shape]
    stages: list[Callable[[dict[str, Any], list[Figures]], Finding | None]] = [
        _initial,
        _samples,
        _forward,
        backward_and_reduction,
        _clipping,
        _update,
        _buffers,
    ]
    found = [stage(reference, workers) for stage in stages]
    return [finding for finding in found if finding is not None]


def _structure(workers: list[Figures]) -> Finding | None:
    wrong = [r for r, w in enumerate(workers) if w["structure"] not in ("", "fits")]
    if not wrong:
        return None
    text = workers[wrong[0]]["structure"]
    sentence = f"The model itself is another one {on_ranks(wrong, len(workers))}: {text}."
    return Finding("initial values", text.split("`")[1], tuple(wrong), "other structure", sentence, math.inf)


def _first(order: Iterable[str], by_rank: list[set[str]]) -> tuple[str, list[int]] | None:
    for name in order:
        ranks = [r for r, wrong in enumerate(by_rank) if name in wrong]
        if ranks:
            return name, ranks
    return None


def _initial(reference: dict[str, Any], workers: list[Figures]) -> Finding | None:
    order = [*reference["state"], *dict.fromkeys(n for w in workers for n in w["initial"])]
    first = _first(order, [set(w["initial"]) for w in workers])
    if first is None:
        return None
    name, ranks = first
    n_wrong = len({n for w in workers for n in w["initial"]})
    what = "an entry of the optimizer's state" if name not in reference["state"] else "it"
    where = on_ranks(ranks, len(workers))
    sentence = (
        f"`{name}` starts with other bits {where} than on one worker ({n_wrong} such tensors): {what} is made or "
        "loaded per rank. Start from one seed or one file, and broadcast it."
    )
    cause = "other initial values" if name in reference["state"] else "other optimizer state"
    return Finding("initial values", name, tuple(ranks), cause, sentence, math.inf)


def _samples(reference: dict[str, Any], workers: list[Figures]) -> Finding | None:
    digests = reference["digests"]
    strange = [r for r, w in enumerate(workers) if -1 in w["rows"]]
    if strange:
        sentence = (
            f"Samples {on_ranks(strange, len(workers))} are not samples of the global batch: `split` changes what "
            "it hands out, or draws from somewhere else."
        )
        return Finding("samples", None, tuple(strange), "other samples", sentence, math.inf)
    got = Counter(digests[i] for w in workers for i in w["rows"])
    lacking, surplus = Counter(digests) - got, got - Counter(digests)
    if lacking or surplus:
        return _lacking(digests, workers, lacking, surplus)
    for r, worker in enumerate(workers):
        calls = [call["rows"] for call in worker["calls"]]
        if None in calls:
            continue
        used = Counter(digests[i] for call in calls for i in call)
        part = Counter(digests[i] for i in worker["part"])
        if used != part:
            wrong = sorted(i for i in worker["part"] if used[digests[i]] != part[digests[i]])
            sentence = (
                f"The loss {on_ranks([r], len(workers))} does not see each of its samples once: {rows(wrong)} of "
                "the global batch are left out or seen again."
            )
            return Finding("samples", f"sample {wrong[0]}", (r,), "samples left out", sentence, math.inf)
    return None


def _lacking(
    digests: list[str], workers: list[Figures], lacking: Counter[str], surplus: Counter[str]
) -> Finding:
    missing = [i for i, digest in enumerate(digests) if digest in lacking]
    twice = [i for i, digest in enumerate(digests) if digest in surplus]
    holders = {r for r, w in enumerate(workers) for i in w["rows"] if digests[i] in surplus}
    said = []
    if twice:
        said.append(
            f"{rows(twice)} of the global batch {'are' if len(twice) > 1 else 'is'} used more than once"
        )
    if missing:
        said.append(f"{rows(missing)} not at all")
    alike = len({tuple(w["rows"]) for w in workers}) == 1
    cause = (
        "every rank has the same samples" if alike else ("duplicated samples" if twice else "missing samples")
    )
    why = "every rank draws the same ones" if alike else "look at the sampler's padding, seed and order"
    sentence = f"The samples differ: {', '.join(said)}; {why}."
    place = (missing or twice)[0]
    return Finding("samples", f"sample {place}", tuple(sorted(holders)), cause, sentence, math.inf)


def _forward(reference: dict[str, Any], workers: list[Figures]) -> Finding | None:
    wrong, sizes = [], dict[str, float]()
    for worker in workers:
        here = set()
        for call in worker["calls"]:
            for key, size in call["forward"].items():
                if size is not None and size > TOLERANCE:
                    here.add(key)
                    sizes[key] = max(size, sizes.get(key, 0.0))
            ran = {module_of(key) for key in call["forward"]}
            absent = {key for key in reference["outputs"] if module_of(key) not in ran}
            sizes |= dict.fromkeys(absent, math.inf)
            here |= absent
        wrong.append(here)
    first = _first(reference["outputs"], wrong)
    if first is None:
        return None
    key, ranks = first
    name = module_of(key)
    kind = reference["types"].get(name, "")
    where, size = on_ranks(ranks, len(workers)), sizes[key]
    if size == math.inf:
        cause, why = "other path", f"{kind or 'module'} that does not run, or gives another shape, there"
    elif "BatchNorm" in kind or "batchnorm" in kind.lower():
        cause, why = "BatchNorm not synchronised", "a BatchNorm that is not synchronised over ranks"
    elif reference["random"] in (name, name or "the model"):
        cause, why = "random numbers", "which draws random numbers, and every rank draws its own"
    else:
        cause, why = "unknown", f"{kind}, which computes something else from the same input"
    sentence = f"Forward parts at `{name or 'model'}` {where} by {number(size)} relative: {why}."
    return Finding("forward", name or "model", tuple(ranks), cause, sentence, size)


def _clipping(reference: dict[str, Any], workers: list[Figures]) -> Finding | None:
    wrong = [{n for n, (size, _) in w.get("clip", {}).items() if size > TOLERANCE} for w in workers]
    first = _first(reference["reduced"], wrong)
    if first is None:
        return None
    name, ranks = first
    size, fit = workers[ranks[0]]["clip"][name]
    k = fit.coefficients[0] if fit.coefficients and fit.residual <= TOLERANCE else None
    right = _measure.factor(reference["clipped"][name], reference["reduced"][name]).coefficients
    cause, why = "unknown", "the clipping is another one"
    if k is not None and right and abs(k * right[0] - 1) < 1e-6:
        cause, why = "not clipped", "it is not clipped there"
    elif k is not None and abs(k * math.sqrt(len(workers)) - 1) < 1e-4:
        cause = "norm summed over ranks again"
        why = "the squared norm of a gradient that is reduced already is summed over ranks once more"
    times = f"{number(k, 1.0)} x" if k is not None else "not a multiple of"
    sentence = (
        f"The clipped gradient {on_ranks(ranks, len(workers))} is {times} the reference's, from `{name}` on, given "
        f"the same gradient to clip: {why}."
    )
    return Finding("clipping", name, tuple(ranks), cause, sentence, size)


def _update(reference: dict[str, Any], workers: list[Figures]) -> Finding | None:
    wrong = [{n for n, (size, _) in w["update"].items() if size > TOLERANCE} for w in workers]
    first = _first(reference["reduced"], wrong)
    if first is None:
        return None
    name, ranks = first
    size, fit = workers[ranks[0]]["update"][name]
    options = _options(reference["options"], workers[ranks[0]]["options"])
    said = "; ".join(f"{key} is {mine!r} where one worker has {right!r}" for key, mine, right in options)
    exact = bool(fit.coefficients) and fit.residual <= 10 * TOLERANCE
    k = fit.coefficients[0] if exact else None
    n_wrong, n_all = len(wrong[ranks[0]]), len(reference["reduced"])
    of = "" if n_wrong == n_all else f" of `{name}`" + (f" and {n_wrong - 1} more" if n_wrong > 1 else "")
    cause = options[0][0] if options else "unknown"
    if k == 0 or (k is not None and abs(k) < 1e-12):
        cause, said = "not updated", said or "the optimizer does not hold it"
    elif k is not None and abs(k / len(workers) - 1) < 1e-6 and cause in ("lr", "unknown"):
        cause = "learning rate scaled by the world size"
        said = "the LR is scaled by the world size" + (f" ({said})" if said else "")
    elif cause == "lr":
        cause = "learning rate"
    times = f"{number(k, 1.0)} x the reference" if k is not None else "not a multiple of the reference's"
    sentence = (
        f"The update{of} is {times} {on_ranks(ranks, len(workers))}, given the same gradient: "
        f"{said or 'the optimizer computes something else there'}."
    )
    return Finding("update", name, tuple(ranks), cause.replace("_", " "), sentence, size)


def _options(right: list[Figures], mine: list[Figures]) -> list[tuple[str, Any, Any]]:
    found = [
        (key, other.get(key), value)
        for group, other in zip(right, mine)
        for key, value in group.items()
        if other.get(key) != value
    ]
    return list({entry[0]: entry for entry in reversed(found)}.values())[::-1]


def _buffers(reference: dict[str, Any], workers: list[Figures]) -> Finding | None:
    wrong = [{n for n, size in w["buffers"].items() if size > TOLERANCE} for w in workers]
    first = _first(reference["state"], wrong)
    if first is None:
        return None
    name, ranks = first
    kind = reference["types"].get(name.rpartition(".")[0], "")
    size = max(workers[r]["buffers"][name] for r in ranks)
    n_wrong = len(set().union(*wrong))
    why = (
        "batch statistics that are kept per rank" if "Norm" in kind else "it follows this rank's samples only"
    )
    sentence = (
        f"The buffer `{name}` {on_ranks(ranks, len(workers))} is off by {number(size)} relative after the step "
        f"({n_wrong} such buffers): {why}."
    )
    return Finding("buffers", name, tuple(ranks), "buffers of one rank", sentence, size)
