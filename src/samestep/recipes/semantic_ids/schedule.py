"""The learning rate of the recipe: linear warm-up times a cosine to zero."""

from __future__ import annotations

from samestep import schedules
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec

__all__ = ["schedule_of"]


def schedule_of(spec: SemanticIdsSpec) -> schedules.Schedule:
    """Return the schedule that the settings ask for."""
    decay = schedules.cosine(spec.steps) if spec.steps else schedules.constant(1.0)
    if not spec.warmup_steps:
        return decay
    return schedules.linear_warmup(spec.warmup_steps, 1.0 / (spec.warmup_steps + 1)) * decay
