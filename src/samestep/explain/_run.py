"""Starting the reference and the workers, and putting their figures together."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from samestep import launch
from samestep.explain import _reference, _replay
from samestep.explain._explanation import AsBuilt, Explanation
from samestep.explain._judge import judge
from samestep.explain._reference import TOLERANCE
from samestep.explain._words import names, number

__all__ = ["many", "one_step"]


def one_step(
    build: Callable[[], Any],
    global_batch: Any,
    world_size: int,
    *,
    timeout_seconds: float = 600.0,
    threads: int = 1,
    device: str = "cpu",
) -> Explanation:
    """Run one step on one worker and on `world_size` workers, in float64, and say where and why they differ.

    Every stage of the step on N workers is given the reference's values of the stage before, so that a
    difference is seen where it arises and is not amplified: initial values, samples, forward and backward
    module by module, reduction, clipping, update, buffers. In float64 rounding stays below 2e-12 and faults of
    1e-6 are plain, so one tolerance, 1e-9, separates them.

    Args:
        build: a function at module level (or a partial of one) that returns (model, optimizer, loss_fn), or an
            `explain.Program`; it is called in every worker, under a process group, after seeding.
        global_batch: tensors in tuples, lists and dicts, the samples on their first axis.
        world_size: number of workers, at least 2; 4 or more show more.
        timeout_seconds: bound on each of the two runs.
        threads: intra-op threads of each worker.
        device: "cpu" or "cuda".

    Returns:
        The first stage, tensor and ranks that differ, the cause where it can be told, and a sentence.

    Raises:
        SpecError: when a comparison could not fail (zero gradients, equal samples, a loss of nothing), or the
            program does not keep its contract.
        WorkerError: when the program raises.

    Numerics: float64; tensors are compared by max |difference| / max(max |right|, 1e-3 x the largest of its kind).

    Example::

        explanation = explain.one_step(build, batch, world_size=4)
        print(explanation.sentence)

    Reference: the idea of comparing with one device's tensors: TTrace, arXiv 2506.09280.
    """
    (found,) = many(
        [(build, global_batch)], world_size, timeout_seconds=timeout_seconds, threads=threads, device=device
    )
    return found


def many(
    cases: Sequence[tuple[Callable[[], Any], Any]],
    world_size: int,
    *,
    timeout_seconds: float = 600.0,
    threads: int = 1,
    device: str = "cpu",
) -> list[Explanation]:
    """Explain many programs with workers that are started once; as `one_step` of each (build, global_batch).

    Args:
        cases: pairs of `build` and `global_batch`.
        world_size: as in `one_step`.
        timeout_seconds: as in `one_step`, for all of them together.
        threads: as in `one_step`.
        device: as in `one_step`.

    Raises:
        SpecError: as in `one_step`; the first case that is refused ends them all.
        WorkerError: when a program raises.
    """
    if world_size < 2:
        raise ValueError(f"`world_size`: expected at least 2, got {world_size}: one worker is the reference.")
    pairs = list(cases)
    with tempfile.TemporaryDirectory(prefix="samestep-explain-") as folder:
        options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "threads": threads, "device": device}
        launch.run(_reference.run, 1, pairs, folder, **options)
        by_rank = launch.run(_replay.run, world_size, pairs, folder, **options)
        found = []
        for i in range(len(pairs)):
            reference = torch.load(Path(folder) / f"{i}.pt", map_location="cpu", weights_only=True)
            found.append(_explain(reference, [figures[i] for figures in by_rank]))
    return found


def _explain(reference: dict[str, Any], workers: list[dict[str, Any]]) -> Explanation:
    findings = tuple(judge(reference, workers))
    as_built = _worst(workers)
    warnings = tuple(_warnings(reference, workers, as_built, bool(findings)))
    if findings:
        first = findings[0]
        return Explanation(
            first.stage,
            first.tensor,
            first.ranks,
            first.cause,
            first.sentence,
            first.size,
            len(workers),
            TOLERANCE,
            findings,
            warnings,
            as_built,
        )
    sentence = (
        f"No stage of the step on {len(workers)} workers differs from the step on one worker by more than "
        f"{number(TOLERANCE)} relative, in float64."
    )
    size = max((entry["error"] for w in workers for entry in w["reduced"].values()), default=0.0)
    return Explanation(None, None, (), None, sentence, size, len(workers), TOLERANCE, (), warnings, as_built)


def _worst(workers: list[dict[str, Any]]) -> AsBuilt | None:
    seen = [w["as_built"] for w in workers if "as_built" in w]
    if not seen:
        return None
    worst = max(seen, key=lambda entry: entry["ulps"])
    return AsBuilt(worst["dtype"], worst["ulps"], worst["name"])


def _warnings(
    reference: dict[str, Any], workers: list[dict[str, Any]], as_built: AsBuilt | None, differs: bool
) -> list[str]:
    found = []
    if len(workers) == 2:
        found.append(
            "2 workers only: a sum of two is the same in any order, and a fault that swaps ranks hides. Use 4."
        )
    if reference["dropped"]:
        found.append(f"Dropout was set to 0 in {names(reference['dropped'])}; its masks were not compared.")
    if reference["random"]:
        found.append(
            f"`{reference['random']}` draws random numbers: every rank draws its own, so it differs by design; the "
            "stages after it were given the reference's values."
        )
    still = [name for name, t in reference["reduced"].items() if t is None or not bool(t.any())]
    if still:
        found.append(f"No gradient reaches {names(still)}: whether they are reduced cannot be seen here.")
    calls = [call for w in workers for call in w.get("calls", ())]
    if calls and all(size is None for call in calls for size in call["forward"].values()):
        found.append(
            "No output of a module has the samples on an axis: forward and backward were not compared."
        )
    if any(call["rows"] is None for call in calls):
        found.append(
            "The batch that loss_fn was given is not made of rows of the global batch; not compared there."
        )
    if as_built is not None and not differs:
        eps = torch.finfo(getattr(torch, as_built.dtype)).eps
        if not math.isfinite(as_built.ulps) or as_built.ulps * eps > max(1e-3, 16 * eps):
            found.append(
                f"In {as_built.dtype} the gradient of `{as_built.tensor}` differs by {number(as_built.ulps)} ulps, "
                "more than rounding explains, while float64 agrees: look at casts, autocast and scaling."
            )
    return found
