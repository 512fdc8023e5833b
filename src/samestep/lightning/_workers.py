"""Lightning's workers as our group: the strategies that fit, and the backend that carries decisions."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from samestep.errors import GroupError, SpecError
from samestep.group import Group

__all__ = ["ddp_strategy", "group_of"]


def ddp_strategy(**options: Any) -> DDPStrategy:
    """Return Lightning's DDP strategy with a process group that carries tensors of both CPU and GPU.

    Decisions and counts travel on the CPU, which NCCL, Lightning's choice for GPUs, cannot carry. On machines
    without CUDA this is ``strategy="ddp"``.

    Args:
        **options: of ``DDPStrategy``, and through it of DDP (``find_unused_parameters``, ``static_graph`` ...).
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    return DDPStrategy(process_group_backend=options.pop("process_group_backend", backend), **options)


def group_of(trainer: Trainer) -> Group:
    """Return the group of the workers that a trainer has started.

    Args:
        trainer: inside ``fit``.

    Raises:
        SpecError: a strategy that is neither DDP nor a single device.
        GroupError: a process group that carries no CPU tensors.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise SpecError(
            f"`strategy`: expected DDP or a single device, got {type(strategy).__name__}, which keeps no whole "
            "replica on each worker. Use strategy=samestep.lightning.ddp_strategy().",
            name="strategy",
        )
    device = strategy.root_device.type
    if trainer.world_size == 1:
        return Group.single("cuda" if device == "cuda" else "cpu")
    try:
        return Group.from_env(device, threads=None)
    except GroupError as error:
        raise GroupError(
            f"{error.message} In Lightning: strategy=samestep.lightning.ddp_strategy()."
        ) from error
