"""The picture of a schedule: LR per param group above, the momentum factor below, boundaries marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli._table import Plan, named
from samestep.errors import SpecError

if TYPE_CHECKING:
    from samestep.scheduler import PreviewRow

__all__ = ["draw"]

_EVERY_STEP = 100_000  # up to so many steps all are computed, so that no factor between boundaries is missed
_POINTS = 3000  # of a line: more than a picture has columns
_MOST_STEMS = 60
_MOST_LINES = 24
_COLOURS = ("#0b62a4", "#d1495b", "#2e8b57", "#8a5bb5", "#c77700", "#4a4a4a")
_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_GREY = "#8c8c8c"


def draw(plan: Plan, path: Path) -> None:
    """Write the picture of a plan.

    The LR is on a logarithmic scale where a drop would otherwise be too small to see. Above 100,000 steps some
    3,000 of them and all boundaries are drawn.

    Args:
        plan: what to draw.
        path: ends in .png or .svg.

    Raises:
        SpecError: the file cannot be written, or an LR is not finite.
    """
    rows = _rows(plan)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    moves = plan.has_momentum and any(factor != 1.0 for row in rows for factor in row.momentum_factors)
    with matplotlib.rc_context({"font.size": 9.5, "svg.hashsalt": "samestep", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 5.4 if moves else 4.2))
        (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
        ratios = {"height_ratios": [2.2, 1.0]} if moves else {}
        # Fixed margins: a layout engine draws everything twice to find the same ones.
        figure.subplots_adjust(0.09, 0.1 if moves else 0.125, 0.975, 0.88, hspace=0.1)
        panels = figure.subplots(2 if moves else 1, sharex=True, squeeze=False, gridspec_kw=ratios)[:, 0]
        _draw_lrs(panels[0], plan, rows)
        if moves:
            _draw_factors(panels[1], plan, rows)
        for index, panel in enumerate(panels):
            _dress(panel, plan, labels=index == 0)
        title = plan.source if plan.kind == "expression" else f"{Path(plan.source).name} ({plan.kind})"
        figure.suptitle(_short(title), x=0.01, ha="left", fontsize=11, fontweight="bold")
        still = "" if moves or not plan.has_momentum else " (the momentum history is never rescaled)"
        panels[-1].set_xlabel(f"step (applied updates){still}")
        try:
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise SpecError(
                f"--plot {path}: cannot be written ({error.strerror}). Check the folder.", name="plot"
            ) from None


def _rows(plan: Plan) -> list[PreviewRow]:
    if plan.n_steps <= _EVERY_STEP:
        return plan.rows(range(plan.n_steps))
    spread = {index * (plan.n_steps - 1) // _POINTS for index in range(_POINTS + 1)}
    return plan.rows(sorted(spread | set(plan.interesting_steps())))


def _draw_lrs(panel: Any, plan: Plan, rows: Sequence[PreviewRow]) -> None:
    columns, names = plan.columns(rows), plan.group_names()
    drawn = [column for column in columns if any(column[1])] or columns
    kept = _thin(rows, {*plan.interesting_steps()})
    log = _needs_log([lrs for _, lrs in drawn], plan, rows)
    for place, (indices, lrs) in enumerate(drawn):
        label = named(indices, names) if len(drawn) > 1 else named(indices, names) or None
        values = [lrs[i] if lrs[i] > 0.0 or not log else math.nan for i in kept]
        # A step is the stretch that its LR is in effect, so the last one has a width too.
        panel.plot(
            [*(rows[i].step for i in kept), plan.n_steps],
            [*values, values[-1]],
            drawstyle="steps-post",
            color=_COLOURS[place % len(_COLOURS)],
            linestyle=_STYLES[place % len(_STYLES)],
            linewidth=2.0,
            label=label,
        )
    if log:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        highest = max(max(lrs) for _, lrs in drawn)
        lowest = min(lr for _, lrs in drawn for lr in lrs if lr > 0.0)
        panel.set_ylim(max(lowest, highest * 1e-6) / 1.6, highest * 1.6)
    else:
        panel.set_ylim(bottom=0.0)
    cut = ", cut at 1e-6 of the highest" if log and lowest < highest * 1e-6 else ""
    panel.set_ylabel(f"LR, log scale{cut}" if log else "LR")
    flat = [named(indices, names) for indices, lrs in columns if not any(lrs)]
    if flat and len(drawn) < len(columns):
        panel.plot([], [], color=_GREY, label=f"{', '.join(flat)}: 0 throughout")
    if panel.get_legend_handles_labels()[1]:
        panel.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="none")


def _needs_log(columns: Sequence[Sequence[float]], plan: Plan, rows: Sequence[PreviewRow]) -> bool:
    """Return whether a flat stretch or a long tail would lie on the floor of a linear scale."""
    for lrs in columns:
        highest = max(lrs)
        ordered = sorted(lr for lr in lrs if lr > 0.0)
        if not ordered:
            continue
        fifth = ordered[len(ordered) // 5]
        places = {row.step: index for index, row in enumerate(rows)}
        drops = [
            lrs[places[step]] / lrs[places[step] - 1]
            for step in plan.boundaries()
            if places[step] and lrs[places[step] - 1] > 0.0
        ]
        fallen = math.prod(ratio for ratio in drops if 0.0 < ratio < 0.6)
        if fallen < 0.11 or highest / fifth > 40.0:
            return True
    return False


def _draw_factors(panel: Any, plan: Plan, rows: Sequence[PreviewRow]) -> None:
    moved = [i for i, row in enumerate(rows) if any(factor != 1.0 for factor in row.momentum_factors)]
    few = len(moved) <= _MOST_STEMS
    if few:
        kept = moved
    else:
        first = [row.momentum_factors[0] for row in rows]
        extremes = {rows[first.index(min(first))].step, rows[first.index(max(first))].step}
        kept = _thin(rows, {*plan.interesting_steps(), *extremes})
    events = [(rows[i].step, _strongest(rows[i].momentum_factors)) for i in kept]
    values = [value for _, value in events]
    log = max(values) > 3.0 or 0.0 < min(values) < 0.3
    if few:
        for step, value in events:
            # A history that is cleared has no place on a logarithmic scale: its stem ends at the lowest mark.
            end = value if value > 0.0 or not log else min(v for v in (*values, 0.1) if v > 0.0)
            panel.plot([step, step], [1.0, end], color=_COLOURS[4], linewidth=1.6)
            panel.plot([step], [end], "o" if value > 0.0 else "v", color=_COLOURS[4], markersize=5)
        _label(panel, plan, events, log)
    else:
        panel.plot(*zip(*events), color=_COLOURS[4], linewidth=1.4)
    panel.axhline(1.0, color=_GREY, linewidth=0.9)
    if log:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
    panel.margins(y=0.18)
    panel.set_ylabel("momentum factor")


def _label(panel: Any, plan: Plan, events: Sequence[tuple[int, float]], log: bool) -> None:
    """Write the factors beside their marks, the strongest first, as far as there is room."""
    taken: list[int] = []
    for step, value in sorted(events, key=lambda event: -abs(math.log(event[1] or 1e-300))):
        if any(abs(step - other) < 0.085 * plan.n_steps for other in taken) or (log and value <= 0.0):
            continue
        taken.append(step)
        late = step > 0.9 * plan.n_steps
        panel.annotate(
            f"x {value:.3g}",
            (step, value),
            xytext=(-7 if late else 7, 0),
            textcoords="offset points",
            ha="right" if late else "left",
            va="center",
            fontsize=8.5,
        )


def _strongest(factors: Sequence[float]) -> float:
    if factors.count(factors[0]) == len(factors):
        return factors[0]
    return max(factors, key=lambda factor: abs(math.log(factor or 1e-300)))


def _thin(rows: Sequence[PreviewRow], always: set[int]) -> list[int]:
    stride = max(1, len(rows) // _POINTS)
    return [i for i, row in enumerate(rows) if i % stride == 0 or row.step in always]


def _dress(panel: Any, plan: Plan, *, labels: bool) -> None:
    """Mark the boundaries, number the steps and take away what carries nothing."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    span, boundaries = max(1, plan.n_steps - 1), plan.boundaries()
    written = -math.inf
    for step in boundaries if len(boundaries) <= _MOST_LINES else ():
        panel.axvline(step, color=_GREY, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
        if labels and (step - written) / span > 0.06:
            panel.annotate(
                f"{step:,}",
                (step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color="#555555",
            )
            written = step
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    panel.set_xlim(-0.015 * span, 1.015 * span)
    panel.grid(True, color="#e6e6e6", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
