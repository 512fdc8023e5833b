"""The whole job: read images, train by large-minibatch SGD on all workers, test, write it all down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep import start
from samestep.audit import Audit
from samestep.checkpoint import Checkpointer
from samestep.errors import SpecError
from samestep.group import Group
from samestep.recipes.display import Display
from samestep.recipes.folder import RunFolder
from samestep.recipes.image_classification import data, models, results
from samestep.recipes.image_classification.augment import Augment
from samestep.recipes.image_classification.data import Data
from samestep.recipes.image_classification.evaluate import Figures, evaluate
from samestep.recipes.image_classification.schedule import Plan, build, plan_of
from samestep.recipes.image_classification.spec import ImageClassificationSpec
from samestep.recipes.loop import Loop
from samestep.reduce import pool
from samestep.sharding import Shard, ShardLoader
from samestep.step import TrainStep
from samestep.survive import Guard

__all__ = ["run"]


@dataclass
class _Job:
    spec: ImageClassificationSpec
    folder: RunFolder
    group: Group
    display: Display
    data: Data
    plan: Plan
    stop_after: int | None
    guard: Guard

    def evaluate(self, model: nn.Module) -> Figures:
        return evaluate(model, self.data.test, len(self.data.classes), self.group, self.guard.beat)


def run(
    spec: ImageClassificationSpec,
    folder: RunFolder,
    group: Group,
    resume: bool,
    stop_after: int | None = None,
    guard: Guard | None = None,
) -> None:
    """Run the recipe on the workers of `group`.

    Args:
        spec: settings.
        folder: where everything goes; made once the data are known to be good.
        group: the workers.
        resume: go on from the folder's last checkpoint.
        stop_after: stop training after so many steps, with a checkpoint and no results; None for the end.
        guard: asked throughout whether to stop; None for one that no signal reaches.

    Raises:
        SpecError: on all workers, when the data or the settings do not do.

    Collective: all ranks of `group`.
    """
    display = Display(group.is_main)
    found, plan = _prepare(spec, group)
    job = _Job(spec, folder, group, display, found, plan, stop_after, guard or Guard(group))
    share = (group.rank, group.world_size)
    mean, std = data.pixel_statistics(found.train, share, pool(group), job.guard.beat)
    torch.manual_seed(spec.seed)
    model = models.of_spec(spec, found.train.images.shape, len(found.classes)).to(group.device)
    model.set_pixels(mean, std)
    optimizer, scheduler = build(plan, model, group)
    folder.open(spec, group, display)
    if guard is not None:  # the caller closes it
        guard.write_stacks_to(folder.path / f"stacks-rank{group.rank}.txt")
    display.say(_headline(job))
    start.broadcast(model, optimizer, group=group)
    loop = _loop(job, model, optimizer, scheduler)
    if resume:
        loop.restore()
    finished = loop.run(partial(_loss, label_smoothing=spec.label_smoothing))
    loop.audit.check(loop.step.step)
    if finished:
        results.write(spec, folder, group, display, found, plan, model, job.evaluate(model))


def _prepare(spec: ImageClassificationSpec, group: Group) -> tuple[Data, Plan]:
    """Read and check, before long work and before anything is written."""
    found, plan, problem = None, None, ""
    try:
        if spec.shards < group.world_size:
            raise SpecError(
                f"`shards`: expected at least {group.world_size}, the number of workers, got {spec.shards}."
            )
        found = data.read(spec)
        plan = plan_of(spec, len(found.train))
    except SpecError as error:
        problem = str(error)
    group.agree(not problem, problem, SpecError)
    assert found is not None
    assert plan is not None
    return found, plan


def _headline(job: _Job) -> str:
    spec, plan = job.spec, job.plan
    rates = f"peak LR {plan.peak_lr:g}"
    if spec.solver is None and plan.peak_lr != spec.reference_lr:
        rates += f" ({spec.reference_lr:g} at batch {spec.reference_batch_size})"
    return (
        f"{spec.recipe} ({spec.model}): {len(job.data.train):,} images to train on, {len(job.data.test):,} for the "
        f"test, {len(job.data.classes)} classes; {plan.steps:,} steps of {spec.global_batch_size:,}, {rates}; "
        f"{job.group.world_size} workers, {spec.shards} shards, mode {spec.mode}"
    )


def _loop(job: _Job, model: models.Classifier, optimizer: torch.optim.Optimizer, scheduler: Any) -> Loop:
    spec, group = job.spec, job.group
    augment = Augment(spec.shift, spec.flip) if spec.shift or spec.flip else None
    loader = ShardLoader(
        job.data.train, spec.global_batch_size, spec.shards, group=group, seed=spec.seed, drop_last=spec.drop_last,
        augment=augment, fetch="samples" if augment else "shards", num_workers=spec.loader_processes,
    )  # fmt: skip
    audit = Audit(group, every=spec.audit_every, log=partial(job.folder.append, "audit.jsonl"))
    audit.watch(model, optimizer, scheduler=scheduler, loader=loader)
    step = TrainStep(
        model, optimizer, group=group, shards=spec.shards, mode=spec.mode, scheduler=scheduler,
        clip_norm=spec.clip_norm, audit=audit, seed=spec.seed,
    )  # fmt: skip
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def measure() -> dict[str, float]:
        figures = job.evaluate(model)
        return {"test_accuracy": figures.accuracy, "test_loss": figures.loss}

    return Loop(
        spec.model_copy(update={"steps": job.plan.steps}), group, job.folder, job.display, step, loader, audit,
        Checkpointer(job.folder.checkpoints, group=group, on_error=spec.on_disk_error), things, "accuracy",
        stop_after=job.stop_after, guard=job.guard, measure=measure,
        measure_every=job.plan.steps_of(spec.evaluate_every),
    )  # fmt: skip


def _loss(model: nn.Module, shard: Shard, label_smoothing: float) -> tuple[Tensor, int, dict[str, Tensor]]:
    pixels, labels = (tensor.to(next(model.parameters()).device) for tensor in shard.batch)
    return models.loss_sums(model, pixels, labels, label_smoothing)
