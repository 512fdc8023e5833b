"""What `samestep schedule` shows of a recipe's settings: rates by update, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samestep.momentum import Policy, VelocitySGD
from samestep.scheduler import LRScheduler
from samestep.schedules import Schedule

__all__ = ["Outline", "stand_in"]


@dataclass(frozen=True)
class Outline:
    """The rates of a run.

    Attributes:
        scheduler: over param groups like those of the run.
        steps: updates of the run.
        base_lr: rate at factor 1 of parameters without a factor of their own.
        optimizer: its kind and settings, in words.
        policy: what a changed rate does to the momentum history; None where no rate is in the history.
    """

    scheduler: LRScheduler
    steps: int
    base_lr: float
    optimizer: str
    policy: Policy | None


def stand_in(schedule: Schedule, names: Sequence[str], lrs: Sequence[float], policy: Policy) -> LRScheduler:
    """Return a scheduler of an optimizer with one small parameter per group, in velocity form.

    Args:
        schedule: what it follows.
        names: of the param groups.
        lrs: base rate of each.
        policy: what a changed rate does to the momentum history.

    Example:
        >>> from samestep import momentum, schedules
        >>> scheduler = stand_in(schedules.cosine(2), ["all"], [0.5], momentum.free())
        >>> [row.lrs for row in scheduler.preview(2)]
        [(0.5,), (0.25,)]
    """
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "name": name}
        for name, lr in zip(names, lrs, strict=True)
    ]
    return LRScheduler(VelocitySGD(groups, lr=1.0, momentum=0.9), schedule, momentum=policy)
