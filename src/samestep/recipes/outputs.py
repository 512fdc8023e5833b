"""What the outputs of all recipes have in common: the model's file, and the manifest's account of the run."""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn

import samestep
from samestep.group import Group
from samestep.recipes.atomic import replacing
from samestep.recipes.folder import RunFolder
from samestep.recipes.spec import RunSpec

__all__ = ["manifest_head", "write_model"]


def manifest_head(spec: RunSpec, group: Group) -> dict[str, Any]:
    """Return what every manifest says of the run: recipe, versions, workers, what fixes the bits."""
    return {
        "format_version": 1,
        "recipe": spec.recipe,
        "samestep": samestep.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mode": spec.mode,
        "workers": group.world_size,
        "shards": spec.shards,
        "threads": torch.get_num_threads(),
        "device": str(group.device),
        "seed": spec.seed,
    }


def write_model(folder: RunFolder, model: nn.Module) -> None:
    """Write ``model.safetensors``, whole or not at all."""
    import safetensors.torch

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(folder.path / "model.safetensors") as file:
        file.write(safetensors.torch.save(tensors))
