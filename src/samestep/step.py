"""One call, one applied update: the exact mean gradient of a global batch, on every replica.

::

    for each shard of this worker:      seed its random stream, start from the step's buffers,
                                        loss_fn -> loss sum, count; backward
    before the last backward:           counts, loss sums and failures of all workers (`tally`)
    the last backward:                  sums over workers, one division (`gradients`)
    then, on every replica alike:       clip, update, scheduler, buffers, audit

The loop stays the user's::

    step = TrainStep(model, optimizer, group=group, shards=8, mode="exact", clip_norm=1.0)
    for shards in loader:
        result = step.train_step(shards, loss_fn)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep import streams
from samestep.buffers import BufferMerge
from samestep.errors import SamestepError, SpecError
from samestep.forward import ShardRunner
from samestep.gradients import GradientSum, Mode
from samestep.group import Group
from samestep.lossfn import LossFn
from samestep.sharding import shard_range
from samestep.tally import Tally, Totals

__all__ = ["StepResult", "TrainStep"]


class _Scheduler(Protocol):
    def step(self) -> None: ...


class _Audit(Protocol):
    def after_step(self, step: int) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every worker.

    Attributes:
        step: updates applied so far, this one included.
        loss: mean over the global batch: sum of loss sums over sum of counts.
        count: samples or tokens of the global batch.
        grad_norm: norm of the mean gradient over all parameters, before clipping.
        lr: learning rate of each param group that this update used.
        applied: false when the update was skipped (overflow of the GradScaler, or by `on_nonfinite="skip"`).
        sums: further sums over the global batch, by name.
    """

    step: int
    loss: float
    count: float
    grad_norm: float
    lr: tuple[float, ...]
    applied: bool
    sums: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Return a further sum over the global batch, divided by the count."""
        return self.sums[name] / self.count


class TrainStep:
    """Applies exact updates to a model on the workers of a group.

    Args:
        model: plain module on `group.device`; a DDP wrapper is taken off, and its own hooks are not used.
        optimizer: over the model's parameters.
        group: the workers.
        shards: S, shards of every global batch. Needed by "exact"; in "fast" mode each worker may bring any
            number of shards when it is None.
        mode: "fast" costs what plain DDP costs; "exact" gives the same bits for every world size from 1 to S.
        scheduler: stepped once after each applied update.
        scaler: torch's GradScaler, for float16.
        autocast: makes the context in which the loss function runs, such as
            ``lambda: torch.autocast("cpu", torch.bfloat16)``.
        clip_norm: bound on the norm of the mean gradient.
        micro_batch_size: samples that run through the model at a time; a larger shard is cut, without changing
            the mean.
        on_nonfinite: "raise", or "skip" an update whose gradient is not finite.
        audit: checked after each applied update.
        seed: of the shards' random streams.
        find_unused_parameters: as in torch's DDP, for models of which a step may leave out a part.
        bucket_cap_mb: as in torch's DDP.

    Raises:
        SpecError: when settings do not fit each other or the model.

    Collective: all ranks of `group` make it and call it alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Group,
        shards: int | None = None,
        mode: Mode = "fast",
        scheduler: _Scheduler | None = None,
        scaler: Any = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        clip_norm: float | None = None,
        micro_batch_size: int | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        audit: _Audit | None = None,
        seed: int = 0,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int | None = None,
    ) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer = optimizer
        self.step = 0
        self._group = group
        self._scheduler, self._scaler = scheduler, scaler
        self._clip_norm, self._skip, self._audit = clip_norm, on_nonfinite == "skip", audit
        problem = _problem(self.model, group, shards, mode, clip_norm, micro_batch_size, on_nonfinite)
        group.agree(not problem, problem, SpecError)
        self._gradients = GradientSum(self.model, group, mode, shards, find_unused_parameters, bucket_cap_mb)
        self._buffers = BufferMerge(self.model, group)
        self._tally = Tally(group)
        self._runner = ShardRunner(
            self.model,
            group,
            None if shards is None else shard_range(shards, group.world_size, group.rank),
            gradients=self._gradients,
            buffers=self._buffers,
            autocast=autocast,
            scaler=scaler,
            micro_batch_size=micro_batch_size,
            seed=seed,
            allow_nonfinite=scaler is not None or self._skip,
        )

    def train_step(self, shards: Iterable[Any], loss_fn: LossFn) -> StepResult:
        """Run this worker's shards, apply one update from the global batch, and return the global figures.

        Args:
            shards: this worker's shards in order, such as a step of a `ShardLoader`; each goes to `loss_fn`. An
                error while they are read counts as this worker's failure.
            loss_fn: ``loss_fn(model, shard) -> (loss_sum, count)`` or with a dict of further sums. Sums, never
                means. Not called on shards without samples.

        Raises:
            AgreementError: on all workers, when one of them raised, with its traceback; the model, optimizer and
                generators are then as before the step.
            SpecError: on all workers, when the global batch is empty or the loss function breaks its contract.
            WorkerError: when a worker is gone.

        Collective: all ranks of the group.
        """
        with streams.preserved(self._group.device):
            self._gradients.begin()
            self._buffers.begin()
            rows, pending, failure = self._runner.run(shards, loss_fn, self.step)
            try:
                totals = self._tally.exchange(rows, failure)
                self._refuse_empty(totals)
            except SamestepError as error:
                self._abort()
                error.step = self.step
                raise
            assert pending is not None
            self._gradients.finish(lambda: self._runner.backward(pending), totals.count)
        return self._update(totals)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of applied updates, as JSON data."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the number of applied updates."""
        self.step = int(state["step"])

    def _refuse_empty(self, totals: Totals) -> None:
        if totals.count == 0:
            raise SpecError(
                f"step {self.step}: the global batch has count 0 on all {self._group.world_size} workers. "
                "See that loss_fn returns the number of samples or tokens.",
                step=self.step,
            )

    def _abort(self) -> None:
        self._buffers.rewind()
        self._gradients.begin()

    def _update(self, totals: Totals) -> StepResult:
        lr = tuple(float(options["lr"]) for options in self.optimizer.param_groups)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = float(self._norm())
        fine = math.isfinite(norm)
        if not fine and self._scaler is None and not self._skip:
            name = next(n for n, p in self.model.named_parameters() if not _finite(p.grad))
            self._abort()
            raise SpecError(
                f"step {self.step}: the mean gradient of `{name}` is not finite. Lower the learning rate, clip, or "
                'pass on_nonfinite="skip".',
                step=self.step,
                name=name,
            )
        if fine:
            self._clip(norm)
            self.optimizer.step()
            self._buffers.merge()
            self.step += 1
            if self._scheduler is not None:
                self._scheduler.step()
        else:
            self._buffers.rewind()
        if self._scaler is not None:
            self._scaler.update()
        if fine and self._audit is not None:
            self._audit.after_step(self.step)
        mean = totals.loss / totals.count
        return StepResult(self.step, mean, totals.count, norm, lr, fine, totals.sums)

    def _norm(self) -> Tensor:
        grads = [p.grad for p in self._gradients.parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)

    def _clip(self, norm: float) -> None:
        if self._clip_norm is not None and norm > self._clip_norm:
            grads = [p.grad for p in self._gradients.parameters if p.grad is not None]
            torch._foreach_mul_(grads, self._clip_norm / norm)


