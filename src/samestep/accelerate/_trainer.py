"""The Hugging Face Trainer: an audit, and the exact mean for models whose loss is a mean per micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from samestep.accelerate._accelerator import check_schedulers, group_of
from samestep.audit import Audit
from samestep.errors import SpecError
from samestep.weighing import LossWeights, count_samples

__all__ = ["SamestepTrainerCallback"]


class SamestepTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Audits the replicas of a Hugging Face Trainer and makes the mean over a global batch exact.

    ::

        trainer = Trainer(model, arguments, train_dataset=..., optimizers=(optimizer, LRScheduler(optimizer, ...)))
        trainer.add_callback(SamestepTrainerCallback(trainer, exact_mean=lambda batch: batch["mask"].sum()))
        trainer.train()

    The Trainer steps a scheduler once per update, so that ours or torch's will do.

    Args:
        trainer: the one that the callback is added to.
        audit: updates between two looks at all replicas, 0 for none; one more at the end.
        exact_mean: True counts the samples of every micro-batch (see `weighing.count_samples`), a function of the
            model's keyword arguments counts instead. The model's loss must be a mean over the micro-batch. Models
            that take ``num_items_in_batch`` (the causal LMs of transformers) and a ``compute_loss_func`` normalise
            over the update by themselves and are refused.
        ordered: with `exact_mean`, adds workers in a fixed order, see `LossWeights`.
        on_disagreement: "raise" or "log", as for `Audit`.
        log: file of the audit's records.

    Raises:
        SpecError: here, a wrong setting; when training begins, on all workers, a loss that is not the model's mean.
        ReplicaMismatchError: while training, on all workers, when replicas differ.

    Collective: all workers.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        audit: int = 100,
        exact_mean: bool | Callable[[dict[str, Any]], float] = False,
        ordered: bool = False,
        on_disagreement: Literal["raise", "log"] = "raise",
        log: Path | str | None = None,
    ) -> None:
        self._trainer, self._every = trainer, audit
        self._exact_mean, self._ordered = exact_mean, ordered
        self._options: dict[str, Any] = {"on_disagreement": on_disagreement, "log": log}
        self._group = group_of(trainer.accelerator)
        Audit(self._group, every=audit, **self._options)  # its checks, now
        self._audit: Audit | None = None
        self._weights: LossWeights | None = None
        self._handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hook into DDP and the model, and look at the replicas from now on."""
        trainer = self._trainer
        self._close()
        check_schedulers(trainer.accelerator, trainer.lr_scheduler)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if self._exact_mean is not False:
            self._check_loss()
            self._weights = LossWeights(
                trainer.model_wrapped, [optimizer], self._group, ordered=self._ordered
            )
            hook = trainer.model.register_forward_hook(self._after_forward, with_kwargs=True)
            self._handles.append(hook)
        if self._every:
            self._audit = Audit(self._group, every=self._every, **self._options)
            scaler = trainer.accelerator.scaler
            self._audit.watch(trainer.model_wrapped, optimizer, trainer.lr_scheduler, scaler)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the replicas once more, and let go of the model."""
        if self._audit is not None:
            self._audit.check(state.global_step)
        self._close()

    def _after_forward(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not model.training or self._weights is None:
            return
        loss = output["loss"] if hasattr(output, "keys") else output[0]
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return  # a forward of somebody else's, without labels
        divided_by = self._trainer.current_gradient_accumulation_steps
        self._weights.weigh(loss, partial(self._count, kwargs), divided_by)

    def _count(self, batch: dict[str, Any]) -> float:
        return float(self._exact_mean(batch) if callable(self._exact_mean) else count_samples(batch))

    def _check_loss(self) -> None:
        trainer = self._trainer
        owner = ""
        if trainer.model_accepts_loss_kwargs:
            owner = "a model that takes num_items_in_batch, by which the Trainer itself normalises over the update"
        elif trainer.compute_loss_func is not None:
            owner = "a compute_loss_func, which is given num_items_in_batch"
        elif trainer.label_smoother is not None:
            owner = "a label smoother, whose loss is not the model's"
        elif type(trainer).compute_loss is not Trainer.compute_loss:
            owner = f"{type(trainer).__name__}.compute_loss, whose loss may not be the model's"
        if owner:
            raise SpecError(
                f"`exact_mean`: expected a loss that the model returns as a mean, got {owner}. "
                "Leave exact_mean out.",
                name="exact_mean",
            )

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._weights is not None:
            self._weights.detach()
        if self._audit is not None:
            self._audit.detach()
        self._handles, self._weights, self._audit = [], None, None
