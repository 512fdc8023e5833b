"""The scheduler's side towards the optimizer: counts its updates, writes its LRs, moves its momentum history."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler

from samestep.errors import SpecError
from samestep.momentum import Policy, apply, free, group_form
from samestep.scheduler._resume import Settings
from samestep.schedules import Schedule

__all__ = ["Follower"]

_FREE = free()
# One owner of the LR: which of our schedulers follows which optimizer.
_owners: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Follower]] = weakref.WeakKeyDictionary()


class Follower(TorchScheduler):
    """Follows one optimizer: keeps its LRs at ``base_lr * schedule(step)`` and counts its updates."""

    optimizer: Optimizer
    schedule: Schedule
    momentum: Policy | None
    base_lrs: list[float]  # type: ignore[assignment]
    global_batch_size: int | None

    def _follow(self, optimizer: Optimizer, settings: Settings, base_lrs: Sequence[float] | None) -> None:
        """Take over the param groups; nothing is written and nothing listens until `_attach`."""
        self.optimizer = optimizer
        self._last_lr: list[float] = []  # type: ignore[assignment]
        self._written: list[Any] = []  # the very objects that stand in the param groups as "lr"
        self._counts = True  # whether the update under way is one of the run
        self._set(settings)
        self._adopt_groups(base_lrs)

    def _settings(self) -> Settings:
        return Settings(
            self._applied,
            tuple(self.base_lrs),
            tuple(self._starts),
            tuple(self._history_lrs),
            self.schedule,
            self.momentum,
            self.global_batch_size,
        )

    def _set(self, settings: Settings) -> None:
        self._inert: bool | None = None
        self._applied = settings.step
        self.base_lrs = list(settings.base_lrs)
        self._starts = list(settings.start_steps)
        # What the momentum history is relative to: the LR of the last applied update, None before the first.
        self._history_lrs = list(settings.history_lrs)
        self.schedule = settings.schedule
        self.momentum = settings.momentum
        self.global_batch_size = settings.global_batch_size

    def detach(self) -> None:
        """Stop following the optimizer, so that another scheduler may take it; its LRs stay as they are."""
        for handle in self._handles:
            handle.remove()
        _owners.pop(self.optimizer, None)

    @staticmethod
    def following(optimizer: Optimizer) -> Follower | None:
        """Return the scheduler of ours that follows this optimizer, or None."""
        owner = _owners.get(optimizer)
        return None if owner is None else owner()

    def _attach(self) -> None:
        if Follower.following(self.optimizer) is not None:
            raise SpecError(
                "`optimizer`: expected one without a scheduler, got one that an LRScheduler follows already. An LR "
                "has one owner: call LRScheduler.following(optimizer).detach() first.",
                name="optimizer",
            )
        _owners[self.optimizer] = weakref.ref(self)

        # The hooks hold the scheduler: it works for as long as its optimizer lives, whether or not anybody else
        # keeps it, since nobody has to call it.
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._before_update()

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._after_update()

        def loaded(optimizer: Optimizer) -> None:
            self._write()

        self._handles = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(after),
            self.optimizer.register_load_state_dict_post_hook(loaded),
        ]

    def _adopt_groups(self, base_lrs: Sequence[float] | None = None) -> None:
        """Take over param groups that are not known yet."""
        groups = self.optimizer.param_groups
        if base_lrs is not None and len(base_lrs) != len(groups):
            raise SpecError(
                f"`base_lrs`: expected {len(groups)}, one per param group, got {len(base_lrs)}.",
                name="base_lrs",
            )
        known = len(self.base_lrs)
        if known == len(groups):
            return
        self._inert = None
        for index, group in enumerate(groups[known:], start=known):
            lr = group.get("initial_lr", group["lr"]) if base_lrs is None else base_lrs[index]
            self.base_lrs.append(_base_lr(index, lr))
            self._starts.append(0)
            self._history_lrs.append(None)
            if any(group["lr"] is other["lr"] for other in groups[:index] if isinstance(other["lr"], Tensor)):
                group["lr"] = group[
                    "lr"
                ].clone()  # groups that share one tensor could not have LRs of their own
        if self._last_lr:
            self._write()

    def _lrs_at(self, step: int) -> list[float]:
        if not any(self._starts):
            factor = self.schedule(step)
            return [base * factor for base in self.base_lrs]
        return [
            base * self.schedule(max(0, step - start)) for base, start in zip(self.base_lrs, self._starts)
        ]

    def _write(self) -> None:
        self._last_lr = self._lrs_at(self._applied)
        written: list[Any] = []
        for group, base, lr in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr):
            group["initial_lr"] = base
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            written.append(group["lr"])
        self._written = written

    def _before_update(self) -> None:
        self._adopt_groups()
        foreign = [
            index
            for index, (group, ours) in enumerate(zip(self.optimizer.param_groups, self._written))
            if group["lr"] is not ours
        ]
        self._counts = not foreign
        if foreign:
            self._check_foreign(foreign)
            if not self._counts:
                return
        if self._history_lrs != self._last_lr:
            if self.momentum is not None:
                old = [new if old is None else old for old, new in zip(self._history_lrs, self._last_lr)]
                if old != self._last_lr and not self._is_inert():
                    apply(self.optimizer, self.momentum, old, self._last_lr)
            self._history_lrs = list(self._last_lr)

    def _is_inert(self) -> bool:
        """Whether a change of LR leaves this optimizer's state alone: `free` on a history without the LR."""
        if self._inert is None:
            forms = [group_form(self.optimizer, index) for index in range(len(self.optimizer.param_groups))]
            plain = all(form.also is None and not any(power for _, power in form.buffers) for form in forms)
            self._inert = self.momentum == _FREE and plain
        return self._inert

    def _check_foreign(self, foreign: list[int]) -> None:
        groups = self.optimizer.param_groups
        if len(foreign) == len(groups) and all(float(group["lr"]) == 0.0 for group in groups):
            # torch's distributed checkpoint makes optimizers create their state by an update at LR 0 that changes
            # nothing, and puts our LR back afterwards. That is not an update of the run.
            return
        for index in foreign:
            if float(groups[index]["lr"]) != self._last_lr[index]:
                raise SpecError(
                    f"`lr` of param group {index}: expected {self._last_lr[index]!r} at step {self._applied}, got "
                    f"{float(groups[index]['lr'])!r}: something else writes it. Leave one owner of the LR: remove "
                    "the other one, or call detach() on this scheduler.",
                    step=self._applied,
                    name="lr",
                )
        self._counts = True

    def _after_update(self) -> None:
        # Fused optimizers are called by GradScaler even when they skip; only then does found_inf exist.
        found_inf = getattr(self.optimizer, "found_inf", None)
        if not self._counts or (found_inf is not None and float(found_inf) != 0.0):
            return
        self._applied += 1
        self._write()


def _base_lr(index: int, lr: Any) -> float:
    value = float(lr)
    if not 0.0 <= value < float("inf"):
        raise SpecError(
            f"`base_lrs[{index}]`: expected a finite LR of at least 0, got {value!r}.",
            name=f"base_lrs[{index}]",
        )
    return value
