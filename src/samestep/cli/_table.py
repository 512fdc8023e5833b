"""A schedule with the param groups it drives, and its table: as text for people and as data for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from samestep.errors import SpecError

if TYPE_CHECKING:
    from samestep.scheduler import LRScheduler, PreviewRow

__all__ = ["Plan", "as_json", "as_text", "named", "policy_text"]

_MOST_ROWS = 60  # of a table that people read


@dataclass(frozen=True)
class Plan:
    """What is shown: a scheduler over stand-ins for the param groups, and what is known about the run.

    Attributes:
        source: the file or expression.
        kind: "expression", the family of a Caffe2 recipe, or the name of one of our recipes.
        scheduler: drives one param group of the optimizer per group of the run.
        n_steps: updates shown, at least 1.
        has_momentum: whether the optimizer's history follows the LR by a policy.
        facts: label and text, one line each.
        batch_size: samples per update, or None when it is not known.
    """

    source: str
    kind: str
    scheduler: LRScheduler
    n_steps: int
    has_momentum: bool
    facts: tuple[tuple[str, str], ...] = field(default=())
    batch_size: int | None = None

    def boundaries(self) -> tuple[int, ...]:
        """Return the steps inside the run at which the formula changes."""
        return self.scheduler.schedule.boundaries(self.n_steps - 1)

    def interesting_steps(self) -> list[int]:
        """Return the first and last step, and every boundary between its neighbours, in order."""
        last = self.n_steps - 1
        beside = {step + offset for step in self.boundaries() for offset in (-1, 0, 1)}
        return sorted({0, min(1, last), last} | {step for step in beside if 0 <= step <= last})

    def rows(self, steps: Sequence[int]) -> list[PreviewRow]:
        """Return what the updates at these steps use.

        Raises:
            SpecError: an LR leaves the range of floating-point numbers.
        """
        try:
            if len(steps) == self.n_steps and steps[-1] == self.n_steps - 1:
                return self.scheduler.preview(self.n_steps)
            return [self.scheduler.preview(step + 1, start=step)[0] for step in steps]
        except (OverflowError, ValueError) as error:
            raise SpecError(
                f"`{self.source}`: expected LRs that are finite numbers, got: {error}. Shorten the schedule or "
                "lessen its growth.",
                name="schedule",
            ) from error

    def columns(self, rows: Sequence[PreviewRow]) -> list[tuple[list[int], list[float]]]:
        """Return the LR of each param group by row, groups with the same LRs in all rows together."""
        columns: dict[tuple[float, ...], list[int]] = {}
        for index in range(len(self.group_names())):
            columns.setdefault(tuple(row.lrs[index] for row in rows), []).append(index)
        return [(indices, list(values)) for values, indices in columns.items()]

    def group_names(self) -> list[str]:
        """Return the names of the param groups; numbers where they have none."""
        groups = self.scheduler.optimizer.param_groups
        return [str(group.get("name", f"group {index}")) for index, group in enumerate(groups)]


def as_text(plan: Plan, steps: Sequence[int]) -> str:
    """Return the facts and the table of the plan at these steps."""
    boundaries, left_out = set(plan.boundaries()), 0
    if len(steps) > _MOST_ROWS:
        left_out = len(steps) - _MOST_ROWS
        steps = [*steps[: _MOST_ROWS // 2], *steps[-_MOST_ROWS // 2 :]]
    rows = plan.rows(steps)
    names = plan.group_names()
    cells: list[list[str]] = [["step", *(f"{step:,}" for step in steps)]]
    for indices, lrs in plan.columns(rows):
        cells.append([_heading("lr", indices, names), *map(number, lrs)])
    if plan.has_momentum:
        factors: dict[tuple[str, ...], list[int]] = {}
        for index in range(len(names)):
            texts = tuple(_factor(row.momentum_factors[index]) for row in rows)
            factors.setdefault(texts, []).append(index)
        for texts, indices in factors.items():
            cells.append([_heading("momentum factor", indices, names), *texts])
    cells.append(["", *(_mark(plan, step, boundaries) for step in steps)])
    widths = [max(map(len, column)) for column in cells[:-1]]
    lines = [
        "  ".join([*(text.rjust(width) for text, width in zip(line, widths)), line[-1]]).rstrip()
        for line in zip(*cells)
    ]
    if left_out:
        lines.insert(1 + _MOST_ROWS // 2, f"{'...':>{widths[0]}}  {left_out:,} rows left out; --json has all")
    label = max((len(name) for name, _ in plan.facts), default=0)
    facts = [f"{name.ljust(label)}  {text}" for name, text in plan.facts]
    return "\n".join([*facts, "", *lines])


def as_json(plan: Plan, steps: Sequence[int]) -> dict[str, Any]:
    """Return the plan and its rows at these steps as JSON data."""
    scheduler, boundaries = plan.scheduler, plan.boundaries()
    groups = scheduler.optimizer.param_groups
    policy = scheduler.momentum if plan.has_momentum else None
    return {
        "source": plan.source,
        "kind": plan.kind,
        "schedule": repr(scheduler.schedule),
        "description": scheduler.schedule.describe(),
        "steps": plan.n_steps,
        "global_batch_size": plan.batch_size,
        "boundaries": list(boundaries),
        "momentum": None if policy is None else policy.to_dict(),
        "groups": [
            {"name": name, "base_lr": base, "weight_decay": group.get("weight_decay", 0.0)}
            for name, base, group in zip(plan.group_names(), scheduler.base_lrs, groups)
        ],
        "rows": [
            {
                "step": row.step,
                "factor": scheduler.schedule(row.step),
                "lrs": list(row.lrs),
                "momentum_factors": list(row.momentum_factors) if plan.has_momentum else None,
                "boundary": row.step in boundaries,
            }
            for row in plan.rows(steps)
        ],
    }


def named(indices: Sequence[int], names: Sequence[str]) -> str:
    """Return the names of some param groups; nothing when they are all there are."""
    return "" if len(indices) == len(names) else ", ".join(names[index] for index in indices)


def number(value: float) -> str:
    """Return six significant digits.

    Example:
        >>> number(0.02 / 3), number(0.1), number(2e-06)
        ('0.00666667', '0.1', '2e-06')
    """
    return f"{value:.6g}"


def policy_text(policy: Any) -> str:
    """Return a momentum policy as one would write it in a program, and what it does."""
    said: dict[str, Callable[[dict[str, Any]], str]] = {
        "free": lambda s: "the history follows every change of the LR; torch's SGD does so by itself",
        "frozen": lambda s: "the history is never rescaled",
        "threshold": lambda s: f"rescaled when the LR changes by more than x {s['ratio']:g} in one step",
        "relative": lambda s: "rescaled at every change that float32 shows",
        "every_change": lambda s: "rescaled at every change of the LR",
    }
    settings = policy.to_dict()
    name = settings.pop("policy")
    arguments = ", ".join(f"{key}={value:g}" for key, value in settings.items())
    return f"{name}({arguments}): {said[name](settings)}"


def _heading(what: str, indices: Sequence[int], names: Sequence[str]) -> str:
    return f"{what} {named(indices, names)}".strip()


def _factor(factor: float) -> str:
    return "-" if factor == 1.0 else f"x {number(factor)}"


def _mark(plan: Plan, step: int, boundaries: set[int]) -> str:
    marks = ["boundary"] * (step in boundaries)
    if step >= plan.n_steps:
        marks.append("after the last update")
    elif step == plan.n_steps - 1:
        marks.append("last")
    elif step == 0:
        marks.append("first")
    return ", ".join(marks)
