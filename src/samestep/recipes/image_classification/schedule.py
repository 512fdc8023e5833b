"""What the settings come to for so many training samples: updates, rates, momentum, param groups.

Goyal et al. 2017: the rate is the reference rate times batch / reference batch, and a warm-up leads to it from the
reference rate. Or `solver` names a file of a Detectron-family trainer, which decides all of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from samestep import momentum as policies
from samestep import scaling, schedules
from samestep.caffe2 import read_recipe
from samestep.errors import SpecError
from samestep.group import Group
from samestep.momentum import Policy, VelocitySGD
from samestep.recipes.image_classification import data, models
from samestep.recipes.image_classification.spec import ImageClassificationSpec
from samestep.recipes.outline import Outline
from samestep.scheduler import LRScheduler
from samestep.schedules import Schedule

__all__ = ["Plan", "build", "outline", "plan_of"]


@dataclass(frozen=True)
class Plan:
    """The optimization of a run.

    Attributes:
        steps: updates of the run.
        steps_per_epoch: updates that an epoch takes.
        peak_lr: rate at factor 1 of parameters without a factor of their own.
        schedule: factor by update.
        policy: what a changed rate does to the momentum history.
        momentum: of SGD.
        nesterov: of SGD.
        form: "gradient" or "velocity".
        groups: arguments of `scaling.param_groups`.
    """

    steps: int
    steps_per_epoch: int
    peak_lr: float
    schedule: Schedule
    policy: Policy
    momentum: float
    nesterov: bool
    form: str
    groups: dict[str, Any]

    def steps_of(self, epochs: float) -> int:
        """Return how many updates so many epochs take, to the nearest."""
        return _steps(epochs, self.steps_per_epoch)


def plan_of(spec: ImageClassificationSpec, n_samples: int) -> Plan:
    """Return the optimization that the settings ask for.

    Args:
        spec: settings.
        n_samples: samples to train on.

    Raises:
        SpecError: the batch is larger than the data, the warm-up or a milestone lies behind the end of the run, or
            the solver's file cannot be read or is for another batch.
    """
    batch = spec.global_batch_size
    if n_samples < batch and spec.drop_last:
        raise SpecError(
            f"`global_batch_size`: expected at most the {n_samples:,} training samples, got {batch:,}. "
            "Use a smaller batch, or drop_last=false.",
            name="global_batch_size",
        )
    per_epoch = n_samples // batch if spec.drop_last else -(-n_samples // batch)
    if spec.solver is not None:
        return _of_solver(spec, spec.solver, per_epoch)
    steps = spec.steps or max(1, _steps(spec.epochs, per_epoch))
    scaled = scaling.scale(spec.reference_lr, spec.reference_batch_size, batch, spec.scaling_rule)
    return Plan(
        steps, per_epoch, scaled.lr, _schedule(spec, steps, per_epoch, scaled.lr),
        getattr(policies, spec.momentum_policy)(), spec.momentum, spec.nesterov, spec.momentum_form,
        _groups(spec, spec.second_lr_factor),
    )  # fmt: skip


def build(
    plan: Plan, model: nn.Module, group: Group | None = None
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer of a model, and the scheduler that drives it.

    Args:
        plan: from `plan_of`.
        model: its trainable parameters are grouped into weights, biases and norms.
        group: workers that must use the same rates.

    Raises:
        SpecError: a pattern of the second rate matches no parameter, or optimizer and policy do not go together.

    Collective: all ranks of `group`, if given.
    """
    try:
        groups = scaling.param_groups(model, plan.peak_lr, **plan.groups)
    except ValueError as error:
        raise SpecError(
            str(error).replace("`lr_factors`", "`second_lr_params`"), name="second_lr_params"
        ) from None
    kind = VelocitySGD if plan.form == "velocity" else torch.optim.SGD
    optimizer = kind(groups, lr=plan.peak_lr, momentum=plan.momentum, nesterov=plan.nesterov)
    return optimizer, LRScheduler(optimizer, plan.schedule, momentum=plan.policy, group=group)


