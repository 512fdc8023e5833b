"""What a scheduler takes from a checkpoint and what from this run: read the state, compare, decide, say so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from samestep import schedules
from samestep.errors import SpecError
from samestep.momentum import Policy, policy_from_dict
from samestep.scaling import scale
from samestep.schedules import Schedule

__all__ = ["RESUMES", "Resume", "Settings", "decide"]

Resume = Literal["must_match", "keep", "override", "rescale"]
RESUMES = ("must_match", "keep", "override", "rescale")


@dataclass(frozen=True)
class Settings:
    """All that the LR of a run follows from; also the content of a scheduler's state.

    Attributes:
        step: applied updates.
        base_lrs: per param group.
        start_steps: per param group, the applied updates at which its own clock shows 0.
        history_lrs: per param group, the LR of its last applied update, or None before the first.
        schedule: factor of the base LR.
        momentum: policy, or None.
        global_batch_size: samples per update, or None when nobody said.
    """

    step: int
    base_lrs: tuple[float, ...]
    start_steps: tuple[int, ...]
    history_lrs: tuple[float | None, ...]
    schedule: Schedule
    momentum: Policy | None
    global_batch_size: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return {
            "format_version": 1,
            "step": self.step,
            "base_lrs": list(self.base_lrs),
            "start_steps": list(self.start_steps),
            "history_lrs": list(self.history_lrs),
            "schedule": self.schedule.to_dict(),
            "momentum": None if self.momentum is None else self.momentum.to_dict(),
            "global_batch_size": self.global_batch_size,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Settings:
        """Return the settings that `to_dict` wrote.

        Raises:
            SpecError: not such data.
        """
        if not isinstance(data, Mapping) or data.get("format_version") != 1:
            version = data.get("format_version") if isinstance(data, Mapping) else type(data).__name__
            raise SpecError(
                f"`state_dict`: expected the state of a samestep scheduler, format_version 1, got {version!r}. "
                "Load the entry that LRScheduler.state_dict wrote.",
                name="state_dict",
            )
        momentum, batch = data.get("momentum"), data.get("global_batch_size")
        try:
            return cls(
                step=_whole("step", data["step"]),
                base_lrs=tuple(_rate("base_lrs", lr) for lr in data["base_lrs"]),
                start_steps=tuple(_whole("start_steps", start) for start in data["start_steps"]),
                history_lrs=tuple(
                    None if lr is None else _rate("history_lrs", lr) for lr in data["history_lrs"]
                ),
                schedule=schedules.from_dict(data["schedule"]),
                momentum=None if momentum is None else policy_from_dict(momentum),
                global_batch_size=None if batch is None else _whole("global_batch_size", batch),
            )
        except (KeyError, TypeError) as error:
            raise SpecError(f"`state_dict`: damaged: {error!r}.", name="state_dict") from error


def decide(own: Settings, saved: Settings, resume: str, rule: str) -> tuple[Settings, str]:
    """Return the settings to go on with, and what was decided in words.

    Args:
        own: this run's.
        saved: the checkpoint's.
        resume: one of `RESUMES`.
        rule: "linear" or "sqrt", for "rescale".

    Raises:
        SpecError: another number of param groups, a conflict under "must_match", or no batch sizes to rescale by.
    """
    counts = {len(saved.base_lrs), len(saved.start_steps), len(saved.history_lrs)}
    if counts != {len(own.base_lrs)}:
        raise SpecError(
            f"`base_lrs`: expected {len(own.base_lrs)} param groups as in this optimizer, got {sorted(counts)} in "
            "the checkpoint. Add or leave out param groups before loading.",
            name="base_lrs",
        )
    conflicts = _conflicts(own, saved)
    if resume == "rescale":
        return _rescaled(own, saved, rule)
    if conflicts and resume == "must_match":
        raise SpecError(
            f"the checkpoint is of another recipe: {'; '.join(conflicts)}. Say which one counts: resume='keep' "
            "(the checkpoint's), 'override' (this run's) or 'rescale' (another global batch size).",
            name="resume",
        )
    if not conflicts:
        # A batch size that only one of the two knows is no conflict, and is not forgotten.
        batch = own.global_batch_size or saved.global_batch_size
        return replace(saved, global_batch_size=batch), "same recipe as in the checkpoint"
    words = f"resume={resume!r}; {'; '.join(conflicts)}"
    if resume == "keep":
        return saved, words
    position = {"step": saved.step, "start_steps": saved.start_steps, "history_lrs": saved.history_lrs}
    return replace(own, **position), words  # type: ignore[arg-type]


def _conflicts(own: Settings, saved: Settings) -> list[str]:
    found = []
    for name in ("base_lrs", "schedule", "momentum", "global_batch_size"):
        ours, theirs = getattr(own, name), getattr(saved, name)
        unknown = name == "global_batch_size" and None in (ours, theirs)
        if ours != theirs and not unknown:
            found.append(f"`{name}`: the checkpoint has {theirs!r}, this run {ours!r}")
    return found


def _rescaled(own: Settings, saved: Settings, rule: str) -> tuple[Settings, str]:
    new, old = own.global_batch_size, saved.global_batch_size
    if not new or not old:
        raise SpecError(
            f"`global_batch_size`: expected one in the checkpoint and one in this run to rescale by, got {old} "
            f"and {new}. Give it when the scheduler is made.",
            name="global_batch_size",
        )
    # From the checkpoint's own pair of base LR and batch size, so that any number of restarts scales once.
    settings = replace(
        own,
        step=saved.step * old // new,
        start_steps=tuple(start * old // new for start in saved.start_steps),
        history_lrs=saved.history_lrs,
        base_lrs=tuple(_scaled(lr, old, new, rule) for lr in saved.base_lrs),
    )
    return settings, (
        f"resume='rescale' by the {rule} rule: global batch {old} -> {new}, step {saved.step} -> {settings.step}, "
        f"base_lrs {saved.base_lrs} -> {settings.base_lrs}"
    )


def _scaled(lr: float, old: int, new: int, rule: Any) -> float:
    return scale(lr, old, new, rule).lr if lr else 0.0  # a frozen group's 0 is no rate to scale


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"`{name}`: expected a whole number of at least 0, got {value!r}.", name=name)
    return value


def _rate(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
        raise SpecError(f"`{name}`: expected finite LRs of at least 0, got {value!r}.", name=name)
    return float(value)
