"""One step of the recipe as `samestep.explain` takes it: the model as it stood, and the images of a step.

The images are as they are stored: shifts and flips are drawn per sample and are not part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.explain import Program, by_train_step
from samestep.recipes.clip import clip_norm
from samestep.recipes.image_classification import data, models
from samestep.recipes.image_classification.schedule import Plan, build, plan_of
from samestep.recipes.image_classification.spec import ImageClassificationSpec

__all__ = ["program"]


def program(
    spec: ImageClassificationSpec, pick: Callable[[int], list[int]], state: Mapping[str, Tensor]
) -> tuple[Callable[[], Program], tuple[Tensor, Tensor]]:
    """Return a `build` for `explain.one_step` and the global batch, pixels and labels.

    Args:
        spec: settings of the run.
        pick: told how many training samples there are, says which of them are the batch.
        state: parameters and buffers to begin with, by name.

    Raises:
        SpecError: when the data is not there any more.
    """
    found = data.read(spec)
    plan = plan_of(spec, len(found.train))
    shape = (found.train.images.shape, len(found.classes))
    return partial(_build, spec, plan, shape, dict(state)), found.train[pick(len(found.train))]


def _build(spec: ImageClassificationSpec, plan: Plan, shape: Any, state: dict[str, Tensor]) -> Program:
    model = models.of_spec(spec, *shape)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(state[name])
    optimizer, _ = build(plan, model)
    step = by_train_step(mode=spec.mode, clip_norm=spec.clip_norm)
    clip = None if spec.clip_norm is None else partial(clip_norm, bound=spec.clip_norm)
    loss = partial(_loss, label_smoothing=spec.label_smoothing)
    return Program(model, optimizer, loss, clip=clip, train_step=step)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], label_smoothing: float) -> tuple[Any, ...]:
    return models.loss_sums(model, *batch, label_smoothing)
