"""What Lightning could do behind the back of a run that is to be exact: found before the first step, refused."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from samestep.errors import SpecError
from samestep.lightning._loader import ShardDataLoader
from samestep.sharding import ShardLoader, StreamLoader

__all__ = ["check_loader", "check_place"]


def check_loader(trainer: Trainer, is_automatic: bool, exact_mean: bool) -> None:
    """Refuse a training dataloader whose samples are not the ones that it promises.

    Args:
        trainer: in ``fit``, its dataloader set up.
        is_automatic: whether the module optimizes automatically.
        exact_mean: whether every sample must count once.

    Raises:
        SpecError: with the reason; the same on all workers, since it follows from settings.
    """
    loader: Any = trainer.train_dataloader
    if isinstance(loader, ShardLoader | StreamLoader):
        raise SpecError(
            f"`train_dataloader`: expected a ShardDataLoader, got a {type(loader).__name__}, of whose epochs "
            "Lightning would not see the end. Use samestep.lightning.ShardDataLoader(..., trainer=trainer).",
            name="train_dataloader",
        )
    if isinstance(loader, ShardDataLoader):
        _check_shards(trainer, loader, is_automatic)
    elif exact_mean and isinstance(loader, DataLoader):
        _check_sampler(loader)


def check_place(trainer: Trainer, loader: ShardDataLoader) -> None:
    """Bring Lightning's place in the epoch to the loader's, or refuse a resume in which they differ.

    A checkpoint in the middle of an update goes on where the update began: Lightning's counters of batches go back
    to there.

    Args:
        trainer: in ``fit``, resumed.
        loader: at the saved position.

    Raises:
        SpecError: they differ, as after a run that ``max_steps`` stopped: Lightning counts its epoch as finished.
    """
    fit_loop = trainer.fit_loop
    progress = fit_loop.epoch_loop.batch_progress
    if fit_loop.restarting:
        for counters in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counters, name, getattr(counters, name) - loader.to_replay)
    ready = progress.current.ready if fit_loop.restarting else 0
    if (ready - loader.batches_done) % len(loader):
        raise SpecError(
            f"checkpoint: expected batch {loader.batches_done} of the epoch, where the loader is, got {ready} from "
            "Lightning, which counts an epoch that max_steps stopped as finished. Save while training, by "
            "ModelCheckpoint(every_n_train_steps=...).",
            name="ckpt_path",
        )


def _check_shards(trainer: Trainer, loader: ShardDataLoader, is_automatic: bool) -> None:
    if is_automatic and trainer.accumulate_grad_batches != loader.micro_batches:
        raise SpecError(
            f"`accumulate_grad_batches`: expected {loader.micro_batches}, the shards per worker, got "
            f"{trainer.accumulate_grad_batches}. An update would not be a global batch.",
            name="accumulate_grad_batches",
        )
    whole = len(loader)
    if trainer.num_training_batches != whole and not getattr(trainer, "fast_dev_run", False):
        raise SpecError(
            f"`limit_train_batches`: expected whole epochs of {whole} batches, got {trainer.num_training_batches}. "
            "The loader keeps its place between epochs; bound the run by max_steps.",
            name="limit_train_batches",
        )
    if trainer.overfit_batches or trainer.reload_dataloaders_every_n_epochs:
        raise SpecError(
            f"`trainer`: expected overfit_batches=0 and reload_dataloaders_every_n_epochs=0, got "
            f"{trainer.overfit_batches} and {trainer.reload_dataloaders_every_n_epochs}. Both would start the "
            "order of samples again.",
            name="trainer",
        )


def _check_sampler(loader: DataLoader[Any]) -> None:
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    n_samples = len(sampler.dataset)  # type: ignore[arg-type]
    if n_samples % sampler.num_replicas:
        raise SpecError(
            f"`train_dataloader`: expected every sample once, got {n_samples} samples that Lightning's "
            f"DistributedSampler pads to {sampler.total_size} by repeating some. Use "
            "samestep.lightning.ShardDataLoader, or a DistributedSampler(drop_last=True) of your own.",
            name="train_dataloader",
        )
