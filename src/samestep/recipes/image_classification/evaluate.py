"""Count every test sample exactly once, whoever looks at it.

::

    test samples ─ blocks of 256, the same for any number of workers ─┐
    worker r takes its run of blocks ─ model in eval mode ─ whole numbers ─ sum over workers ─> the figures

A block has the same samples in the same places on one worker and on N, and what is added over blocks are integers,
so the figures are the same bits. No sample is repeated to make workers' parts equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.group import Group
from samestep.recipes.image_classification.data import Samples
from samestep.reduce import reduce
from samestep.sharding import shard_range

__all__ = ["Figures", "evaluate"]

_BLOCK_SAMPLES = 256
_LOSS_UNITS = 2**24  # a sample's loss is rounded to a multiple of 1 / this
_LARGEST_LOSS = 2.0**16  # in nats; sums of 2**22 samples with it stay below 2**63


@dataclass(frozen=True)
class Figures:
    """What a classifier does on a test set.

    Attributes:
        confusion: (n_classes, n_classes) int64: samples of class i that were called j.
        loss: mean cross entropy in nats.
    """

    confusion: Tensor
    loss: float

    @property
    def n_samples(self) -> int:
        """How many samples were counted."""
        return int(self.confusion.sum())

    @property
    def n_correct(self) -> int:
        """How many of them were called what they are."""
        return int(self.confusion.diagonal().sum())

    @property
    def accuracy(self) -> float:
        """Share of the samples that were called what they are."""
        return self.n_correct / self.n_samples

    def to_dict(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """Return the figures as JSON data."""
        totals = self.confusion.sum(1).tolist()
        hits = self.confusion.diagonal().tolist()
        return {
            "test_samples": self.n_samples,
            "test_correct": self.n_correct,
            "test_accuracy": self.accuracy,
            "test_loss": self.loss,
            "classes": [
                {"class": name, "samples": total, "accuracy": hit / total if total else None}
                for name, total, hit in zip(classes, totals, hits, strict=True)
            ],
            "confusion_matrix": self.confusion.tolist(),
        }


def evaluate(
    model: nn.Module,
    samples: Samples,
    n_classes: int,
    group: Group,
    each_block: Callable[[], None] = lambda: None,
) -> Figures:
    """Return what a classifier does on all samples; leaves its mode as it was.

    Args:
        model: gives (n, n_classes) scores; the same on all workers.
        samples: the same ones on all workers.
        n_classes: columns of the scores.
        group: the workers.
        each_block: called now and then, to show that work goes on.

    Raises:
        SpecError: on all workers, when one of them cannot read a sample or its scores are not finite.

    Collective: all ranks of `group`.
    Numerics: order-free; losses are rounded to 2**-24 nats and added as integers.
    """
    n_blocks = -(-len(samples) // _BLOCK_SAMPLES)
    sums = torch.zeros(n_classes * n_classes + 1, dtype=torch.int64)
    training, problem = model.training, ""
    model.eval()
    try:
        for block in _blocks_of(n_blocks, group):
            each_block()
            first = block * _BLOCK_SAMPLES
            sums += _count(model, samples, first, min(first + _BLOCK_SAMPLES, len(samples)), n_classes, group)
    except Exception as error:
        problem = f"test: {error}"
    finally:
        model.train(training)
    group.agree(not problem, problem, SpecError)
    total = reduce(sums, group)
    confusion = total[:-1].reshape(n_classes, n_classes)
    return Figures(confusion, int(total[-1]) / _LOSS_UNITS / len(samples))


def _blocks_of(n_blocks: int, group: Group) -> range:
    if n_blocks < group.world_size:  # fewer blocks than workers: the first ones take one each
        return range(min(group.rank, n_blocks), min(group.rank + 1, n_blocks))
    return shard_range(n_blocks, group.world_size, group.rank)


@torch.no_grad()
def _count(model: nn.Module, samples: Samples, first: int, stop: int, n_classes: int, group: Group) -> Tensor:
    pixels, labels = samples[list(range(first, stop))]
    scores = model(pixels.to(group.device)).cpu()
    losses = nn.functional.cross_entropy(scores, labels, reduction="none").double()
    if not bool(torch.isfinite(losses).all()):
        raise SpecError(f"expected finite scores, got NaN or infinity among samples {first} to {stop - 1}")
    pairs = torch.bincount(labels * n_classes + scores.argmax(1), minlength=n_classes * n_classes)
    loss = (losses.clamp(max=_LARGEST_LOSS) * _LOSS_UNITS).round().long().sum()
    return torch.cat([pairs, loss[None]])
