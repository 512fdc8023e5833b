"""The learning rate that each original trainer feeds to its update, in its own order of operations.

Steps are counted from 0 here; the VRD and self-supervision trainers count from 1. The result is rounded to float32
once, at the end, as the originals do when they feed the rate to the net.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

__all__ = ["RATES", "boundaries", "gradual_steps", "levels"]

Solver = Mapping[str, Any]


def boundaries(solver: Solver) -> list[int]:
    """Return the steps from which the next level holds, from STEPS (without its leading 0) or STEP_SIZES."""
    if solver.get("STEPS"):
        return [int(step) for step in solver["STEPS"][1:]]
    return [int(step) for step in accumulate(solver["STEP_SIZES"])]


def levels(solver: Solver) -> list[float]:
    """Return the LRS that can be in effect; of a list that is one short, the last one stays."""
    lrs = [float(lr) for lr in solver["LRS"]]
    return (lrs + lrs[-1:] * len(boundaries(solver)))[: len(boundaries(solver)) + 1]


def gradual_steps(solver: Solver) -> int:
    """Return during how many updates a VRD warm-up is in effect, by the trainer's own rounding; 0 for none."""
    hold = max(0, solver["WARM_UP_ITERS"])
    if not solver["GRADUAL_INCREASE_LR"]:
        return int(hold)
    start = solver["WARM_UP_LR"] if hold else solver["GRADUAL_LR_START"]
    rises = math.ceil((solver["BASE_LR"] - start) / solver["GRADUAL_LR_STEP"])
    return int(max(hold, hold + rises))


def _scheduled(solver: Solver, step: int) -> float:
    base, policy = solver["BASE_LR"], solver["LR_POLICY"]
    if policy == "step":
        return float(base * solver["GAMMA"] ** (step // solver["STEP_SIZE"]))
    if policy == "cosine_decay":
        return float(base * (0.5 * (np.cos(np.pi * (float(step) / solver["MAX_ITER"])) + 1)))
    if policy == "exp_decay":
        return float(base * np.exp(float(step) / solver["MAX_ITER"] * np.log(solver["GAMMA"])))
    index = bisect_right(boundaries(solver), step)
    if policy == "steps_with_decay":
        return float(base * solver["GAMMA"] ** index)
    level = levels(solver)[index]
    return level * base if policy == "steps_with_relative_lrs" else level


def _detectron(solver: Solver, step: int) -> float:
    lr = _scheduled(solver, step)
    if step < solver["WARM_UP_ITERS"]:
        factor = solver["WARM_UP_FACTOR"]
        if solver["WARM_UP_METHOD"] == "linear":
            done = step / solver["WARM_UP_ITERS"]
            factor = factor * (1 - done) + done
        lr *= factor
    return float(np.float32(lr))


def _nonlocal(solver: Solver, step: int) -> float:
    end = solver["WARMUP.WARMUP_END_ITER"]
    if not solver["WARMUP.WARMUP_ON"] or step >= end:
        return float(np.float32(_scheduled(solver, step)))
    # The end points are rounded to float32 first, and the line between them is drawn in float64.
    start = float(np.float32(solver["WARMUP.WARMUP_START_LR"]))
    target = float(np.float32(_scheduled(solver, end)))
    if end == 1:
        return target
    span = float(np.float32(target - start))
    return float(np.float32(step * span / (end - 1) + start))


def _one_based(solver: Solver, step: int) -> float:
    lr = solver["BASE_LR"] * math.pow(solver["GAMMA"], bisect_right(boundaries(solver), step))
    return float(np.float32(lr))


def _vrd(solver: Solver, step: int) -> float:
    hold = solver["WARM_UP_ITERS"]
    if step < hold:
        return float(np.float32(solver["WARM_UP_LR"]))
    if step >= gradual_steps(solver):
        return _one_based(solver, step)
    if hold > 0:
        lr = solver["WARM_UP_LR"] + solver["GRADUAL_LR_STEP"] * (step + 1 - hold)
    else:
        lr = solver["GRADUAL_LR_START"] + solver["GRADUAL_LR_STEP"] * step
    return float(np.float32(min(solver["BASE_LR"], lr)))


RATES = {"detectron": _detectron, "vrd": _vrd, "self_supervision": _one_based, "nonlocal": _nonlocal}
