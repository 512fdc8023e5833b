"""Turn what a run folder says into the parts of its page: figures, rows and charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.report import _charts
from samestep.report._charts import number
from samestep.report._classification import classification
from samestep.report._files import Run

__all__ = ["Chart", "audits", "curves", "facts", "figures", "quality", "series"]

_FIRST = (
    "recipe",
    "mode",
    "workers",
    "world_size",
    "shards",
    "threads",
    "seed",
    "steps",
    "global_batch_size",
    "device",
)
_TITLES = {
    "loss": "Loss",
    "samples_per_second": "Throughput, samples per second",
    "lr": "Learning rate",
    "momentum_factor": "Momentum factor (1 = history untouched)",
    "grad_norm": "Gradient norm",
}
_MAX_CURVES = 30
_MAX_DIFFERENCES = 20
_MAX_CHARS = 300


@dataclass(frozen=True)
class Chart:
    """A picture with its heading; `svg` is an element that may stand in a page as it is."""

    title: str
    svg: str
    caption: str = ""


def _flat(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and lists with dotted names."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and any(isinstance(part, Mapping | list) for part in value):
        for i, part in enumerate(value):
            yield from _flat(part, f"{name}.{i}")
    else:
        yield name, value


def _said(value: object) -> str:
    if isinstance(value, list):
        text = ", ".join(map(_said, value)) or "none"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key}: {_said(part)}" for key, part in value.items()) or "none"
    else:
        # A seed, a year or a version number is a name: only floats are rounded.
        text = number(value) if isinstance(value, float) else "none" if value is None else str(value)
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " ..."


def _ordered(name: str) -> int:
    last = name.rsplit(".", 1)[-1]
    return _FIRST.index(last) if last in _FIRST else len(_FIRST)


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what ran, name and value; what the manifest does not say comes from the config."""
    found = dict(_flat(run.manifest or {}))
    known = {name.rsplit(".", 1)[-1] for name in found}
    settings = {name: value for name, value in _flat(run.config or {}) if _ordered(name) < len(_FIRST)}
    found |= {name: value for name, value in settings.items() if name.rsplit(".", 1)[-1] not in known}
    found.pop("", None)
    return [(name, _said(found[name])) for name in sorted(found, key=_ordered)]


def figures(run: Run) -> list[tuple[str, str]]:
    """Return the closing figures, name and value."""
    found: list[tuple[str, str]] = []
    if run.metrics:
        found.append(("last logged step", number(run.metrics[-1]["step"])))
    known = {name: (xs, ys) for name, xs, ys in series(run.metrics)}
    last = [name for name in ("loss", "lr", "lr[0]", "grad_norm") if name in known]
    found += [
        (f"last {name.replace('_', ' ').removesuffix('[0]')}", number(known[name][1][-1])) for name in last
    ]
    losses = [y for y in known.get("loss", ([], []))[1] if math.isfinite(y)]
    if losses:
        found.append(("lowest loss", number(min(losses))))
    speeds = [y for y in known.get("samples_per_second", ([], []))[1] if math.isfinite(y)]
    if speeds:
        found.append(("samples per second (median)", number(statistics.median(speeds))))
    for name in ("collision_rate", "distinct_ids", "test_accuracy"):
        value = (run.quality or {}).get(name)
        if _is_number(value):
            found.append((name.replace("_", " "), number(value)))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def series(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[float], list[float]]]:
    """Return every numeric series of ``metrics.jsonl`` with its steps; of lists and mappings, one per part.

    Args:
        metrics: the lines, in order of steps.

    Example:
        >>> series([{"step": 1, "loss": 0.5, "lr": [0.1]}])
        [('loss', [1.0], [0.5]), ('lr[0]', [1.0], [0.1])]
    """
    found: dict[str, tuple[list[float], list[float]]] = {}
    for entry in metrics:
        leaves = (
            (name, leaf) for key, value in entry.items() if key != "step" for name, leaf in _parts(value, key)
        )
        for name, leaf in leaves:
            if _is_number(leaf) and not 1e300 < abs(leaf) < math.inf:
                xs, ys = found.setdefault(name, ([], []))
                xs.append(float(entry["step"]))
                ys.append(float(leaf))
    return [(name, xs, ys) for name, (xs, ys) in found.items()]


