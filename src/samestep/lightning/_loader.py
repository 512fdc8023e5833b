"""A `ShardLoader` as Lightning wants a dataloader: sized, iterable once per epoch, with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Trainer

from samestep.errors import SpecError
from samestep.sharding import ShardLoader

__all__ = ["ShardDataLoader"]


class ShardDataLoader:
    """Yields this worker's shards of every global batch, one by one, to Lightning's training loop.

    A shard is a micro-batch: ``Trainer(accumulate_grad_batches=...)`` is the number of shards per worker, 1 when
    there are as many shards as workers. Lightning takes it as it is: it replaces samplers of torch's DataLoader
    only. With `SamestepCallback`, its position goes into Lightning's checkpoints and a resume goes on just there.

    Args:
        dataset: map-style, see `ShardLoader`.
        global_batch_size: samples of an update over all workers.
        shards: parts of a global batch, S; a multiple of the number of workers.
        trainer: of the workers: ``self.trainer`` in a ``train_dataloader`` method.
        **options: of `ShardLoader`: seed, collate_fn, num_workers, drop_last, shuffle, pin_memory, augment,
            prefetch_factor, fetch.

    Raises:
        SpecError: when it is first used: S is no multiple of the world size, or the last batch of an epoch would
            leave a shard without samples, for which there is no batch to hand out.
    """

    def __init__(
        self, dataset: Any, global_batch_size: int, shards: int, *, trainer: Trainer, **options: Any
    ) -> None:
        self._arguments = (dataset, global_batch_size, shards)
        self._trainer, self._options = trainer, options
        self._loader: ShardLoader | None = None
        self._handed = 0  # shards of an update under way; 0 when all are out
        self._began = (0, 0)  # epoch and position where that update began
        self._to_replay = 0
        self._n_samples = 0

    @property
    def loader(self) -> ShardLoader:
        """The loader behind it, made when it is first asked for: then the workers are known."""
        if self._loader is None:
            dataset, batch, shards = self._arguments
            place = SimpleNamespace(rank=self._trainer.global_rank, world_size=self._trainer.world_size)
            loader = ShardLoader(dataset, batch, shards, group=place, **self._options)
            self._check(len(dataset), place.world_size)
            self._loader = loader
        return self._loader

    @property
    def micro_batches(self) -> int:
        """Shards per worker: how many batches make an update."""
        return self._arguments[2] // int(self._trainer.world_size)

    @property
    def n_samples(self) -> int:
        """Samples of the batch that was handed out last."""
        return self._n_samples

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that are behind the loaded position; all of them at its end."""
        return self._steps_done() * self.micro_batches

    @property
    def to_replay(self) -> int:
        """Batches of an update that the loaded checkpoint was in the middle of: they come again."""
        return self._to_replay

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this worker."""
        return len(self.loader) * self.micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that remain of the epoch; those of the next epoch when none remain."""
        # Lightning knows the length and does not ask for more, so the end of an epoch is noticed at the next one.
        loader = self.loader
        steps = loader.steps(len(loader) - self._steps_done() or len(loader))
        while True:
            before = (loader.epoch, loader.samples_consumed)
            shards = next(steps, None)
            if shards is None:
                return
            self._began = before
            for place, shard in enumerate(shards, 1):
                self._handed, self._n_samples = place % len(shards), shard.n_samples
                yield shard.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON data, the same on every worker.

        In the middle of an update it is where the update began: no checkpoint holds the gradients so far, so that
        its micro-batches must come again.
        """
        state = self.loader.state_dict()
        if self._handed:
            epoch, consumed = self._began
            state = {**state, "epoch": epoch, "samples_consumed": consumed}
        return {
            "format_version": 1,
            "micro_batches": self.micro_batches,
            "handed": self._handed,
            "loader": state,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go to a saved position.

        Args:
            state: from `state_dict`; None, from a run without such a loader, is refused.

        Raises:
            SpecError: another dataset, batch size, number of shards or seed; or another number of shards per
                worker, in which Lightning counts its batches.
        """
        if state is None:
            raise SpecError(
                "`train_dataloader`: expected the loader of the checkpoint's run, which was no ShardDataLoader. "
                "Its place in the data is not known: resume with that one.",
                name="train_dataloader",
            )
        if state["micro_batches"] != self.micro_batches:
            raise SpecError(
                f"`micro_batches`: expected {state['micro_batches']} shards per worker as in the checkpoint, got "
                f"{self.micro_batches}. Lightning counts batches per worker, so that its place in the epoch would "
                "be wrong: resume with the same number of workers, or train with samestep.step.TrainStep.",
                name="micro_batches",
            )
        self.loader.load_state_dict(state["loader"])
        self._handed, self._to_replay = 0, state["handed"]

    def close(self) -> None:
        """End the loader processes, if any."""
        if self._loader is not None:
            self._loader.close()

    def _steps_done(self) -> int:
        return -(-self.loader.samples_consumed // self._arguments[1])

    def _check(self, n_samples: int, world_size: int) -> None:
        _, batch, shards = self._arguments
        if shards % world_size:
            raise SpecError(
                f"`shards`: expected a multiple of the {world_size} workers, got {shards}. Lightning wants as many "
                "batches on one worker as on another.",
                name="shards",
            )
        short = n_samples % batch
        if 0 < short < shards and not self._options.get("drop_last", False):
            raise SpecError(
                f"`drop_last`: expected True where the last batch has {short} samples for {shards} shards, got "
                "False. Lightning cannot be handed an empty batch: drop it, or change the batch size.",
                name="drop_last",
            )