def outline(spec: ImageClassificationSpec, policy: Policy | None) -> Outline:
    """Return what `samestep schedule` shows of the settings; the data are opened to be counted.

    Args:
        spec: settings.
        policy: in place of the settings' own.

    Raises:
        SpecError: as `plan_of`, or the data cannot be opened.
    """
    found = data.read(spec)
    plan = plan_of(spec, len(found.train))
    if policy is not None:
        plan = replace(plan, policy=policy)
    _, scheduler = build(plan, models.of_spec(spec, found.train.images.shape, len(found.classes)))
    kind = "VelocitySGD" if plan.form == "velocity" else "SGD"
    nesterov = ", Nesterov" if plan.nesterov else ""
    decays = [plan.groups[f"{what}weight_decay"] for what in ("", "bias_", "norm_")]
    text = "{}, momentum {:g}{}, weight decay {:g} (biases {:g}, norms {:g})"
    shown = plan.policy if plan.form == "velocity" or policy is not None else None
    return Outline(
        scheduler, plan.steps, plan.peak_lr, text.format(kind, plan.momentum, nesterov, *decays), shown
    )


def _steps(epochs: float, per_epoch: int) -> int:
    return math.floor(Fraction(str(epochs)) * per_epoch + Fraction(1, 2))


def _schedule(spec: ImageClassificationSpec, steps: int, per_epoch: int, peak_lr: float) -> Schedule:
    decay = schedules.constant(1.0)
    if spec.decay == "cosine":
        decay = schedules.cosine(steps)
    elif spec.decay == "multistep":
        milestones = [_steps(epoch, per_epoch) for epoch in spec.milestones]
        if milestones[-1] >= steps or any(late <= early for early, late in pairwise(milestones)):
            raise SpecError(
                f"`milestones`: expected growing steps below the run's {steps:,}, got {milestones} (epochs "
                f"{spec.milestones} of {per_epoch:,} steps). Move them or lengthen the run.",
                name="milestones",
            )
        decay = schedules.multistep(milestones, spec.gamma)
    start = spec.warmup_start_factor
    if start is None:
        start = min(1.0, spec.reference_lr / peak_lr)
    warmup_steps = _steps(spec.warmup_epochs, per_epoch)
    if start == 1.0 or not warmup_steps:
        return decay
    if warmup_steps > steps:
        raise SpecError(
            f"`warmup_epochs`: expected at most the run's {steps:,} steps, got {warmup_steps:,} "
            f"({spec.warmup_epochs:g} epochs of {per_epoch:,} steps). Shorten the warm-up or lengthen the run.",
            name="warmup_epochs",
        )
    return schedules.linear_warmup(warmup_steps, start) * decay


def _of_solver(spec: ImageClassificationSpec, path: str, per_epoch: int) -> Plan:
    recipe = read_recipe(path)
    if recipe.global_batch_size != spec.global_batch_size:
        raise SpecError(
            f"`global_batch_size`: expected {recipe.global_batch_size}, for which {path} was written, "
            f"got {spec.global_batch_size}. Set it, or scale a copy of the file.",
            name="global_batch_size",
        )
    groups = asdict(recipe.param_groups)
    if recipe.second_lr_factor != 1.0:
        groups["lr_factors"] = dict.fromkeys(spec.second_lr_params, recipe.second_lr_factor)
    # With a momentum of 0 Nesterov's step is the plain one, and the optimizer refuses to be told otherwise.
    nesterov = recipe.nesterov and recipe.sgd_momentum > 0.0
    return Plan(
        spec.steps or recipe.total_steps, per_epoch, recipe.base_lr, recipe.schedule, recipe.momentum,
        recipe.sgd_momentum, nesterov, "velocity", groups,
    )  # fmt: skip


def _groups(spec: ImageClassificationSpec, second: float) -> dict[str, Any]:
    patterns: Sequence[str] = spec.second_lr_params if second != 1.0 else ()
    return {
        "weight_decay": spec.weight_decay,
        "bias_weight_decay": spec.bias_weight_decay,
        "norm_weight_decay": spec.norm_weight_decay,
        "bias_lr_factor": spec.bias_lr_factor,
        "lr_factors": dict.fromkeys(patterns, second),
    }
