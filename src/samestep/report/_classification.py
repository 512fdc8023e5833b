"""What a classifier does on its test set, as parts of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from samestep.report import _charts
from samestep.report._charts import number

__all__ = ["classification"]

_MOST_CLASSES = 30  # in a chart or table
_MOST_PAIRS = 10


def classification(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Return title, charts, confusion matrix and figures of a test.

    Args:
        quality: ``confusion_matrix`` (rows: what it is, columns: what it was called), ``classes`` with names, and
            further figures by name. Parts that are not as they should be are left out.
    """
    matrix = _matrix(quality.get("confusion_matrix"))
    names = _names(quality.get("classes"), len(matrix))
    shares = [row[i] / sum(row) if sum(row) else math.nan for i, row in enumerate(matrix)]
    worst = sorted(range(len(matrix)), key=lambda i: (shares[i] if math.isfinite(shares[i]) else 2.0, i))
    shown = sorted(worst[:_MOST_CLASSES])
    svg = _charts.bars("accuracy", [names[i] for i in shown], [shares[i] for i in shown], 1.0)
    caption = "Share of each class that was called what it is."
    if len(shown) < len(matrix):
        caption += f" The {len(shown)} worst of {len(matrix)} classes."
    small = len(matrix) <= _MOST_CLASSES
    pairs = sorted(
        ((row[j], i, j) for i, row in enumerate(matrix) for j in range(len(row)) if i != j and row[j]),
        key=lambda pair: (-pair[0], pair[1:]),
    )
    figures = [
        (name.replace("_", " "), number(value) if isinstance(value, int | float) else str(value))
        for name, value in quality.items()
        if name not in ("confusion_matrix", "classes")
    ]
    return {
        "title": "On the test set",
        "charts": [("Accuracy by class", svg, caption)] if svg else [],
        "columns": ["is \\ called", *names] if small and matrix else [],
        "levels": [[names[i], *map(number, row)] for i, row in enumerate(matrix)] if small else [],
        "rows_title": "Figures",
        "rows": figures,
        "buckets_title": "Most frequent confusions",
        "buckets": [(f"{names[i]} called {names[j]}", number(n)) for n, i, j in pairs[:_MOST_PAIRS]],
    }


def _matrix(value: object) -> list[list[int]]:
    """Return a square matrix of counts; empty when it is none."""
    if not isinstance(value, list) or not all(
        isinstance(row, list) and len(row) == len(value) for row in value
    ):
        return []
    fine = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for row in value for n in row)
    return value if fine else []


def _names(value: object, n_classes: int) -> list[str]:
    if (
        isinstance(value, list)
        and len(value) == n_classes
        and all(isinstance(each, Mapping) for each in value)
    ):
        return [str(each.get("class", i)) for i, each in enumerate(value)]
    return [str(i) for i in range(n_classes)]
