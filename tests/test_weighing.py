"""The exact mean in loops that are not ours, without DDP; with DDP see test_lightning.py and test_accelerate.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samestep.errors import SpecError
from samestep.group import Group
from samestep.weighing import LossWeights, count_samples

SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any)


def make() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@given(updates=st.lists(SIZES, min_size=1, max_size=3), divided_by=st.integers(1, 7))
def test_gradients_are_the_mean_over_all_samples(updates, divided_by):
    model, optimizer = make()
    weights = LossWeights(model, [optimizer], Group.single())
    for sizes in updates:
        optimizer.zero_grad()
        batches = [torch.randn(size, 3) for size in sizes]
        for batch in batches:
            loss = model(batch).square().mean() / divided_by  # NaN where there are no samples
            weights.weigh(loss, len(batch), divided_by)
            loss.backward()
        twin = nn.Linear(3, 2).double()
        twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
        twin(torch.cat(batches).double()).square().mean().backward()
        for mine, right in zip(model.parameters(), twin.parameters()):
            assert torch.allclose(mine.grad.double(), right.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()


def test_an_update_begins_a_new_mean_also_where_gradients_are_kept():
    model, optimizer = make()
    weights = LossWeights(model, [optimizer], Group.single())
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss = model(torch.ones(4, 3)).sum() / 4
        weights.weigh(loss, 4)
        loss.backward()
        assert torch.equal(model.bias.grad, torch.ones(2))
        optimizer.step()


def test_forget_begins_a_new_mean_where_an_update_was_given_up():
    model, optimizer = make()
    weights = LossWeights(model, [optimizer], Group.single())
    for _ in range(2):
        loss = model(torch.ones(4, 3)).sum() / 4
        weights.weigh(loss, 4)
        loss.backward()
        assert torch.equal(model.bias.grad, torch.ones(2))
        optimizer.zero_grad(set_to_none=False)
        weights.forget()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_count_is_refused(weight):
    model, optimizer = make()
    with pytest.raises(SpecError, match="finite number >= 0"):
        LossWeights(model, [optimizer], Group.single()).weigh(model(torch.ones(1, 3)).sum(), weight)


def test_several_workers_without_ddp_are_refused():
    model, optimizer = make()
    with pytest.raises(SpecError, match="job of 2 workers, got Linear"):
        LossWeights(model, [optimizer], Group(0, 2, 0, torch.device("cpu")))


def test_count_samples_reads_nested_batches():
    batch = {"a": torch.zeros(3, 2), "b": [torch.zeros(3), ("name", 7, torch.tensor(5.0))], "c": None}
    assert count_samples(batch) == 3
    assert count_samples(torch.zeros(0, 4)) == 0


@pytest.mark.parametrize("batch", [torch.tensor(1.0), "text", [], (torch.zeros(2), torch.zeros(3))])
def test_a_batch_without_one_first_dimension_is_refused(batch):
    with pytest.raises(SpecError, match="one common first dimension"):
        count_samples(batch)
