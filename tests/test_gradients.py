"""Gradient sums on one worker: the tree's order, the memory that it takes, and low precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from samestep import launch
from samestep.carrier import sparse_parameters
from samestep.errors import SpecError
from samestep.gradients import GradientSum
from samestep.group import Group
from samestep.sharding import tree_fold
from samestep.step import TrainStep


def make(n_shards: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, GradientSum]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    return model, GradientSum(model, Group.single(), "exact", n_shards, False, None)


def losses(model: nn.Module, n_shards: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        model(torch.randn(5, 3, generator=generator).to(dtype) * 10.0 ** (i % 5)).square().sum()
        for i in range(n_shards)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n_shards", [1, 2, 5, 8])
def test_the_sum_is_that_of_the_tree_to_the_bit(n_shards, dtype):
    model, gradients = make(n_shards, dtype)
    each = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses(model, n_shards, dtype)]
    wide = torch.promote_types(dtype, torch.float32)
    gradients.begin()
    for place, loss in enumerate(losses(model, n_shards, dtype)):
        if place < n_shards - 1:
            loss.backward()
            gradients.keep()
        else:
            gradients.finish(loss, lambda x: x)
            gradients.settle(7.0)
    for index, parameter in enumerate(model.parameters()):
        right = tree_fold([grads[index].to(wide) for grads in each]) / 7.0
        assert torch.equal(parameter.grad, right.to(dtype))


@pytest.mark.parametrize("n_shards", [1, 3, 8, 16, 31])
def test_it_keeps_at_most_log2_of_the_shards_plus_one(n_shards):
    model, gradients = make(n_shards)
    gradients.begin()
    deepest = 0
    for loss in losses(model, n_shards, torch.float32):
        loss.backward()
        gradients.keep()
        deepest = max(deepest, len(gradients._partials))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert deepest <= math.floor(math.log2(n_shards)) + 1
    assert len(gradients._partials) == 1


def test_a_shard_without_samples_adds_nothing():
    model, gradients = make(3)
    gradients.begin()
    first = losses(model, 1, torch.float32)[0]
    right = torch.autograd.grad(losses(model, 1, torch.float32)[0], list(model.parameters()))
    gradients.keep()
    first.backward()
    gradients.keep()
    gradients.finish(None, lambda x: x)
    gradients.settle(1.0)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), right))


def test_a_sparse_gradient_that_comes_by_surprise_is_refused():
    model = nn.Module()
    model.table = nn.Parameter(torch.ones(4, 2))
    gradients = GradientSum(model, Group.single(), "exact", 1, False, None)
    gradients.begin()
    loss = nn.functional.embedding(torch.tensor([1]), model.table, sparse=True).sum()
    gradients.finish(loss, lambda x: x)
    with pytest.raises(SpecError, match="sparse"):
        gradients.settle(1.0)
    assert sparse_parameters(model) == []
    assert len(sparse_parameters(nn.EmbeddingBag(3, 2, sparse=True))) == 1


def count_hooks(group):
    """A user's hooks: called once by a step, and not by the wrapping of the model."""
    model = nn.Linear(2, 1)
    called = []
    model.weight.register_hook(lambda gradient: called.append("gradient") or gradient * 1.0)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
    wrapped = list(called)
    step.train_step([torch.ones(3, 2)], lambda model, batch: (model(batch).sum(), len(batch)))
    return wrapped, sorted(called)


def test_users_hooks_see_their_own_backward_alone():
    for wrapped, stepped in launch.run(count_hooks, 2):
        assert wrapped == []
        assert stepped == ["accumulated", "gradient"]
