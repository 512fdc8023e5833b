"""Charts as SVG text that takes its colours from the page, so that dark mode and print need no second picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

__all__ = ["bars", "line", "number", "timeline"]

# Drawn 380 wide, so that on a phone one unit is about one pixel and the text stays readable.
_WIDTH, _HEIGHT = 380, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 30
_MAX_POINTS = 360
_MAX_MARKS = 400


def number(value: object) -> str:
    """Return a number as people read it: grouped digits, at most four significant figures after the point.

    Example:
        >>> number(1234567), number(0.000123456), number(12.3456), number(float("nan"))
        ('1,234,567', '0.0001235', '12.35', 'nan')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def line(name: str, series: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> str:
    """Return a line chart over steps.

    Args:
        name: of the quantity, for people who cannot see the picture.
        series: label, steps and values each; values may be NaN or infinite, which breaks the line.

    Returns:
        An ``<svg>`` element; the empty string when no value is finite. The scale is logarithmic where all values
        are positive and span more than two decades.
    """
    finite = [y for _, _, ys in series for y in ys if math.isfinite(y)]
    if not finite:
        return ""
    log = min(finite) > 0 and max(finite) / min(finite) > 100
    x_ticks = _ticks(
        min(x for _, xs, _ in series for x in xs), max(x for _, xs, _ in series for x in xs), 4, True
    )
    y_ticks = _log_ticks(min(finite), max(finite)) if log else _ticks(min(finite), max(finite), 4)
    x_of = _scale(x_ticks[0], x_ticks[-1], _LEFT, _WIDTH - _RIGHT)
    bounds = [math.log10(y_ticks[0]), math.log10(y_ticks[-1])] if log else [y_ticks[0], y_ticks[-1]]
    y_of = _scale(bounds[0], bounds[1], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        _frame(
            x_ticks, [x_of(t) for t in x_ticks], y_ticks, [y_of(math.log10(t) if log else t) for t in y_ticks]
        )
    ]
    for i, (_, xs, ys) in enumerate(series):
        path, alone = _path(
            [
                (x_of(x), y_of(math.log10(y) if log else y)) if math.isfinite(y) else None
                for x, y in _thin(xs, ys)
            ]
        )
        parts.append(f'<path class="series s{i % 6}" d="{path}"/>')
        parts += [f'<circle class="dot s{i % 6}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in alone]
    label = f"{name} over steps, from {number(finite[0])} to {number(finite[-1])}" + (
        ", logarithmic" if log else ""
    )
    return _svg(label, _HEIGHT, "".join(parts))


def bars(name: str, labels: Sequence[str], values: Sequence[float], top: float | None = None) -> str:
    """Return a bar chart with the value over each bar.

    Args:
        name: of the quantity.
        labels: one per bar.
        values: one per bar; a value that is not finite gets no bar.
        top: the value of a full bar; None takes the largest.

    Returns:
        An ``<svg>`` element; the empty string when no value is finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    full = max([*finite, top or 0.0]) or 1.0
    height, floor = 170, 140
    y_of = _scale(0.0, full, floor, 26)
    slot = (_WIDTH - 24) / len(values)
    parts = [f'<path class="axis" d="M12 {floor}H{_WIDTH - 12}"/>']
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        middle, width = 12 + slot * (i + 0.5), min(slot * 0.62, 72)
        if top:
            parts.append(_rect("rest", middle, width, 26.0, floor))
        if math.isfinite(value):
            y = min(y_of(max(value, 0.0)), floor)
            parts.append(_rect("bar", middle, width, y, floor))
            parts.append(
                f'<text class="value" x="{middle:.1f}" y="{min(y, floor) - 5:.1f}">{number(value)}</text>'
            )
        parts.append(f'<text class="middle" x="{middle:.1f}" y="{floor + 18}">{escape(label)}</text>')
    said = ", ".join(f"{label} {number(value)}" for label, value in zip(labels, values, strict=True))
    return _svg(f"{name}: {said}", height, "".join(parts))


def timeline(marks: Sequence[tuple[int, bool]]) -> str:
    """Return audits on a line of steps: a stroke where replicas agreed, a tall flag where they differed.

    Args:
        marks: step and whether the replicas agreed, in any order; not empty.

    Returns:
        An ``<svg>`` element. Where there are too many strokes to tell apart, agreeing ones are left out evenly; of
        differing ones the first 400 are drawn.
    """
    steps = [step for step, _ in marks]
    ticks = _ticks(min(steps), max(steps), 6, True)
    width = 1040
    x_of = _scale(ticks[0], ticks[-1], 16, width - 16)
    agreed = sorted(step for step, ok in marks if ok)
    differed = sorted(step for step, ok in marks if not ok)
    stride = max(1, math.ceil(len(agreed) / _MAX_MARKS))
    parts = [f'<path class="axis" d="M8 54H{width - 8}"/>']
    parts += [f'<path class="agree" d="M{x_of(step):.1f} 54V34"/>' for step in agreed[::stride]]
    for step in differed[:_MAX_MARKS]:
        x = x_of(step)
        parts.append(
            f'<g class="differ"><title>step {step}: replicas differ</title><path d="M{x:.1f} 54V20"/>'
        )
        parts.append(f'<path class="flag" d="M{x - 6:.1f} 8H{x + 6:.1f}L{x:.1f} 20Z"/></g>')
    parts += [
        f'<text class="middle" x="{_inside(x_of(t), width):.1f}" y="72">{number(t)}</text>' for t in ticks
    ]
    label = f"{len(marks)} audits over steps {min(steps)} to {max(steps)}; {len(differed)} found a difference"
    return _svg(label, 80, "".join(parts), width)


def _rect(kind: str, middle: float, width: float, y: float, floor: float) -> str:
    left, height = middle - width / 2, floor - y
    return f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _inside(x: float, width: int) -> float:
    return min(max(x, 26.0), width - 26.0)


def _svg(label: str, height: int, inner: str, width: int = _WIDTH) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{inner}</svg>'


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * ((value - low) / span)


def _frame(
    x_ticks: Sequence[float], xs: Sequence[float], y_ticks: Sequence[float], ys: Sequence[float]
) -> str:
    parts = [f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>' for y in ys]
    parts += [
        f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{text}</text>'
        for text, y in zip(_texts(y_ticks), ys)
    ]
    parts += [
        f'<text class="middle" x="{_inside(x, _WIDTH):.1f}" y="{_HEIGHT - 10}">{text}</text>'
        for text, x in zip(_texts(x_ticks), xs)
    ]
    return "".join(parts)


def _texts(ticks: Sequence[float]) -> list[str]:
    """Return the texts of ticks; where they would read alike, distances from the first."""
    texts = [_short(tick) for tick in ticks]
    if len(set(texts)) == len(texts):
        return texts
    return [texts[0], *(f"+{_short(float(f'{tick - ticks[0]:.2g}'))}" for tick in ticks[1:])]


def _short(value: float) -> str:
    """Return a tick's text in at most seven characters."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if limit <= size < 1e13:
            return f"{value / (1000 if unit == 'k' else limit):.4g}{unit}"
    if 1e-2 <= size < 1e4:
        return f"{value:.4g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _ticks(low: float, high: float, n: int, whole: bool = False) -> list[float]:
    """Return round numbers, about `n` + 1 of them, whose first and last enclose low and high."""
    if low == high or (not whole and high - low <= 1e-9 * max(abs(low), abs(high))):
        pad = 1.0 if whole else abs(low) * 0.5 or 1.0
        low, high = (max(low - pad, 0.0) if whole else low - pad), high + pad
    raw = high / n - low / n
    power = 10.0 ** math.floor(math.log10(raw)) if raw > 1e-300 else 1e-300
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Steps are exact; other ticks lose the noise of the product, so that 3 * 0.1 reads 0.3.
    return [k * step if whole else float(f"{k * step:.14g}") for k in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 5))
    last = first + stride * math.ceil((last - first) / stride)
    # Each is clamped to what a float can be, rather than the range: its last tick must enclose `high`.
    return sorted({10.0 ** min(max(k, -323), 308) for k in range(first, last + 1, stride)})


def _thin(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return at most about 360 points that keep the lowest and highest value of every stretch, and every gap."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= _MAX_POINTS:
        return points
    size = math.ceil(len(points) / (_MAX_POINTS // 3))
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        chosen = {0: stretch[0]}
        finite = [i for i, (_, y) in enumerate(stretch) if math.isfinite(y)]
        broken = [i for i, (_, y) in enumerate(stretch) if not math.isfinite(y)][:1]
        if finite:
            finite = [min(finite, key=lambda i: stretch[i][1]), max(finite, key=lambda i: stretch[i][1])]
        chosen.update({i: stretch[i] for i in [*finite, *broken]})
        kept += [chosen[i] for i in sorted(chosen)]
    return [*kept, points[-1]] if kept[-1] != points[-1] else kept


def _path(points: Sequence[tuple[float, float] | None]) -> tuple[str, list[tuple[float, float]]]:
    """Return the path through the points, broken at None, and the points that stand alone between two breaks."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    text = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs if len(run) > 1)
    return text, [run[0] for run in runs if len(run) == 1]