def _parts(value: object, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    else:
        yield from _flat(value, name)


def curves(run: Run) -> tuple[list[Chart], list[str]]:
    """Return the charts over steps, the usual ones first, and the names of series that were left out."""
    grouped: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for name, xs, ys in series(run.metrics):
        grouped.setdefault(name.split("[")[0], []).append((name, xs, ys))
    usual = list(_TITLES)
    names = sorted(grouped, key=lambda name: (usual.index(name) if name in _TITLES else len(usual), name))
    charts: list[Chart] = []
    left_out: list[str] = []
    for name in names:
        parts = grouped[name]
        values = [y for _, _, ys in parts for y in ys]
        if name == "momentum_factor" and all(y == 1 for y in values):
            continue
        if len(charts) == _MAX_CURVES:
            left_out.append(name)
            continue
        broken = sum(not math.isfinite(y) for y in values)
        caption = f"Not finite: {number(broken)} of {number(len(values))} values." if broken else ""
        if len(parts) > 1:
            caption += f" {len(parts)} param groups or parts, {parts[0][0]} first."
        charts.append(Chart(_TITLES.get(name, _title(name)), _charts.line(name, parts), caption.strip()))
    return charts, left_out


def _title(name: str) -> str:
    return name[:1].upper() + name[1:].replace("_", " ")


def audits(run: Run) -> dict[str, Any] | None:
    """Return the audit verdicts: summary, timeline and the first differences with their details."""
    if not run.audit:
        return None
    marks = [(entry["step"], entry.get("verdict") == "agree") for entry in run.audit]
    differing = sorted((e for e in run.audit if e.get("verdict") != "agree"), key=lambda e: int(e["step"]))
    rows = []
    for entry in differing[:_MAX_DIFFERENCES]:
        details = {key: value for key, value in entry.items() if key not in ("step", "verdict")}
        rows.append((number(entry["step"]), str(entry.get("verdict", "none")), list(_details(details))))
    first, last = min(step for step, _ in marks), max(step for step, _ in marks)
    return {
        "agreed": not differing,
        "n_audits": len(marks),
        "n_differing": len(differing),
        "first": number(first),
        "last": number(last),
        "first_difference": number(differing[0]["step"]) if differing else "",
        "svg": _charts.timeline(marks),
        "rows": rows,
    }


def _details(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in list(_flat(details))[:20]:
        if name:
            yield name, _said(value)


def quality(run: Run) -> dict[str, Any] | None:
    """Return what is known of the outcome; of semantic ids, charts, a table per level and one of the whole."""
    if not run.quality:
        return None
    if "confusion_matrix" in run.quality:
        parts = classification(run.quality)
        return {**parts, "charts": [Chart(*chart) for chart in parts["charts"]]}
    levels = _mappings(run.quality.get("levels"))
    labels = [f"level {level.get('level', i)}" for i, level in enumerate(levels)]
    charts: list[Chart] = []
    used = [_ratio(level.get("used"), level.get("n_centroids")) for level in levels]
    spread = [_ratio(level.get("perplexity"), level.get("n_centroids")) for level in levels]
    charts.append(Chart("Share of codes in use", _charts.bars("share of codes in use", labels, used, 1.0)))
    charts.append(
        Chart(
            "Evenness of use",
            _charts.bars("perplexity by codes", labels, spread, 1.0),
            "Perplexity / codes; 1 = all alike.",
        )
    )
    energy = [_ratio(level.get("relative_error"), 1.0) for level in levels]
    if any(map(math.isfinite, energy)):
        svg = _charts.bars("residual energy", ["data", *labels], [1.0, *energy], 1.0)
        charts.append(
            Chart("Residual energy", svg, "Squared error left after each level; 1 = the data itself.")
        )
    columns = list(dict.fromkeys(key for level in levels for key in level))
    whole = {key: value for key, value in run.quality.items() if key not in ("levels", "top_buckets")}
    return {
        "title": "Semantic ids",
        "rows_title": "Collisions",
        "buckets_title": "Most crowded ids",
        "charts": [chart for chart in charts if chart.svg],
        "rows": [
            (name.replace("_", " ").replace(".", ": "), _cell(value)) for name, value in _flat(whole) if name
        ],
        "columns": [column.replace("_", " ") for column in columns],
        "levels": [[_cell(level.get(column, "")) for column in columns] for level in levels],
        "buckets": [
            (_said(b.get("codes")), f"{_cell(b.get('items'))} items")
            for b in _mappings(run.quality.get("top_buckets"))[:10]
        ],
    }


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []


def _cell(value: object) -> str:
    return number(value) if _is_number(value) else _said(value)


def _ratio(part: object, whole: object) -> float:
    if not isinstance(part, int | float) or not isinstance(whole, int | float) or not whole:
        return math.nan
    return part / whole
