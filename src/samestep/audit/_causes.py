"""What usually stands behind a difference, by the phase in which it shows first."""

from __future__ import annotations

__all__ = ["causes"]

_CAUSES = {
    "data": (
        "the sampler's generator or seed differs by rank",
        "`set_epoch` was not called on all ranks",
        "ranks read the same samples, or one rank's samples were changed on their way",
    ),
    "RNG": (
        "one seed on all ranks gives them the same dropout masks; or ranks that should share a generator draw from "
        "it differently",
    ),
    "step count": (
        "one rank skipped an update (a condition on its own loss, an exception that was caught, its own "
        "GradScaler)",
    ),
    "LR": (
        "the scheduler was stepped on some ranks only, or on a metric of one rank",
        "the LR was restored on one rank only, or scaled by something that differs by rank",
    ),
    "options": ("an option was changed or restored on some ranks only",),
    "scaler": ("the GradScaler's state was restored on some ranks only, or each rank saw its own overflow",),
    "gradients": (
        "a forward or backward went round the reduction: inside `no_sync`, or through `ddp.module`",
        "the parameter was added, replaced or unfrozen after wrapping",
        "gradients were changed on one rank after the reduction",
    ),
    "optimizer state": (
        "state was restored or created on some ranks only",
        "memory was changed on one rank (a failing device, a stray write)",
    ),
    "parameters at start": (
        "ranks were seeded differently and nothing made the replicas equal: call start.broadcast",
        "values were computed from each rank's own data: use start.initialize",
        "a checkpoint was loaded on some ranks only",
    ),
    "parameters": (
        "something besides the optimizer writes the parameter on some ranks (an inner optimizer, clamping, EMA)",
        "ranks began with different values",
        "memory was changed on one rank (a failing device, a stray write)",
    ),
    "buffers": (
        "the buffer is updated from each rank's own data (codebooks, observers): reduce its sums over workers",
        "`broadcast_buffers=False` also leaves out the copy at the start",
        "it is meant to differ: name it in watch(per_rank=[...])",
    ),
}


def causes(phase: str, moment: str) -> list[str]:
    """Return the likely causes, most likely first.

    Args:
        phase: one of the audit's phases.
        moment: when the audit looked, such as "at start".
    """
    return list(_CAUSES.get(f"{phase} {moment}", _CAUSES[phase]))
