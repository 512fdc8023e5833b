"""A loop on an Accelerator: its workers, the exact mean under accumulation, an audit, schedules of updates."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samestep.audit import Audit
from samestep.errors import GroupError, SpecError
from samestep.group import Group
from samestep.scheduler import LRScheduler
from samestep.weighing import LossWeights

__all__ = ["ExactMean", "check_schedulers", "group_of", "process_group", "watch"]

_PLAIN = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def process_group(**options: Any) -> InitProcessGroupKwargs:
    """Return what makes Accelerate's process group carry tensors of both CPU and GPU.

    Decisions and counts travel on the CPU, which NCCL alone, Accelerate's choice for GPUs, cannot carry::

        accelerator = Accelerator(kwargs_handlers=[process_group()])

    In a single process, and without CUDA, it changes nothing.

    Args:
        **options: of ``InitProcessGroupKwargs``, such as timeout.
    """
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        options.setdefault("backend", "cpu:gloo,cuda:nccl")
    return InitProcessGroupKwargs(**options)


def group_of(accelerator: Accelerator) -> Group:
    """Return the group of an Accelerator's workers.

    Args:
        accelerator: of DDP or a single process, on CPU or CUDA.

    Raises:
        SpecError: sharded or other kinds.
        GroupError: a process group that carries no CPU tensors.
    """
    if accelerator.distributed_type not in _PLAIN:
        raise SpecError(
            f"`accelerator`: expected DDP or a single process, got {accelerator.distributed_type}, which keeps no "
            "whole replica on each worker.",
            name="accelerator",
        )
    device = accelerator.device.type
    if accelerator.num_processes == 1:
        return Group.single("cuda" if device == "cuda" else "cpu")
    try:
        return Group.from_env(device, threads=None)
    except GroupError as error:
        raise GroupError(
            f"{error.message} In Accelerate: Accelerator(kwargs_handlers=[samestep.accelerate.process_group()])."
        ) from error


class ExactMean:
    """Backward passes whose update is the mean over all samples behind it, on all workers and micro-batches.

    Accelerate divides every micro-batch's loss by the number of micro-batches and takes the mean over workers: a
    mean of means, wrong as soon as they hold different numbers of samples or tokens, as at the end of an epoch.

    Args:
        accelerator: of DDP or a single process.
        model: as `prepare` returned it, before its first backward.
        *optimizers: likewise, all that update the model.
        ordered: adds workers in a fixed order, see `LossWeights`.

    Raises:
        SpecError: sharded kinds, or a model with a comm hook.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = nn.Linear(1, 1, bias=False)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> exact = ExactMean(accelerator, model, optimizer)
        >>> for inputs in (torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[5.0]])):
        ...     with accelerator.accumulate(model):
        ...         exact.backward(model(inputs).mean(), n_samples=len(inputs))
        >>> model.weight.grad.item()
        2.0
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, *optimizers: Any, ordered: bool = False
    ) -> None:
        self._accelerator = accelerator
        plain = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        self._weights = LossWeights(model, plain, group_of(accelerator), ordered=ordered)

    def backward(self, loss: Tensor, n_samples: float, **options: Any) -> None:
        """Call ``accelerator.backward`` on a loss that counts with its samples.

        Args:
            loss: scalar mean over this micro-batch, undivided.
            n_samples: samples or tokens behind it, >= 0.
            **options: for ``accelerator.backward``.

        Raises:
            SpecError: on all workers, in the micro-batch that communicates: a count that is negative or not finite
                on one of them, or no samples on any.
        """
        self._weights.weigh(loss, n_samples, divided_by=self._accelerator.gradient_accumulation_steps)
        self._accelerator.backward(loss, **options)


def watch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any = None,
    loader: Any = None,
    *,
    every: int = 100,
    **options: Any,
) -> Audit:
    """Audit the replicas of a loop from now on, and refuse a schedule that would run N times too fast.

    Args:
        accelerator: of DDP or a single process.
        model: as `prepare` returned it.
        optimizer: likewise.
        scheduler: as it is stepped.
        loader: as for `Audit.watch`.
        every: updates between two looks.
        **options: of `Audit` (on_disagreement, log) and of `Audit.watch` (per_rank, rng).

    Returns:
        The audit; call its `check` once more at the end of the run.

    Raises:
        SpecError: as for `check_schedulers`, or a wrong option.

    Collective: all workers watch the same things in the same order.
    """
    check_schedulers(accelerator, scheduler)
    whole = {name: options.pop(name) for name in ("on_disagreement", "log") if name in options}
    audit = Audit(group_of(accelerator), every=every, **whole)
    plain = getattr(scheduler, "scheduler", scheduler)
    return audit.watch(model, optimizer, plain, accelerator.scaler, loader, **options)


def check_schedulers(accelerator: Accelerator, *schedulers: Any) -> None:
    """Refuse a prepared scheduler that Accelerate steps once per worker at each update.

    A schedule that is written in updates would run N times too fast. `LRScheduler` may be prepared or not: its
    clock is the optimizer's.

    Args:
        accelerator: whose prepared schedulers are looked at as well.
        *schedulers: further ones; None is skipped.

    Raises:
        SpecError: names the scheduler, with what to do.
    """
    state = [*accelerator._schedulers, *schedulers]
    if accelerator.num_processes == 1 or accelerator.split_batches:
        return
    for wrapper in state:
        inner = getattr(wrapper, "scheduler", None)
        if (
            inner is None
            or isinstance(inner, LRScheduler)
            or not getattr(wrapper, "step_with_optimizer", False)
        ):
            continue
        kind = "metric" if isinstance(inner, ReduceLROnPlateau) else "update"
        raise SpecError(
            f"`scheduler`: expected one step per {kind}, got a prepared {type(inner).__name__} that Accelerate "
            f"steps {accelerator.num_processes} times. Use samestep.scheduler.LRScheduler, or do not prepare the "
            "scheduler and step it where accelerator.sync_gradients is true.",
            name="scheduler",
        )
