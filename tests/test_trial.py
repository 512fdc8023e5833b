"""A loss function is tried out: a mean returned for a sum is found, and no right sum is taken for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep import trial
from samestep.errors import SpecError
from samestep.sharding import Shard
from workers import outcome


def shard(n: int) -> Shard:
    return Shard(0, torch.arange(n), {"x": torch.arange(2.0 * n).view(n, 2), "name": "train"})


def total(model: nn.Module, part: Shard) -> tuple[torch.Tensor, int]:
    x = part.batch["x"]
    return model(x).square().sum(), len(x)


def mean(model: nn.Module, part: Shard) -> tuple[torch.Tensor, int]:
    x = part.batch["x"]
    return model(x).square().mean(), len(x)


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_a_mean_is_told_from_a_sum(n):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    part = Shard(0, torch.arange(n), {"x": torch.randn(1, 2).expand(n, 2) + 0.1 * torch.randn(n, 2)})
    trial.probe(total, model, part, alone=True)
    with pytest.raises(SpecError, match="expected a sum"):
        trial.probe(mean, model, part, alone=True)


def test_dropout_hides_no_mean_and_makes_none_of_a_sum():
    torch.manual_seed(0)
    for seed in range(20):
        rate = (0.1, 0.5)[seed % 2]
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(rate), nn.Linear(64, 2))
        trial.probe(total, model, shard(8), alone=False)
        with pytest.raises(SpecError, match="expected a sum"):
            trial.probe(mean, model, shard(8), alone=False)
        assert all(module.training for module in model.modules())


class Noisy(nn.Module):
    """Makes noise that no module of torch's stands for."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.first, self.last = nn.Linear(2, 64), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.first(x).tanh(), self.rate))


def test_noise_of_another_kind_is_tried_again():
    torch.manual_seed(0)
    found = []
    for _ in range(10):
        model = Noisy(0.1)
        trial.probe(total, model, shard(8), alone=False)  # never taken for a mean
        found.append(outcome(lambda m=model: trial.probe(mean, m, shard(8), alone=False))[0])
    assert found.count("SpecError") >= 7


class Centred(nn.Module):
    """BatchNorm by hand: a sample's output depends on its neighbours, and no module of torch's says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def learned_by_heart(seed: int, norm: nn.Module) -> Any:
    """Yield a model, more and more trained on one shard, its loss and the shard."""
    torch.manual_seed(seed)
    n = (8, 6, 16)[seed % 3]
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.randn(n, 6), torch.randint(3, (n,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(net: nn.Module, part: Shard) -> tuple[torch.Tensor, int]:
        rows, labels = part.batch
        return nn.functional.cross_entropy(net(rows), labels, reduction="sum"), len(rows)

    part = Shard(0, torch.arange(n), (x, y))
    for step in range(120):
        optimizer.zero_grad()
        loss(model, part)[0].backward()
        optimizer.step()
        if step % 6 == 0:
            yield model, loss, part


def test_a_trained_batchnorm_makes_no_mean_of_a_sum():
    """The halves of what it has learned by heart are other batches: in training they may add up to anything."""
    for seed in range(6):
        for model, loss, part in learned_by_heart(seed, nn.BatchNorm1d(16)):
            trial.probe(loss, model, part, alone=False)


def test_what_looks_like_a_mean_may_be_declared_a_sum():
    refused = 0
    for seed in range(6):
        for model, loss, part in learned_by_heart(seed, Centred()):
            refused += outcome(lambda m=model, f=loss, p=part: trial.probe(f, m, p, alone=False))[0] != ""
            loss.is_sum = True
            trial.probe(loss, model, part, alone=False)
            del loss.is_sum
    assert refused <= 4  # of 120
    mean.is_sum = True
    try:
        trial.probe(mean, nn.Linear(2, 1), shard(8), alone=False)
    finally:
        del mean.is_sum


def returns(losses: list[float], counts: list[float]) -> Any:
    """A loss function that says these figures in turn: of the whole, and of its halves."""
    figures = iter(zip(losses * 20, counts * 20))

    def loss(_: nn.Module, __: Shard) -> tuple[torch.Tensor, float]:
        value, count = next(figures)
        return torch.tensor(value), count

    return loss


def test_what_cannot_be_told_is_let_pass():
    model = nn.Linear(2, 1)
    inf, nan = float("inf"), float("nan")
    for losses, counts in (
        ([1, 2, 0], [3, 3, 0]),
        ([0, 0, 0], [2, 1, 1]),
        ([inf, 1, 1], [2, 1, 1]),
        ([nan] * 3, [2, 1, 1]),
    ):
        trial.probe(returns(losses, counts), model, shard(4), alone=False)
    trial.probe(returns([1.0], [1]), model, Shard(0, torch.arange(2), "text"), alone=False)
    with pytest.raises(SpecError, match="expected a sum"):
        trial.probe(returns([1.0, 1.0, 1.0], [2, 1, 1]), model, shard(3), alone=False)
