"""One call, one applied update: the exact mean gradient of a global batch, on every replica.

::

    for each shard of this worker:      seed its random stream, start from the step's buffers,
                                        loss_fn -> loss sum, count; backward
    beside the last backward:           counts, loss sums and failures of all workers (`tally`)
    the last backward:                  sums over workers (`gradients`)
    then, on every replica alike:       one division, clip, update, scheduler, buffers, audit

The loop stays the user's::

    step = TrainStep(model, optimizer, group=group, shards=8, mode="exact", clip_norm=1.0)
    for shards in loader:
        result = step.train_step(shards, loss_fn)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep import environment, streams, watch
from samestep.buffers import BufferMerge
from samestep.errors import SamestepError, SpecError
from samestep.forward import Settings, ShardRunner
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
        self._group, self._exact = group, mode == "exact"
        self._scheduler, self._scaler = scheduler, scaler
        self._clip_norm, self._skip, self._audit = clip_norm, on_nonfinite == "skip", audit
        options = {"mode": mode, "clip_norm": clip_norm, "micro_batch_size": micro_batch_size}
        watch.check(self.model, optimizer, group, shards, {**options, "on_nonfinite": on_nonfinite})
        self._gradients = GradientSum(
            self.model, group, mode, shards, find_unused_parameters, bucket_cap_mb, scaler is not None
        )
        self._buffers = BufferMerge(self.model, group)
        self._tally = Tally(group)
        block = None if shards is None else shard_range(shards, group.world_size, group.rank)
        lenient = scaler is not None or self._skip
        settings = Settings(block, autocast, scaler, micro_batch_size, seed, lenient, self._exact)
        self._runner = ShardRunner(self.model, group, settings, self._gradients, self._buffers)

    def train_step(self, shards: Iterable[Any], loss_fn: LossFn) -> StepResult:
        """Run this worker's shards, apply one update from the global batch, and return the global figures.

        Args:
            shards: this worker's shards in order, such as a step of a `ShardLoader`; each goes to `loss_fn`. An
                error while they are read counts as this worker's failure.
            loss_fn: ``loss_fn(model, shard) -> (loss_sum, count)`` or with a dict of further sums. Sums, never
                means: that is tried out at its first call (see `trial`). Not called on shards without samples.

        Raises:
            AgreementError: on all workers, when one of them raised, with its traceback; the model, optimizer and
                generators are then as before the step.
            SpecError: on all workers, when the global batch is empty or the loss function breaks its contract.
            WorkerError: when a worker is gone.

        Collective: all ranks of the group.
        """
        self._gradients.begin()
        self._buffers.begin()
        try:
            unread = self._runner.read(shards, self.step)
            with streams.preserved(self._group.device):
                rows, pending, failure = (
                    ([], None, unread) if unread else self._runner.run(loss_fn, self.step)
                )
                end_tally = self._tally.begin(rows, failure)
                if failure is None or not failure.is_away:
                    # A worker that failed adds nothing: the others, in their backward, learn of it after that.
                    self._gradients.finish(pending, self._runner.scale, broken=failure is not None)
                totals = end_tally()
                self._refuse_empty(totals)
                self._gradients.settle(totals.count)
                norm, fine = self._judge(totals, loss_fn)
        except BaseException as error:
            self._buffers.rewind()
            self._gradients.begin()
            if isinstance(error, SamestepError):
                error.step = self.step
            raise
        return self._update(totals, norm, fine)

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON data, the number of applied updates and what else decides the bits of the next one.

        That is the environment (see `environment.fingerprint`) and, in fast mode, the count that is expected.
        """
        more = {} if self._exact else {"expected_count": self._gradients.expected_count}
        return {"step": self.step, "environment": environment.fingerprint(self._group.device), **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a state; where the environment is another one, warn in words of what may change its bits.

        A count that is not in it only changes the last bits of fast mode.
        """
        saved = state.get("environment")
        for difference in (
            environment.differences(saved, environment.fingerprint(self._group.device)) if saved else ()
        ):
            warnings.warn(f"not as when the state was saved, its bits may change: {difference}", stacklevel=2)
        self._gradients.expected_count = float(state.get("expected_count", 1.0))
        self.step = int(state["step"])

    def _refuse_empty(self, totals: Totals) -> None:
        if totals.count == 0:
            raise SpecError(
                f"step {self.step}: the global batch has count 0 on all {self._group.world_size} workers. "
                "See that loss_fn returns the number of samples or tokens.",
                step=self.step,
            )

    def _judge(self, totals: Totals, loss_fn: LossFn) -> tuple[float, bool]:
        """Return the gradient's norm and whether to apply it; the same on all workers, as the gradient is."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = self._gradients.norm()
        fine = math.isfinite(norm) and (self._scaler is not None or math.isfinite(totals.loss))
        if fine or self._scaler is not None or self._skip:
            return norm, fine
        name = next((n for n, p in self.model.named_parameters() if not _finite(p.grad)), None)
        if name is None:
            raise SpecError(
                f"step {self.step}: the gradient is finite, but its norm is {norm}. Scale the loss down.",
                step=self.step,
            )
        shard, first = self._runner.find_nonfinite(loss_fn, self.step)
        found = f"gradient of `{first}` is not finite on shard {shard}" if first else ""
        each = self._group.gather_text(found)
        where = [
            f"{text} (rank {rank} of {self._group.world_size})" for rank, text in enumerate(each) if text
        ]
        cause = (
            "; ".join(where)
            or f"mean gradient of `{name}` is not finite, though every shard's is: it overflows"
        )
        raise SpecError(
            f'step {self.step}: {cause}. Lower the learning rate, clip, or pass on_nonfinite="skip".',
            step=self.step,
            name=(first if where and found else name),
            rank=next((rank for rank, text in enumerate(each) if text), None),
        )

    def _update(self, totals: Totals, norm: float, fine: bool) -> StepResult:
        lr = tuple(float(options["lr"]) for options in self.optimizer.param_groups)
        if fine:
            if self._clip_norm is not None and norm > self._clip_norm:
                self._gradients.multiply(self._clip_norm / norm)
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


def _finite(grad: Tensor | None) -> bool:
    return grad is None or grad.layout != torch.strided or bool(torch.isfinite(grad).all())