def _problem(
    model: nn.Module,
    group: Group,
    shards: int | None,
    mode: str,
    clip_norm: float | None,
    micro_batch_size: int | None,
    on_nonfinite: str,
) -> str:
    """Return what is wrong with the settings, in words; empty when nothing is."""
    if mode not in ("fast", "exact"):
        return f"`mode`: expected 'fast' or 'exact', got {mode!r}."
    if mode == "exact" and shards is None:
        return "`shards`: exact mode needs their number. Pass shards=S, at least the largest world size."
    if shards is not None and shards < group.world_size:
        return (
            f"`shards`: expected at least world_size={group.world_size}, got {shards}. "
            "Use fewer workers or more shards."
        )
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        return f"`clip_norm`: expected a finite number > 0, got {clip_norm}."
    if micro_batch_size is not None and micro_batch_size < 1:
        return f"`micro_batch_size`: expected at least 1, got {micro_batch_size}."
    if on_nonfinite not in ("raise", "skip"):
        return f"`on_nonfinite`: expected 'raise' or 'skip', got {on_nonfinite!r}."
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        return "`model`: expected at least one trainable parameter, got none."
    for name, parameter in trainable:
        if parameter.device.type != group.device.type:
            return (
                f"`model`: expected all parameters on {group.device}, got `{name}` on {parameter.device}. "
                "Call model.to(group.device) before making the optimizer."
            )
    return ""


def _finite(grad: Tensor | None) -> bool:
    return grad is None or bool(torch.isfinite(grad).all())
