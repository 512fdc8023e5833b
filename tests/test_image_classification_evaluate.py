"""Every test sample is counted exactly once, on any number of workers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from samestep import launch
from samestep.errors import SpecError
from samestep.group import Group
from samestep.recipes.image_classification.data import Samples
from samestep.recipes.image_classification.evaluate import Figures, _blocks_of, evaluate
from samestep.recipes.image_classification.source import ArrayImages

SIZES = (1, 5, 256, 257, 700)


class Scores(nn.Module):
    """Gives class 0 to dark pixels, 1 to others; remembers its mode."""

    def __init__(self, broken: int = -1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)  # in training mode it would mix samples
        self.broken = broken

    def forward(self, pixels: Tensor) -> Tensor:
        if self.broken >= 0 and pixels.shape[0] == self.broken:
            return torch.full((len(pixels), 2), torch.nan)
        dark = self.norm(pixels.float())[:, 0, 0, 0] < 99.5
        return torch.stack([dark * 2.0, ~dark * 1.5], 1)


def samples_of(n: int) -> Samples:
    pixels = np.random.default_rng(n).integers(0, 256, (n, 1, 2, 2), dtype=np.uint8)
    labels = np.random.default_rng(n + 1).integers(0, 2, n)
    return Samples(ArrayImages(pixels), np.arange(n), labels)


def figures_on(group: Group) -> list[object]:
    found: list[object] = []
    for n in SIZES:
        model = Scores()
        figures = evaluate(model, samples_of(n), 2, group)
        assert model.training
        found.append((figures.confusion.tolist(), figures.loss))
    try:
        evaluate(Scores(broken=700 - 512), samples_of(700), 2, group)
    except SpecError as error:
        found.append(str(error))
    return found


def test_the_figures_are_the_same_bits_on_one_and_three_workers_and_right() -> None:
    one = figures_on(Group.single())
    three = launch.run(figures_on, 3, timeout_seconds=120)
    assert all(each[:-1] == one[:-1] for each in three)
    assert all("got NaN or infinity among samples 512 to 699" in each[-1] for each in [one, *three])
    for n, (confusion, loss) in zip(SIZES, one):
        samples, wanted, total = samples_of(n), [[0, 0], [0, 0]], 0.0
        pixels, labels = samples[list(range(n))]
        for pixel, label in zip(pixels[:, 0, 0, 0].tolist(), labels.tolist()):
            scores = [2.0, 0.0] if pixel < 100 else [0.0, 1.5]
            wanted[label][int(pixel >= 100)] += 1
            total += np.log(np.exp(scores).sum()) - scores[label]
        assert confusion == wanted
        assert loss == pytest.approx(total / n, rel=1e-6)


@given(n_blocks=st.integers(1, 40), world_size=st.integers(1, 9))
def test_every_block_has_one_worker(n_blocks: int, world_size: int) -> None:
    groups = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [block for group in groups for block in _blocks_of(n_blocks, group)] == list(range(n_blocks))


def test_figures_by_class() -> None:
    figures = Figures(torch.tensor([[3, 1, 0], [2, 4, 0], [0, 0, 0]]), 0.5)
    said = figures.to_dict(("cat", "dog", "owl"))
    assert (said["test_samples"], said["test_correct"], said["test_accuracy"]) == (10, 7, 0.7)
    assert [each["accuracy"] for each in said["classes"]] == [0.75, 4 / 6, None]
    assert said["confusion_matrix"][1] == [2, 4, 0]
