"""Writes the LR that a schedule asks for into an optimizer, on one clock: the number of applied updates.

The scheduler listens to the optimizer itself, so nothing has to be called, and nothing can be called too often.

::

    optimizer.step()  ──before──>  momentum history follows the LR, where it changed
                      ──update──   with LR = base_lr * schedule(step)
                      ──after───>  step += 1, the next LR is written

An update that GradScaler skips, a micro-batch that only accumulates and a scheduler step that a framework makes
once per process or per batch leave the clock alone. What stands in the optimizer's checkpoint never wins over the
scheduler: after any loading, in any order, the optimizer's LR is ``base_lr * schedule(step)``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NoReturn

from torch.optim import Optimizer

from samestep.errors import AgreementError, SpecError
from samestep.group import Group
from samestep.momentum import Policy, check_pair, free
from samestep.scheduler._follow import Follower
from samestep.scheduler._resume import RESUMES, Resume, Settings, decide
from samestep.schedules import Schedule

__all__ = ["LRScheduler", "PreviewRow"]

_FREE = free()
_log = logging.getLogger("samestep.scheduler")


class PreviewRow(NamedTuple):
    """What one update will use.

    Attributes:
        step: applied updates before it.
        lrs: LR per param group.
        momentum_factors: per param group, the factor on a velocity-form history before this update; 1 is none.
        batch_size: samples in this update, or None when no batch sizes were given.
    """

    step: int
    lrs: tuple[float, ...]
    momentum_factors: tuple[float, ...]
    batch_size: int | None = None

    @property
    def momentum_factor(self) -> float:
        """The factor of the first param group."""
        return self.momentum_factors[0]


class LRScheduler(Follower):
    """Keeps ``lr = base_lr * schedule(step)`` in every param group, with `step` the number of applied updates.

    It is a torch scheduler to whoever looks (Lightning with ``interval="step"``, Accelerate, a plain loop), but
    `step()` does nothing: the clock is advanced by ``optimizer.step()`` itself. Calling `step()` once per batch,
    per update, per process or never gives the same LRs.

    Args:
        optimizer: its param groups' LRs become the base LRs; an ``initial_lr`` that another scheduler or a loaded
            checkpoint left there counts before ``lr``. The LR of update 0 is written at once.
        schedule: from `samestep.schedules`.
        momentum: what happens to the momentum history when the LR changes, from `samestep.momentum`. None leaves
            the optimizer's state alone and accepts optimizers whose form is unknown.
        base_lrs: this run's base LR per param group, when the optimizer's own are not to be trusted.
        group: workers that must all use the same LRs, checked here and after loading.
        resume: what `load_state_dict` does when the checkpoint's base LRs, schedule or momentum policy are not
            this run's: "must_match" raises with both; "keep" takes the checkpoint's; "override" takes this run's,
            at the checkpoint's step; "rescale" takes this run's schedule, converts the step to this run's global
            batch size (same samples seen) and scales the checkpoint's base LRs to it.
        global_batch_size: samples per update; kept in the state, needed for "rescale".
        rescale_rule: "linear" or "sqrt" in the ratio of the batch sizes.

    Raises:
        SpecError: the pair makes no sense (Rprop with a schedule, a decay with a schedule-free optimizer), the
            optimizer has a scheduler of ours already, or an argument is wrong.
        AgreementError: the ranks of `group` would use different LRs.

    Collective: construction and `load_state_dict`, all ranks of `group`, if given.

    Example:
        >>> import torch
        >>> from samestep import schedules
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scheduler = LRScheduler(optimizer, schedules.linear_warmup(2))
        >>> lrs = []
        >>> for _ in range(4):
        ...     lrs.append(optimizer.param_groups[0]["lr"])
        ...     weight.grad = torch.ones(1)
        ...     optimizer.step()
        >>> lrs
        [0.0, 0.25, 0.5, 0.5]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        momentum: Policy | None = _FREE,
        base_lrs: Sequence[float] | None = None,
        group: Group | None = None,
        resume: Resume = "must_match",
        global_batch_size: int | None = None,
        rescale_rule: Literal["linear", "sqrt"] = "linear",
    ) -> None:
        # Torch's own __init__ is not called: it would wrap optimizer.step to warn about a step() we do not need.
        _check_arguments(optimizer, schedule, momentum, resume, rescale_rule)
        if global_batch_size is not None and (type(global_batch_size) is not int or global_batch_size < 1):
            raise SpecError(
                f"`global_batch_size`: expected a whole number of at least 1, got {global_batch_size!r}.",
                name="global_batch_size",
            )
        self.group = group
        self.resume = resume
        self.rescale_rule = rescale_rule
        self._step_count = 0  # frameworks read and raise it; we do neither
        with self._raising_everywhere():
            settings = Settings(0, (), (), (), schedule, momentum, global_batch_size)
            self._follow(optimizer, settings, base_lrs)
            if momentum is not None:
                check_pair(
                    optimizer, schedule.is_constant, schedule_decays=not schedule.never_falls, policy=momentum
                )
            self._attach()
        self._write()
        self._check_same_everywhere()

    # -- the clock ---------------------------------------------------------------------------------------------

    @property
    def applied_steps(self) -> int:
        """Updates applied so far; the LR in the optimizer is the one that the next update uses."""
        return self._applied

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The same number under torch's name."""
        return self._applied

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the clock is advanced by ``optimizer.step()``. Here so that loops written for torch run.

        Args:
            epoch: must be None; a scheduler cannot be moved to a step, only loaded.

        Raises:
            ValueError: an epoch (or a metric) was given.
        """
        if epoch is not None:
            raise ValueError(
                f"`epoch`: expected none, got {epoch!r}. Load a state with load_state_dict instead."
            )

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """Return the LR per param group that the next update uses."""
        self._adopt_groups()
        return list(self._last_lr)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the same as `get_last_lr`; torch's name for the computation."""
        return self.get_last_lr()

    def add_param_group(self, param_group: dict[str, Any], *, start_step: int | None = None) -> None:
        """Add a param group to the optimizer and say where its schedule starts.

        A group that is added through the optimizer itself is on the common clock from its first update on.

        Args:
            param_group: as for ``Optimizer.add_param_group``; its ``lr`` is its base LR.
            start_step: the number of applied updates at which this group's own clock shows 0, such as
                `applied_steps` for a warm-up of its own; None for the common clock.

        Raises:
            ValueError: `start_step` lies in the future.
        """
        start = 0 if start_step is None else start_step
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= self._applied:
            raise ValueError(
                f"`start_step`: expected 0 to {self._applied} (updates so far), got {start_step!r}."
            )
        self.optimizer.add_param_group(param_group)
        self._adopt_groups()
        self._starts[-1] = start
        self._write()

    def preview(
        self, n_steps: int, *, start: int = 0, batch_sizes: Callable[[int], int] | None = None
    ) -> list[PreviewRow]:
        """Return what the updates `start` to ``n_steps - 1`` use, without touching the optimizer.

        Args:
            n_steps: where to stop.
            start: where to begin; the first row's momentum factor is relative to the update before it.
            batch_sizes: global batch size by step, such as `schedules.BatchSizes`, for a column of its own.
        """
        self._adopt_groups()
        policy = self.momentum or _FREE
        rows: list[PreviewRow] = []
        old = self._lrs_at(start - 1) if start > 0 else None
        for step in range(start, n_steps):
            lrs = self._lrs_at(step)
            same = old is None or old == lrs
            factors = (1.0,) * len(lrs) if same else tuple(map(policy, old or lrs, lrs))
            rows.append(PreviewRow(step, tuple(lrs), factors, batch_sizes and batch_sizes(step)))
            old = lrs
        return rows

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON data: step, base LRs, schedule, momentum policy, LRs of the last update."""
        self._adopt_groups()
        return self._settings().to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the clock and, as `resume` says, base LRs, schedule and policy; write the LR that follows from them.

        The optimizer's state may be loaded before or after. Loading twice is the same as loading once. When the
        LR is not the one that the loaded momentum history belongs to, the policy acts before the next update.

        Raises:
            SpecError: not a state of ours, another number of param groups, or a conflict under "must_match".
            AgreementError: the ranks of `group` would use different LRs.

        Collective: all ranks of `group`, if given.
        """
        with self._raising_everywhere():
            self._adopt_groups()
            saved = Settings.from_dict(state_dict)
            settings, decision = decide(self._settings(), saved, self.resume, self.rescale_rule)
        self._set(settings)
        self._write()
        self._check_same_everywhere()
        if self.group is None or self.group.is_main:
            _log.info("scheduler resumed at step %d: %s", self._applied, decision)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a scheduler follows one optimizer object and cannot be copied or pickled. Save state_dict() and load "
            "it into a scheduler made for the other optimizer."
        )

    # -- the other workers -------------------------------------------------------------------------------------

    @contextmanager
    def _raising_everywhere(self) -> Iterator[None]:
        try:
            yield
        except SpecError as error:
            if self.group is None:
                raise
            self.group.agree(False, error.message, SpecError)
        else:
            if self.group is not None:
                self.group.agree(True, "", SpecError)

    def _check_same_everywhere(self) -> None:
        if self.group is None:
            return
        texts = self.group.gather_text(json.dumps(self.state_dict(), sort_keys=True))
        if len(set(texts)) > 1:
            other = next(rank for rank, text in enumerate(texts) if text != texts[0])
            raise AgreementError(
                f"`schedule`: expected the same on all ranks, got {texts[0]} on rank 0 and {texts[other]} on rank "
                f"{other}. Make base LRs, schedule, policy and the loaded state the same on all ranks.",
                rank=other,
                name="schedule",
            )


def _check_arguments(optimizer: Any, schedule: Any, momentum: Any, resume: Any, rule: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer`: expected a torch optimizer, got {type(optimizer).__name__}.")
    if not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule`: expected one from samestep.schedules, got {schedule!r}.")
    if momentum is not None and not isinstance(momentum, Policy):
        raise TypeError(f"`momentum`: expected a policy from samestep.momentum or None, got {momentum!r}.")
    if resume not in RESUMES:
        raise SpecError(f"`resume`: expected one of {', '.join(RESUMES)}; got {resume!r}.", name="resume")
    if rule not in ("linear", "sqrt"):
        raise SpecError(f"`rescale_rule`: expected linear or sqrt, got {rule!r}.", name="rescale_rule")
