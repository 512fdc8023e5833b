"""What comparisons with other runs found, as parts of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samestep.report._charts import number

__all__ = ["comparisons"]

_MOST = 20
_SHOWN = {
    "step": "step",
    "phase": "phase",
    "tensor": "first tensor",
    "ranks": "workers",
    "relative": "difference / its size",
    "allowed": "what rounding allows",
    "ulps": "in ulps",
}


def comparisons(found: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return title, verdict, sentence, explanation, first difference and counts of each comparison.

    Args:
        found: what ``samestep compare`` left in ``comparison.json``, or None. Parts that are not as they should be
            are left out.
    """
    rows = (found or {}).get("comparisons")
    if not isinstance(rows, list):
        return []
    return [_one(row) for row in rows[:_MOST] if isinstance(row, Mapping)]


def _one(row: Mapping[str, Any]) -> dict[str, Any]:
    verdict = str(row.get("verdict", "none"))
    proves = row.get("proves") is True
    if not proves and verdict != "different":
        verdict = "proves nothing"
    mood = "good" if verdict in ("exact", "within") else "bad"
    unlike = [f"before the first step: {text}" for text in _texts(row.get("unlike"))]
    notes = [*unlike, *_texts(row.get("refusals")), *_texts(row.get("warnings"))]
    return {
        "title": f"{row.get('reference', 'a run')} against {row.get('other', 'another')}",
        "verdict": verdict,
        "mood": mood,
        "sentence": str(row.get("sentence", "")),
        "explanation": row["explanation"] if isinstance(row.get("explanation"), str) else "",
        "first": list(_first(row.get("first"))),
        "phases": list(_phases(row.get("phases"))),
        "notes": notes if verdict != "proves nothing" else [*unlike, *_texts(row.get("warnings"))],
    }


def _first(first: object) -> Iterator[tuple[str, str]]:
    if not isinstance(first, Mapping):
        return
    for key, label in _SHOWN.items():
        value = first.get(key)
        if value is None:
            continue
        yield label, ", ".join(map(str, value)) if isinstance(value, list) else number(value)


def _phases(phases: object) -> Iterator[list[str]]:
    if not isinstance(phases, Mapping):
        return
    for phase, counts in phases.items():
        if isinstance(counts, Mapping):
            yield [str(phase), *(number(counts.get(v, 0)) for v in ("exact", "within", "different"))]


def _texts(value: object) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []
