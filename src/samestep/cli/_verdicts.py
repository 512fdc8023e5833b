"""What a comparison of recipe runs leads to: the step that parts explained, the verdict kept in the run folder."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli._recipes import RECIPES, load_settings, program_of
from samestep.errors import SamestepError

if TYPE_CHECKING:
    from samestep.compare import Comparison, Trace
    from samestep.explain import Explanation

__all__ = ["explain_first", "keep", "name_settings", "recipe_folder"]


def recipe_folder(trace: Path) -> Path | None:
    """Return the run folder that a trace belongs to, None when it is not of a recipe's run."""
    for folder in (trace, trace.parent):
        if (folder / "config.yaml").is_file():
            return folder
    return None


def name_settings(found: Comparison, a: Trace, b: Trace) -> Comparison:
    """Return a comparison that also says in which settings two runs of recipes differ."""
    import dataclasses

    runs = [recipe_folder(trace.folder) for trace in (a, b)]
    if runs[0] is None or runs[1] is None:
        return found
    left, right = (_flat(run) for run in runs if run is not None)
    told = [
        f"{key}: {left.get(key, 'unset')} in {a.name}, {right.get(key, 'unset')} in {b.name}"
        for key in [*left, *(key for key in right if key not in left)]
        if left.get(key) != right.get(key)
    ]
    return dataclasses.replace(found, unlike=(*found.unlike, *told))


def _flat(run: Path) -> dict[str, str]:
    """Return the settings of a run by dotted name."""
    import yaml

    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = str(value)

    walk("", yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    return flat


def explain_first(found: Comparison, a: Trace, b: Trace) -> Explanation | str | None:
    """Run the step at which two runs part on one worker and on N in float64.

    Args:
        found: the comparison of the traces.
        a: the reference, of a recipe's run.
        b: the other one.

    Returns:
        The explanation; why there is none, in words; None when there is nothing to explain.
    """
    first, run = found.first, recipe_folder(b.folder)
    if first is None or run is None or first.phase in ("samples", "options"):
        return None
    workers = max(a.world_size, b.world_size)
    if workers < 2:
        return None
    step = max(first.step, 1)  # the update that led to it
    whole = [t for t, entry in b.ranks[0].items() if t < step and entry.file is not None]
    if not whole or step not in b.ranks[0]:
        return f"step {step} cannot be explained: no whole tensors from before it were kept"
    print(f"samestep: explaining step {step} with {workers} workers ...", file=sys.stderr)
    try:
        return _explained(b, run, step, max(whole), workers)
    except SamestepError as error:
        return f"step {step} cannot be explained: {error}"


def _explained(trace: Trace, run: Path, step: int, start: int, workers: int) -> Explanation | str:
    import yaml

    from samestep import explain

    recipe = str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")).get("recipe"))
    if recipe not in RECIPES:
        return f"step {step} cannot be explained: {run / 'config.yaml'} is of no recipe that we know"
    spec = load_settings(recipe, run / "config.yaml", [], None, False)
    samples = [digest for rank in trace.ranks for digest in rank[step].samples or ()]
    state = {
        key.split("/", 1)[1]: tensor
        for key, tensor in trace.ranks[0][start].tensors.items()
        if key.startswith(("parameters/", "buffers/"))
    }
    build, batch = program_of(recipe)(spec, _pick(samples), state)
    return explain.one_step(build, batch, workers)


def _pick(samples: Sequence[str]) -> Any:
    """Return what finds recorded samples among all ids."""

    def pick(n_samples: int) -> list[int]:
        found = {_digest(i): i for i in range(n_samples)}
        missing = sum(digest not in found for digest in samples)
        if missing or not samples:
            raise SamestepError(f"{missing} of its {len(samples)} recorded samples are not in the data")
        return [found[digest] for digest in samples]

    return pick


def _digest(sample_id: int) -> str:
    """Return what `record` writes for an int64 id."""
    return hashlib.blake2b(sample_id.to_bytes(8, sys.byteorder, signed=True), digest_size=8).hexdigest()


def keep(found: Comparison, explained: Explanation | str | None, folder: Path) -> Path:
    """Add a verdict to the ``comparison.json`` of a folder and write its report; return the report's path.

    A verdict on the same two runs is replaced.
    """
    from samestep import report

    file = folder / "comparison.json"
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["comparisons"]
    except (OSError, ValueError, KeyError, TypeError):
        before = []
    now = _summary(found, explained)
    same = ("reference", "other")
    others = [one for one in before if any(one.get(key) != now[key] for key in same)]
    draft = file.with_suffix(".json.new")
    draft.write_text(json.dumps({"comparisons": [*others, now]}, indent=2, allow_nan=False) + "\n")
    draft.replace(file)
    return report.write(folder)


def _summary(found: Comparison, explained: Explanation | str | None) -> dict[str, Any]:
    """Return a comparison as JSON data without its cells, of which a long run has many."""
    phases = {phase: {"exact": 0, "within": 0, "different": 0} for phase in found.phase_verdicts()}
    for cell in found.cells:
        phases[cell.phase][cell.verdict] += 1
    data = {key: value for key, value in found.to_json().items() if key not in ("cells", "phases")}
    return {
        **data,
        "sentence": found.sentence(),
        "steps": len({cell.step for cell in found.cells}),
        "phases": phases,
        "explanation": explained if isinstance(explained, str) or explained is None else explained.sentence,
    }
