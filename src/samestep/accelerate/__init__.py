"""Accelerate and the Hugging Face Trainer with the exact mean, an audit, and a schedule that steps once per update.

::

    accelerator = Accelerator(gradient_accumulation_steps=4, kwargs_handlers=[process_group()])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = LRScheduler(optimizer.optimizer, schedules.cosine(1000))    # nothing has to step it
    exact = ExactMean(accelerator, model, optimizer)
    audit = watch(accelerator, model, optimizer, scheduler, every=100)
    for batch in loader:
        with accelerator.accumulate(model):
            exact.backward(loss_of(model, batch), n_samples=len(batch))      # for accelerator.backward
            optimizer.step()
            optimizer.zero_grad()

    trainer.add_callback(SamestepTrainerCallback(trainer, audit=100, exact_mean=True))

Needs the package ``accelerate`` (``pip install 'samestep[accelerate]'``), and for the callback ``transformers``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samestep.accelerate._accelerator import ExactMean, check_schedulers, group_of, process_group, watch

if TYPE_CHECKING:
    from samestep.accelerate._trainer import SamestepTrainerCallback

__all__ = [
    "ExactMean",
    "SamestepTrainerCallback",
    "check_schedulers",
    "group_of",
    "process_group",
    "watch",
]


def __getattr__(name: str) -> Any:
    # Its base class is in transformers, which a loop on Accelerate alone need not have.
    if name == "SamestepTrainerCallback":
        from samestep.accelerate._trainer import SamestepTrainerCallback

        return SamestepTrainerCallback
    raise AttributeError(f"module 'samestep.accelerate' has no attribute {name!r}")
