"""The training loop that all recipes share: resume, steps, metrics, checkpoints.

::

    restore ─> for each step: loader ─> TrainStep ─> metrics.jsonl, bar
                                ├─ `samestep compare` asked for it: a trace of the run
                                ├─ every measure_every: what the recipe measures, into the same row
                                ├─ every checkpoint_every: save
                                └─ a worker was asked to stop: all save and stop
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.audit import Audit
from samestep.checkpoint import Checkpointer
from samestep.compare import record
from samestep.errors import CheckpointError
from samestep.group import Group
from samestep.lossfn import LossFn
from samestep.recipes.display import Display
from samestep.recipes.folder import RunFolder
from samestep.recipes.spec import RunSpec
from samestep.sharding import ShardLoader
from samestep.step import StepResult, TrainStep
from samestep.survive import Guard

__all__ = ["Loop"]

_LOGGED_LINES = 1000  # a run's curves need no more points, however long it is


@dataclass
class Loop:
    """What a run needs to train.

    Attributes:
        spec: settings.
        group: the workers.
        folder: the run's folder.
        display: shows progress.
        step: the model's step.
        loader: gives the shards.
        audit: told which samples are read.
        checkpointer: keeps checkpoints, or None.
        things: further things with a state, by name, for the checkpoints.
        shown: name of the further sum whose mean tells people how training goes; the loss if empty.
        stop_after: steps after which the run stops, short of its end; None for the end.
        measure: collective; returns further figures by name, the same on all workers; people see the first.
        measure_every: steps between calls of `measure`; 0 for none.
        guard: told at each step whether to stop; None for one that no signal reaches.
    """

    spec: RunSpec
    group: Group
    folder: RunFolder
    display: Display
    step: TrainStep
    loader: ShardLoader
    audit: Audit
    checkpointer: Checkpointer | None
    things: Mapping[str, Any]
    shown: str = ""
    stop_after: int | None = None
    measure: Callable[[], Mapping[str, float]] = dict
    measure_every: int = 0
    guard: Guard | None = None
    _sample_ids: Tensor | None = field(default=None, init=False)  # of this worker's shards of the last step

    def restore(self) -> bool:
        """Go to the last checkpoint; return whether there was one.

        Collective: all workers.
        """
        found = self.checkpointer is not None and self.checkpointer.restore(**self._all_things()) is not None
        if self.group.is_main:
            for name in ("metrics.jsonl", "audit.jsonl"):
                self.folder.forget_after(name, self.step.step if found else -1)
        return found

    def run(self, loss_fn: LossFn) -> bool:
        """Take the steps that are left.

        Args:
            loss_fn: see `TrainStep.train_step`.

        Returns:
            Whether the run has come to its end.

        Collective: all workers.
        """
        total = self.spec.steps
        stop = total if self.stop_after is None else min(total, self.stop_after)
        guard, asked = self.guard or Guard(self.group), False
        with self.display.stage("training", total, self.step.step):
            shards = self.loader.steps()
            log_every = max(1, total // _LOGGED_LINES)
            record(self.step.step, self.step.model, self.step.optimizer, group=self.group)
            since, samples = time.perf_counter(), 0.0
            while self.step.step < stop and not asked:
                guard.ask()
                result = self.step.train_step(self._lazily(shards), loss_fn)
                record(
                    result.step, self.step.model, self.step.optimizer,
                    loss=result.loss, samples=self._sample_ids, group=self.group,
                )  # fmt: skip
                samples += self.spec.global_batch_size
                measured = _is_due(result.step, self.measure_every)
                if measured or result.step % log_every == 0 or result.step == total:
                    rate = samples / (time.perf_counter() - since)
                    self._log(result, rate, self.measure() if measured else {})
                    since, samples = time.perf_counter(), 0.0
                asked = guard.answer()
                if asked or result.step == stop or _is_due(result.step, self.spec.checkpoint_every):
                    self.save()
        if asked or stop < total:
            self.display.say(f"stopped after {self.step.step} of {total} steps; go on with --resume")
        return stop == total and not asked

    def save(self) -> None:
        """Write a checkpoint of now.

        Raises:
            CheckpointError: on all workers, when the disk does not take it, or what was logged before; unless the
                setting `on_disk_error` is "continue".

        Collective: all workers.
        """
        if self.checkpointer is not None:
            self.checkpointer.save(self.step.step, **self._all_things())
        problem = self.folder.flush() if self.group.is_main else ""
        if self.spec.on_disk_error == "raise":
            self.group.agree(not problem, problem, CheckpointError)
        elif problem:
            self.display.say(problem)

    def _log(self, result: StepResult, rate: float, measured: Mapping[str, float]) -> None:
        row: dict[str, Any] = {
            "step": result.step,
            "loss": result.loss,
            "lr": result.lr[0],
            "grad_norm": result.grad_norm,
            "samples_per_second": round(rate, 1),
            **{name: result.mean(name) for name in sorted(result.sums)},
            **measured,
        }
        if self.group.is_main:
            self.folder.append("metrics.jsonl", row)
        name = next(iter(measured), self.shown or "loss")
        self.display.advance(result.step, f"{name.replace('_', ' ')} {row[name]:.4f}  {rate:,.0f} samples/s")

    def _lazily(self, shards: Iterator[list[Any]]) -> Iterator[Any]:
        """Read the next step's shards only inside `train_step`, where a failure to read becomes known to all."""
        mine = next(shards)
        self.audit.samples(mine)
        self._sample_ids = torch.cat([shard.sample_ids for shard in mine])
        yield from mine

    def _all_things(self) -> dict[str, Any]:
        return {"step": self.step, "loader": self.loader, **self.things}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
