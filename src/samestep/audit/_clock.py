"""When to look, in a program whose loop is not ours.

All ranks must look at the same time, also when one of them has done something that the others have not: a rank
that skips an update must not make the audit wait for it.

::

    with DDP:       forward (reduced) ── look ── ... backward ... update: remember the gradients' digests
    without:        forward: take the state's digests ... backward ... before the update ── look

A reduced forward of DDP comes on all ranks or on none, else DDP itself would hang; so that is the clock. An update
that no reduced forward preceded (everything ran in `no_sync`, or went round DDP) ticks the clock as well, as every
update does without DDP.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.audit._cover import Cover

__all__ = ["Clock", "Looker"]


class Looker(Protocol):
    """What the clock drives."""

    def due(self) -> bool:
        """Return whether the next tick looks."""
        ...

    def prepare(self) -> None:
        """Take the digests of the state, without a word to the others."""
        ...

    def remember_gradients(self, cover: Cover) -> None:
        """Take the digests of one model's gradients."""
        ...

    def tick(self, in_update: bool) -> None:
        """Look, when it is time. Collective."""
        ...


class Clock:
    """Listens to one model and its optimizer.

    Args:
        model: as the user calls it, perhaps wrapped in DDP.
        cover: what is watched; its updates are counted here.
        looker: is told when to look.
        leads: whether this model sets the pace; others only add what they hold.
    """

    def __init__(self, model: nn.Module, cover: Cover, looker: Looker, leads: bool) -> None:
        self._cover, self._looker, self._leads = cover, looker, leads
        self._reduced = False  # whether a reduced forward came since the last update
        self._prepared = False
        self._handles: list[Any] = []
        if leads and isinstance(model, DistributedDataParallel):
            self._handles.append(model.register_forward_pre_hook(self._before_ddp))
        if leads:
            self._handles.append(cover.model.register_forward_pre_hook(self._before_forward))
        if cover.optimizer is not None:
            self._handles.append(cover.optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(cover.optimizer.register_step_post_hook(self._after_update))

    def stop(self) -> None:
        """Listen no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_ddp(self, model: DistributedDataParallel, args: Any) -> None:
        if not _trains(model) or not model.require_backward_grad_sync or _joins(model):
            return
        self._reduced = self._prepared = True
        self._looker.tick(in_update=False)

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        # The first forward since the last update: all that the update and those around it did is done, and no
        # buffer has changed again.
        if _trains(model) and not self._prepared:
            self._prepared = True
            if self._looker.due():
                self._looker.prepare()

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._leads and not self._reduced:
            self._looker.tick(in_update=True)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # Fused optimizers are called by GradScaler even when they skip; only then does found_inf exist.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            return
        self._cover.updates += 1
        self._prepared = False
        if self._reduced and self._looker.due():
            self._looker.remember_gradients(self._cover)
        self._reduced = False


def _trains(model: nn.Module) -> bool:
    # Validation, perhaps on one rank only, is no time to look.
    return model.training and torch.is_grad_enabled()


def _joins(model: DistributedDataParallel) -> bool:
    # Inside DDP's join() a rank without data answers DDP's own collectives and no others.
    config = getattr(model, "_join_config", None)
    return bool(getattr(config, "enable", False))
