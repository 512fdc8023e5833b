"""The SOLVER part of a recipe as a schedule, with the contradictions that would make it mean something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samestep import schedules
from samestep.caffe2._keys import Family
from samestep.caffe2._rates import boundaries, gradual_steps, levels
from samestep.errors import SpecError
from samestep.schedules import Schedule

__all__ = ["base_lr", "check", "schedule"]

Solver = Mapping[str, Any]

# The list-valued keys that a policy reads; one that is given and not read would be a recipe that says two things.
_READS = {
    "detectron": {
        "step": {"STEP_SIZE"},
        "steps_with_decay": {"STEPS"},
        "steps_with_lrs": {"STEPS", "LRS"},
        "cosine_decay": set(),
        "exp_decay": set(),
    },
    "nonlocal": {
        "steps_with_decay": {"STEPS", "STEP_SIZES"},
        "steps_with_lrs": {"STEPS", "STEP_SIZES", "LRS"},
        "steps_with_relative_lrs": {"STEPS", "STEP_SIZES", "LRS"},
    },
    "vrd": {"step": {"STEP_SIZES"}},
}
_LISTS = {"STEP_SIZE", "STEPS", "STEP_SIZES", "LRS"}


def check(solver: Solver, given: frozenset[str], family: Family) -> None:
    """Refuse values that are out of range or contradict each other.

    Raises:
        SpecError: with the name of the key.
    """
    if family == "nonlocal" and {"STEPS", "STEP_SIZES"} <= given:
        raise _wrong("STEPS", "no value beside STEP_SIZES, which says the same", solver["STEPS"])
    _check_numbers(solver, family)
    policy = solver.get("LR_POLICY")
    if policy is not None:
        known = _READS[family]
        if policy not in known:
            raise _wrong("LR_POLICY", f"one of {', '.join(sorted(known))} for {family}", policy)
        for key in sorted((given & _LISTS) - known[policy]):
            raise _wrong(key, f"no value with LR_POLICY {policy}, which does not read it", solver[key])
        if policy in ("steps_with_lrs", "steps_with_relative_lrs"):
            _check_levels(solver, family)
    if family == "vrd":
        if solver["LR_TYPE"] != "variable":
            raise _wrong("LR_TYPE", "variable, all that the released trainer has", solver["LR_TYPE"])
        if solver["GRADUAL_INCREASE_LR"] and solver["GRADUAL_LR_STEP"] <= 0:
            raise _wrong(
                "GRADUAL_LR_STEP", "a number above 0 with GRADUAL_INCREASE_LR", solver["GRADUAL_LR_STEP"]
            )
    if family == "detectron" and solver["WARM_UP_METHOD"] not in ("constant", "linear"):
        raise _wrong("WARM_UP_METHOD", "constant or linear", solver["WARM_UP_METHOD"])


def base_lr(solver: Solver) -> float:
    """Return the rate at factor 1: BASE_LR, or the first of absolute LRS."""
    if solver.get("LR_POLICY") == "steps_with_lrs":
        return float(solver["LRS"][0]) or float(max(solver["LRS"]))
    return float(solver["BASE_LR"])


def schedule(solver: Solver, family: Family) -> Schedule:
    """Return the factor of the base rate, with 0-based steps, warm-up included."""
    base = base_lr(solver)
    if family == "detectron":
        return _detectron(solver, base)
    if family == "nonlocal":
        return _nonlocal(solver, base)
    if family == "vrd":
        return _vrd(solver, base)
    return schedules.multistep(boundaries(solver), solver["GAMMA"])


def _scheduled(solver: Solver, base: float) -> Schedule:
    policy = solver["LR_POLICY"]
    total: int = solver.get("MAX_ITER", 0)
    shapes: dict[str, Callable[[], Schedule]] = {
        "step": lambda: schedules.step(solver["STEP_SIZE"], solver["GAMMA"]),
        # The trainer has no idea of an end: asked for a rate past MAX_ITER, its cosine climbs again.
        "cosine_decay": lambda: schedules.cosine(total, past_end="climb"),
        "exp_decay": lambda: schedules.exponential(total, solver["GAMMA"]),
        "steps_with_decay": lambda: schedules.multistep(boundaries(solver), solver["GAMMA"]),
        "steps_with_relative_lrs": lambda: schedules.piecewise(levels(solver), boundaries(solver)),
        "steps_with_lrs": lambda: schedules.piecewise(
            [schedules.absolute(lr, base) for lr in levels(solver)], boundaries(solver)
        ),
    }
    return shapes[policy]()


def _detectron(solver: Solver, base: float) -> Schedule:
    main = _scheduled(solver, base)
    steps = solver["WARM_UP_ITERS"]
    if steps <= 0:
        return main
    if solver["WARM_UP_METHOD"] == "constant":
        return main * schedules.constant_warmup(steps, solver["WARM_UP_FACTOR"])
    return main * schedules.linear_warmup(steps, solver["WARM_UP_FACTOR"])


def _nonlocal(solver: Solver, base: float) -> Schedule:
    main = _scheduled(solver, base)
    steps = solver["WARMUP.WARMUP_END_ITER"]
    if not solver["WARMUP.WARMUP_ON"] or steps <= 0:
        return main
    start = schedules.absolute(solver["WARMUP.WARMUP_START_LR"], base)
    return schedules.with_warmup(main, schedules.linear_warmup(steps, start, "end_early"), "interpolate")


def _vrd(solver: Solver, base: float) -> Schedule:
    main = schedules.multistep(boundaries(solver), solver["GAMMA"])
    length = gradual_steps(solver)
    hold = max(0, solver["WARM_UP_ITERS"])
    if not length:
        return main
    held = schedules.absolute(solver["WARM_UP_LR"], base)
    if length == hold:
        return schedules.with_warmup(main, schedules.constant_warmup(hold, held), "overlay")
    increment = schedules.absolute(solver["GRADUAL_LR_STEP"], base)
    start = held if hold else schedules.absolute(solver["GRADUAL_LR_START"], base)
    rise = schedules.gradual_warmup(start, increment, hold_steps=hold or 1)
    arrived = max(rise.boundaries(), default=0)
    if length == arrived or not any(step < max(length, arrived) for step in boundaries(solver)):
        return schedules.with_warmup(main, rise, "overlay")
    # A decay falls before the later of two ends: of the rise as it is, and of the rise as the trainer rounds it.
    passed = sum(step <= length for step in boundaries(solver))
    later = [step - length for step in boundaries(solver) if step > length]
    return rise.then(schedules.multistep(later, solver["GAMMA"]) * solver["GAMMA"] ** passed, at=length)


def _check_numbers(solver: Solver, family: Family) -> None:
    total = "MAX_ITER" if "MAX_ITER" in solver else "NUM_ITERATIONS"
    for key in ("BASE_LR", total, "STEP_SIZE"):
        if key in solver and solver[key] <= 0:
            raise _wrong(key, "a number above 0", solver[key])
    if not 0.0 <= solver["MOMENTUM"] < 1.0:
        raise _wrong("MOMENTUM", "a number in [0, 1)", solver["MOMENTUM"])
    may_be_negative = {"WARM_UP_ITERS"}
    for key, value in solver.items():
        if isinstance(value, float | int) and value < 0 and key not in may_be_negative:
            raise _wrong(key, "a number >= 0", value)
    for key in ("STEPS", "STEP_SIZES"):
        steps = solver.get(key, [])
        if any(step != int(step) or step < 0 for step in steps):
            raise _wrong(key, "whole numbers >= 0", steps)
    steps = solver.get("STEPS") or []
    if steps != sorted(steps) or (steps and steps[0] != 0):
        raise _wrong("STEPS", "steps in order, the first of them 0", steps)
    if family == "detectron" and solver["LR_POLICY"].startswith("steps_") and not steps:
        raise _wrong("STEPS", f"steps for LR_POLICY {solver['LR_POLICY']}", steps)
    if "STEP_SIZES" in solver and not solver["STEP_SIZES"]:
        raise _wrong("STEP_SIZES", "at least one length", [])
    if solver["GAMMA"] == 0.0 and solver.get("LR_POLICY") == "exp_decay":
        raise _wrong("GAMMA", "a ratio above 0 for exp_decay", 0.0)


def _check_levels(solver: Solver, family: Family) -> None:
    lrs, phases = solver["LRS"], len(boundaries(solver))
    if any(lr < 0 for lr in lrs) or not any(lrs):
        raise _wrong("LRS", "numbers >= 0, not all 0", lrs)
    if family == "detectron" or solver.get("STEPS"):
        if len(lrs) != phases + 1:
            raise _wrong("LRS", f"{phases + 1} values, one for each of STEPS", lrs)
        return
    if len(lrs) not in (phases, phases + 1):
        raise _wrong(
            "LRS", f"{phases} values, one for each of STEP_SIZES (or one more for what follows)", lrs
        )
    if len(lrs) == phases and solver["MAX_ITER"] > boundaries(solver)[-1]:
        end = boundaries(solver)[-1]
        raise _wrong(
            "LRS", f"{phases + 1} values, as MAX_ITER {solver['MAX_ITER']} goes beyond step {end}", lrs
        )


def _wrong(key: str, expected: str, got: object) -> SpecError:
    return SpecError(f"`SOLVER.{key}`: expected {expected}, got {got!r}.", name=key)
