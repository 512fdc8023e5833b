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
        self._left = 0  # shards of the step under way that were not handed out yet
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

    def __len__(self) -> int:
        """Return the batches of a whole epoch on this worker."""
        return len(self.loader) * self.micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that remain of the epoch; those of the next epoch when none remain."""
        # Lightning knows the length and does not ask for more, so the end of an epoch is noticed at the next one.
        done = -(-self.loader.samples_consumed // self._arguments[1])
        n_steps = len(self.loader) - done or len(self.loader)
        for shards in self.loader.steps(n_steps):
            for place, shard in enumerate(shards):
                self._left, self._n_samples = len(shards) - 1 - place, shard.n_samples
                yield shard.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON data, the same on every worker.

        Raises:
            SpecError: in the middle of an update, whose gradients no checkpoint holds.
        """
        if self._left:
            raise SpecError(
                f"checkpoint: expected the end of an update, got one with {self._left} of {self.micro_batches} "
                "micro-batches to come, whose gradients would be lost. Save every so many updates "
                "(ModelCheckpoint(every_n_train_steps=...)) or at the end of an epoch.",
                name="state_dict",
            )
        return {"format_version": 1, "micro_batches": self.micro_batches, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state: from `state_dict`.

        Raises:
            SpecError: another dataset, batch size, number of shards or seed; or another number of shards per
                worker, in which Lightning counts its batches.
        """
        if state["micro_batches"] != self.micro_batches:
            raise SpecError(
                f"`micro_batches`: expected {state['micro_batches']} shards per worker as in the checkpoint, got "
                f"{self.micro_batches}. Lightning counts batches per worker, so that its place in the epoch would "
                "be wrong: resume with the same number of workers, or train with samestep.step.TrainStep.",
                name="micro_batches",
            )
        self.loader.load_state_dict(state["loader"])
        self._left = 0

    def close(self) -> None:
        """End the loader processes, if any."""
        if self._loader is not None:
            self._loader.close()

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
