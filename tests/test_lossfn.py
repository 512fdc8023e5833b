"""What a loss function returns is checked, and a mean returned for a sum is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samestep import lossfn
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


@given(n=st.integers(1, 30), size=st.integers(1, 40))
def test_cutting_keeps_every_sample_in_order(n, size):
    pieces = list(lossfn.cut(shard(n), size))
    assert all(1 <= len(piece.sample_ids) <= size for piece in pieces)
    assert torch.equal(torch.cat([piece.batch["x"] for piece in pieces]), shard(n).batch["x"])
    assert torch.cat([piece.sample_ids for piece in pieces]).tolist() == list(range(n))
    assert {piece.batch["name"] for piece in pieces} == {"train"}


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(SpecError, match="micro_batch_size"):
        list(lossfn.cut((torch.zeros(2), torch.zeros(3)), 1))
    with pytest.raises(SpecError, match="micro_batch_size"):
        list(lossfn.cut("text", 1))


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_a_mean_is_told_from_a_sum(n):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    part = Shard(0, torch.arange(n), {"x": torch.randn(1, 2).expand(n, 2) + 0.1 * torch.randn(n, 2)})
    lossfn.probe(total, model, part, alone=True)
    with pytest.raises(SpecError, match="expected a sum"):
        lossfn.probe(mean, model, part, alone=True)


def test_dropout_hides_no_mean_and_makes_none_of_a_sum():
    torch.manual_seed(0)
    found = []
    for seed in range(40):
        rate = (0.1, 0.5)[seed % 2]
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(rate), nn.Linear(64, 2))
        lossfn.probe(total, model, shard(8), alone=False)  # never taken for a mean
        found.append((rate, outcome(lambda m=model: lossfn.probe(mean, m, shard(8), alone=False))[0]))
    assert found.count((0.1, "SpecError")) >= 15  # of 20
    assert found.count((0.5, "SpecError")) >= 3


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
        lossfn.probe(returns(losses, counts), model, shard(4), alone=False)
    lossfn.probe(returns([1.0], [1]), model, Shard(0, torch.arange(2), "text"), alone=False)
    with pytest.raises(SpecError, match="expected a sum"):
        lossfn.probe(returns([1.0, 1.0, 1.0], [2, 1, 1]), model, shard(4), alone=False)


def test_figures_may_be_tensors_of_any_kind():
    model = nn.Linear(2, 1)
    found = lossfn.call(
        lambda m, s: (
            m(s.batch["x"]).sum().view(1),
            torch.tensor(3),
            {"right": torch.tensor([2], dtype=torch.int32)},
        ),
        model,
        shard(3),
    )
    assert (found.row.count, found.row.sums) == (3.0, {"right": 2.0})
    assert found.loss.shape == ()
