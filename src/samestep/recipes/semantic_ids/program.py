"""One step of the recipe as `samestep.explain` takes it: the model as it stood, and the samples of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep import start
from samestep.explain import Program, by_train_step
from samestep.recipes.clip import clip_norm
from samestep.recipes.semantic_ids.data import read_embeddings
from samestep.recipes.semantic_ids.job import optimizer_of
from samestep.recipes.semantic_ids.model import RQVAE, loss_sums
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec

__all__ = ["program"]


def program(
    spec: SemanticIdsSpec, pick: Callable[[int], list[int]], state: Mapping[str, Tensor]
) -> tuple[Callable[[], Program], Tensor]:
    """Return a `build` for `explain.one_step` and the global batch.

    Args:
        spec: settings of the run.
        pick: told how many items there are, says which of them are the batch.
        state: parameters and buffers to begin with, by name.

    Raises:
        SpecError: when the data is not there any more.
    """
    items = read_embeddings(spec.data, id_column=spec.id_column, embedding_column=spec.embedding_column)
    rows = np.array(items.embeddings[pick(items.n_total)], dtype=np.float32)
    return partial(_build, spec, items.dim, dict(state)), torch.from_numpy(rows)


def _build(spec: SemanticIdsSpec, dim: int, state: dict[str, Tensor]) -> Program:
    model = RQVAE(dim, spec.n_centroids, spec.latent_dim, spec.hidden, spec.beta)
    start.mark(model)
    start.mark(model.quantizer)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(state[name])
    step = by_train_step(mode=spec.mode, clip_norm=spec.clip_norm)
    clip = None if spec.clip_norm is None else partial(clip_norm, bound=spec.clip_norm)
    return Program(model, optimizer_of(spec, model), _loss, clip=clip, train_step=step)


def _loss(model: torch.nn.Module, rows: Tensor) -> tuple[Any, ...]:
    return loss_sums(model, rows)
