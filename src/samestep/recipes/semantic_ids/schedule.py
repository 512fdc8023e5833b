"""The learning rate of the recipe: linear warm-up times a cosine to zero."""

from __future__ import annotations

from samestep import schedules
from samestep.errors import SpecError
from samestep.momentum import Policy, free
from samestep.recipes.outline import Outline, stand_in
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec

__all__ = ["outline", "schedule_of"]


def schedule_of(spec: SemanticIdsSpec) -> schedules.Schedule:
    """Return the schedule that the settings ask for."""
    decay = schedules.cosine(spec.steps) if spec.steps else schedules.constant(1.0)
    if not spec.warmup_steps:
        return decay
    return schedules.linear_warmup(spec.warmup_steps, 1.0 / (spec.warmup_steps + 1)) * decay


def outline(spec: SemanticIdsSpec, policy: Policy | None) -> Outline:
    """Return what `samestep schedule` shows of the settings.

    Args:
        spec: settings.
        policy: whose momentum factors are wanted. The recipe's optimizers keep no LR in their history, so None
            shows none.

    Raises:
        SpecError: the settings are for k-means, which has no learning rate.
    """
    if spec.kind != "rqvae":
        raise SpecError(f"`kind`: expected rqvae, got {spec.kind}: it has no learning rate.", name="kind")
    scheduler = stand_in(schedule_of(spec), ["lr"], [spec.lr], policy or free())
    optimizer = f"{spec.optimizer}, weight decay {spec.weight_decay:g}"
    return Outline(scheduler, spec.steps, spec.lr, optimizer, policy)
