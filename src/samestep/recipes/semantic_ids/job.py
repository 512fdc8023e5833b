"""The whole job: read embeddings, learn codebooks on all workers, give every item its id, write it all down.

::

    rkmeans   read ─ k-means level by level over all workers' rows ─────────────┐
    rvq       read ─ codebooks that follow mini-batches, level by level ────────┤
    rqvae     read ─ axes and codebooks from all workers' rows ─ train ─ encode ─┴─ resolve ─ measure ─ write
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samestep import codebooks, start
from samestep.audit import Audit
from samestep.checkpoint import Checkpointer
from samestep.errors import SpecError
from samestep.group import Group
from samestep.pooling import Pool
from samestep.recipes.display import Display
from samestep.recipes.folder import RunFolder
from samestep.recipes.loop import Loop
from samestep.recipes.semantic_ids import residues, results, rvq
from samestep.recipes.semantic_ids.data import Items, read_embeddings
from samestep.recipes.semantic_ids.initial import compute_axes, compute_codebooks
from samestep.recipes.semantic_ids.model import RQVAE, loss_sums
from samestep.recipes.semantic_ids.schedule import schedule_of
from samestep.recipes.semantic_ids.spec import SemanticIdsSpec
from samestep.reduce import pool
from samestep.scheduler import LRScheduler
from samestep.sharding import Shard, ShardLoader
from samestep.step import TrainStep
from samestep.survive import Guard, Stopped

__all__ = ["optimizer_of", "run"]


@dataclass
class _Job:
    spec: SemanticIdsSpec
    folder: RunFolder
    group: Group
    display: Display
    items: Items
    part: Items
    pool: Pool
    stop_after: int | None
    guard: Guard


def run(
    spec: SemanticIdsSpec,
    folder: RunFolder,
    group: Group,
    resume: bool,
    stop_after: int | None = None,
    guard: Guard | None = None,
) -> None:
    """Run the recipe on the workers of `group`.

    Args:
        spec: settings.
        folder: where everything goes; made once the input is known to be good.
        group: the workers.
        resume: go on from the folder's last checkpoint.
        stop_after: stop training after so many steps, with a checkpoint and no results; None for the end.
        guard: asked throughout whether to stop; None for one that no signal reaches.

    Raises:
        Stopped: on all workers, when asked to stop before the first step; what is initialized is saved.
        SpecError: on all workers, when the input or the settings do not do.

    Collective: all ranks of `group`.
    """
    display = Display(group.is_main)
    items = _read(spec, group)
    part = items.part(group.rank, group.world_size) if spec.kind == "rqvae" else items
    guard = guard or Guard(group)
    job = _Job(spec, folder, group, display, items, part, guard.pool(pool(group)), stop_after, guard)
    _check(job)
    folder.open(spec, group, display)
    guard.write_stacks_to(folder.path / f"stacks-rank{group.rank}.txt")
    display.say(
        f"{spec.recipe} ({spec.kind}): {items.n_total:,} items of {items.dim} dimensions, "
        f"{group.world_size} workers, {spec.shards} shards, mode {spec.mode}"
    )
    learn = {"rqvae": _train_rqvae, "rkmeans": _fit_books, "rvq": _follow}[spec.kind]
    learned = learn(job, resume)
    if learned is not None:
        results.write(spec, folder, group, display, items, learned)


def _read(spec: SemanticIdsSpec, group: Group) -> Items:
    items, problem = None, ""
    try:
        # A network's batches come from all rows; the other kinds need the worker's own only.
        part = (0, 1) if spec.kind == "rqvae" else (group.rank, group.world_size)
        items = read_embeddings(
            spec.data, id_column=spec.id_column, embedding_column=spec.embedding_column, part=part
        )
    except SpecError as error:
        problem = str(error)
    group.agree(items is not None, problem, SpecError)
    assert items is not None
    return items


def _check(job: _Job) -> None:
    """Refuse what cannot work, before long work and before anything is written."""
    spec, n_items = job.spec, job.items.n_total
    problem = ""
    if spec.shards < job.group.world_size:
        problem = (
            f"`shards`: expected at least {job.group.world_size}, the number of workers, got {spec.shards}."
        )
    elif n_items < max(spec.n_centroids):
        problem = (
            f"`n_centroids`: expected at most {n_items}, the number of items, got {max(spec.n_centroids)}. "
            "Use fewer codes, for example --set n_centroids=[16,16]."
        )
    elif spec.kind == "rqvae" and spec.latent_dim > job.items.dim:
        problem = (
            f"`latent_dim`: expected at most {job.items.dim}, the embeddings' dim, got {spec.latent_dim}."
        )
    job.group.agree(not problem, problem, SpecError)


def _fit_books(job: _Job, resume: bool) -> results.Learned:
    spec, part = job.spec, job.part
    if resume:
        job.display.say("rkmeans keeps no checkpoints: it begins again, and comes to the same bits")
    per_level = spec.kmeans_iterations
    with job.display.stage(spec.kind, len(spec.n_centroids) * per_level):

        def show(level: int, done: int, inertia: float) -> None:
            job.display.advance(level * per_level + done, f"level {level}  inertia {inertia:.5g}")

        books = codebooks.fit(
            part.embeddings,
            spec.n_centroids,
            max_iterations=spec.kmeans_iterations,
            seed=spec.seed,
            pool=job.pool,
            balanced=spec.balanced,
            normalize_residuals=spec.normalize_residuals,
            sample_size=spec.sample_size,
            progress=show,
        )
    codes = codebooks.encode(part.embeddings, books)
    return results.Learned(codes, list(books.levels), books.offset, list(books.relative_errors), None)


def _follow(job: _Job, resume: bool) -> results.Learned | None:
    spec, part = job.spec, job.part
    follower = rvq.Follower(spec, part, job.pool)
    checkpointer = Checkpointer(job.folder.checkpoints, group=job.group, on_error=spec.on_disk_error)
    if resume:
        checkpointer.restore(codebooks=follower)
    stop = follower.total if job.stop_after is None else min(follower.total, job.stop_after)
    with job.display.stage(spec.kind, follower.total, follower.step):
        try:
            while follower.step < stop:
                level, n_used = follower.advance()
                job.display.advance(follower.step, f"level {level}  {n_used} codes in use")
                every = spec.checkpoint_every
                if follower.step == stop or (every and follower.step % every == 0):
                    checkpointer.save(follower.step, codebooks=follower)
        except Stopped:
            checkpointer.save(follower.step, codebooks=follower)  # after the last batch that all took
            raise
    if follower.step < follower.total:
        job.display.say(f"stopped after {follower.step} of {follower.total} steps; go on with --resume")
        return None
    books = follower.books()
    codes = codebooks.encode(part.embeddings, books)
    errors = residues.of_books(part, codes, books, job.pool)
    return results.Learned(codes, list(books.levels), books.offset, errors, None)


def _train_rqvae(job: _Job, resume: bool) -> results.Learned | None:
    spec, group = job.spec, job.group
    torch.manual_seed(spec.seed)
    model = RQVAE(job.items.dim, spec.n_centroids, spec.latent_dim, spec.hidden, spec.beta).to(group.device)
    start.mark(model)
    start.mark(model.quantizer)
    optimizer = optimizer_of(spec, model)
    scheduler = LRScheduler(optimizer, schedule_of(spec), group=group)
    start.broadcast(model, optimizer, group=group)
    rows = _Rows(job.items.embeddings)
    loader = ShardLoader(
        rows, spec.global_batch_size, spec.shards, group=group, seed=spec.seed, fetch="shards"
    )
    audit = Audit(group, every=spec.audit_every, log=partial(job.folder.append, "audit.jsonl"))
    audit.watch(model, optimizer, scheduler=scheduler, loader=loader)
    step = TrainStep(
        model, optimizer, group=group, shards=spec.shards, mode=spec.mode, scheduler=scheduler,
        clip_norm=spec.clip_norm, audit=audit, seed=spec.seed,
    )  # fmt: skip
    checkpointer = Checkpointer(job.folder.checkpoints, group=group, on_error=spec.on_disk_error)
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    loop = Loop(
        spec, group, job.folder, job.display, step, loader, audit, checkpointer, things, "reconstruction_error",
        stop_after=job.stop_after, guard=job.guard,
    )  # fmt: skip
    if resume:
        loop.restore()
    if start.needs_initialization(model.quantizer):
        try:
            _initialize(job, model)
        except Stopped:
            loop.save()  # with the marks of what is done
            raise
    finished = loop.run(_loss)
    audit.check(step.step)
    if not finished:
        return None
    codes = model.encode(job.part.embeddings).cpu()
    errors = residues.of_model(job.part, codes, model, job.pool)
    levels = [table.detach() for table in model.quantizer.codebooks]
    return results.Learned(codes, levels, None, errors, model)


def _initialize(job: _Job, model: RQVAE) -> None:
    """Set axes, then codebooks, from all workers' rows; the ordinary loop takes over from there.

    Each has its own mark in the model's state, so neither is computed again after a resume.
    """
    rows, spec = job.part.embeddings, job.spec

    def axes(model: nn.Module) -> dict[str, Tensor]:
        return compute_axes(model, rows, job.pool)  # type: ignore[arg-type]

    def codebooks_of(quantizer: nn.Module) -> dict[str, Tensor]:
        tables = compute_codebooks(
            model, rows, job.pool,
            max_iterations=spec.kmeans_iterations, seed=spec.seed, sample_size=spec.sample_size,
        )  # fmt: skip
        return {name.removeprefix("quantizer."): table for name, table in tables.items()}

    with job.display.stage("initialization", 2):
        start.initialize(model, axes, job.group, collective=True)
        job.display.advance(1, "axes")
        start.initialize(model.quantizer, codebooks_of, job.group, collective=True)
        job.display.advance(2, "codebooks")


def _loss(model: nn.Module, shard: Shard) -> tuple[Tensor, int, dict[str, Tensor]]:
    return loss_sums(model, shard.batch)


def optimizer_of(spec: SemanticIdsSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, at the base LR.

    Args:
        spec: settings.
        model: its parameters are updated.
    """
    if spec.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
    return torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay)


class _Rows:
    """The rows of a matrix as a dataset that gives many at once."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, ids: list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(self._rows[ids], dtype=np.float32))
