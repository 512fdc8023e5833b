"""`SamestepCallback`: what samestep does for a Lightning run, at Lightning's own hooks.

::

    setup                     mark the module whose values are computed from data
    on_fit_start              join the workers; hook the weighted mean into DDP
    on_train_start            (a checkpoint is loaded by now) initialize, look at the replicas
    on_train_batch_start      the batch, for its weight; random numbers of this micro-batch
    on_before_backward        weigh the loss
    on_before_optimizer_step  (reduced, unscaled, not clipped yet) look at the replicas
    on_train_end              look at the replicas
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from samestep import streams
from samestep.audit import Audit
from samestep.errors import SpecError
from samestep.group import Group
from samestep.lightning._checks import check_loader, check_place
from samestep.lightning._initialization import Compute, Initialization, as_initialization
from samestep.lightning._loader import ShardDataLoader
from samestep.lightning._workers import group_of
from samestep.weighing import LossWeights, count_samples

__all__ = ["SamestepCallback"]


class SamestepCallback(Callback):  # type: ignore[misc]
    """Audits the replicas, makes the mean exact and sets values computed from data, in a Lightning run.

    Works with DDP (see `ddp_strategy`) and on a single device, with automatic and manual optimization, gradient
    accumulation, clipping and mixed precision. Nothing is changed that was not asked for.

    Args:
        audit: updates between two looks at all replicas, 0 for none; with manual optimization, batches. One more at
            the start and one at the end. They come between reduction and clipping.
        exact_mean: True divides by the number of all samples of an update, however they fell on workers and
            micro-batches: the loss that `training_step` returns, or that ``manual_backward`` gets, must be a mean
            over its batch. Samples are counted as `weighing.count_samples` does, or by the `ShardDataLoader`. A
            function of the batch counts instead, such as ``lambda batch: (batch["labels"] != -100).sum()``.
        ordered: with `exact_mean`, adds the workers' gradients in a fixed order. With three or more workers a
            resume is bit for bit the same only then; see `LossWeights`.
        initialize: ``compute(module, group) -> {name: tensor}`` or an `Initialization`; run before the first step
            of a run, not after a resume.
        seed: of the random numbers (dropout) of training: those of a micro-batch then follow from seed, update and
            shard alone, so that a resume and another number of workers draw the same ones. None leaves the
            generators to Lightning, which restores none on a resume.
        on_disagreement: "raise" or "log", as for `Audit`.
        log: file of the audit's records.
        per_rank: as for `Audit.watch`, names that may differ.
        rng: as for `Audit.watch`.

    Raises:
        SpecError: in ``fit``, on all workers: a strategy, loader or loop with which that is not possible.
        ReplicaMismatchError: in ``fit``, on all workers, when replicas differ and `on_disagreement` is "raise".

    Collective: all workers of the trainer.

    Example:
        >>> callback = SamestepCallback(audit=50, exact_mean=True)
    """

    def __init__(
        self,
        *,
        audit: int = 100,
        exact_mean: bool | Callable[[Any], float] = False,
        ordered: bool = False,
        initialize: Initialization | Compute | None = None,
        seed: int | None = None,
        on_disagreement: Literal["raise", "log"] = "raise",
        log: Path | str | None = None,
        per_rank: Sequence[str] = (),
        rng: Literal["per rank", "same", "distinct"] = "per rank",
    ) -> None:
        Audit(Group.single(), every=audit, on_disagreement=on_disagreement)  # the same checks, now
        if not isinstance(exact_mean, bool) and not callable(exact_mean):
            raise SpecError(
                f"`exact_mean`: expected True, False or a function of the batch, got {exact_mean!r}.",
                name="exact_mean",
            )
        self._every, self._exact_mean, self._ordered, self._seed = audit, exact_mean, ordered, seed
        self._initialization = as_initialization(initialize)
        self._audit_options: dict[str, Any] = {"on_disagreement": on_disagreement, "log": log}
        self._watch_options: dict[str, Any] = {"per_rank": per_rank, "rng": rng}
        self._group = Group.single()
        self._audit: Audit | None = None
        self._weights: LossWeights | None = None
        self._loader: ShardDataLoader | None = None
        self._batch: Any = None
        self._n_batches = 0
        self._saved: dict[str, Any] = {}

    # -- Lightning's hooks -----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Mark what will be computed from data, before a checkpoint is loaded into it."""
        if stage == "fit" and self._initialization is not None:
            self._initialization.mark(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the workers and hook into DDP."""
        self._close()
        self._n_batches = 0
        self._group = group_of(trainer)
        if self._exact_mean is not False:
            self._weights = LossWeights(trainer.model, trainer.optimizers, self._group, ordered=self._ordered)
        if self._every:
            # Looks come from the hooks here: Lightning runs forward and backward inside optimizer.step.
            self._audit = Audit(self._group, every=0, **self._audit_options)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs] or [None]
            for place, optimizer in enumerate(trainer.optimizers or [None]):
                scheduler = schedulers[min(place, len(schedulers) - 1)]
                self._audit.watch(trainer.model, optimizer, scheduler, scaler, **self._watch_options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set what is computed from data, unless it is set, and look at the replicas."""
        check_loader(trainer, pl_module.automatic_optimization, self._exact_mean is not False)
        loader = trainer.train_dataloader
        self._loader = loader if isinstance(loader, ShardDataLoader) else None
        self._resume(trainer)
        if self._initialization is not None:
            self._initialization.run(pl_module, list(trainer.optimizers), self._group)
        if self._audit is not None:
            self._audit.check(trainer.global_step, "at start")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the batch for its weight, and seed its random numbers."""
        self._batch = batch
        if self._seed is not None:
            n_micro = trainer.accumulate_grad_batches
            shard = self._group.rank * n_micro + batch_idx % n_micro
            streams.seed_all(self._seed, trainer.global_step, shard)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Let the loss count with the samples behind it."""
        if self._weights is None:
            return
        if pl_module.automatic_optimization:
            count = partial(self._count, self._batch)
            self._weights.weigh(loss, count, divided_by=trainer.accumulate_grad_batches)
        elif self._group.world_size > 1:
            if not getattr(trainer.model, "require_backward_grad_sync", True):
                raise SpecError(
                    "`manual_backward`: expected a backward that communicates, got one under no_sync "
                    "(toggle_model(sync_grad=False)). Who divides the sum of micro-batches is not known here: use "
                    "automatic optimization with accumulate_grad_batches, or exact_mean=False.",
                    name="exact_mean",
                )
            self._weights.weigh(loss, partial(self._count, self._batch))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Look at the replicas when it is time: gradients are reduced, and not clipped yet."""
        due = self._every and trainer.global_step % self._every == 0
        if self._audit is not None and pl_module.automatic_optimization and due:
            self._audit.check(trainer.global_step, "after reduction")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """With manual optimization, look at the replicas here: a worker may have stepped where others have not."""
        self._batch = None
        self._n_batches += 1
        manual = not pl_module.automatic_optimization
        if self._audit is not None and manual and self._n_batches % self._every == 0:
            self._audit.check(trainer.global_step, "after the step")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the replicas once more."""
        if self._audit is not None:
            self._audit.check(trainer.global_step, "after the step")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the optimizers."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the optimizers."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume must match and where the loader is, as JSON data."""
        loader = None if self._loader is None else self._loader.state_dict()
        return {"format_version": 1, "seed": self._seed, "loader": loader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what the checkpoint says, for `on_train_start`."""
        self._saved = dict(state_dict)

    # --------------------------------------------------------------------------------------------------------------

    def _count(self, batch: Any) -> float:
        if callable(self._exact_mean):
            return float(self._exact_mean(batch))
        return count_samples(batch) if self._loader is None else self._loader.n_samples

    def _resume(self, trainer: Trainer) -> None:
        saved, self._saved = self._saved, {}
        if saved and saved["seed"] != self._seed:
            raise SpecError(
                f"`seed`: expected {saved['seed']} as in the checkpoint, got {self._seed}. The run would draw "
                "other random numbers: give the same seed.",
                name="seed",
            )
        if saved and self._loader is not None:
            # Lightning gives a loader its state back in the middle of an epoch, not at the end of one.
            self._loader.load_state_dict(saved["loader"])
            check_place(trainer, self._loader)

    def _close(self) -> None:
        if self._audit is not None:
            self._audit.detach()
        if self._weights is not None:
            self._weights.detach()
        self._audit = self._weights = None
        self._batch = None
