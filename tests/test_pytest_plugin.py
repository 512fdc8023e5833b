"""The pytest fixture: training that agrees passes, and the failure of one that does not says where."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from samestep import step
from samestep.pytest_plugin import Workers


@pytest.fixture
def workers(tmp_path):
    return lambda *counts: Workers(counts, tmp_path)


def sums(model, ids):
    return model(inputs()[ids]).square().sum(), len(ids)


def inputs():
    return torch.randn(64, 5, generator=torch.Generator().manual_seed(3))


def train_exact(group, record):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = step.TrainStep(model, optimizer, group=group, shards=4, mode="exact")
    record(0, model, optimizer)
    for t in range(3):
        mine = torch.arange(16 * t, 16 * t + 16).view(4, 4).tensor_split(group.world_size)[group.rank]
        result = stepper.train_step(list(mine), sums)
        record(t + 1, model, optimizer, loss=result.loss, samples=mine.reshape(-1))


def train_by_hand(group, record, divide):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    record(0, model, optimizer)
    for t in range(3):
        ids = torch.arange(16 * t, 16 * t + 16).tensor_split(group.world_size)[group.rank]
        optimizer.zero_grad()
        loss = model(inputs()[ids]).square().mean()
        loss.backward()
        for p in model.parameters():
            if group.world_size > 1:
                dist.all_reduce(p.grad)
            if divide:
                p.grad /= group.world_size
        optimizer.step()
        record(t + 1, model, optimizer, loss=loss, samples=ids)


def test_training_that_agrees(workers):
    found = workers(1, 2, 4).check(train_exact, at_least="exact")
    assert [(one.world_sizes, one.verdict) for one in found] == [((1, 2), "exact"), ((1, 4), "exact")]


def test_the_failure_says_where(workers):
    with pytest.raises(pytest.fail.Exception) as failed:
        workers(1, 2).check(train_by_hand, False)
    assert "step 1, gradients: `weight`" in str(failed.value)
    assert "2 x the reference" in str(failed.value)


@pytest.mark.slow
def test_a_mean_of_means_is_not_exact(workers):
    with pytest.raises(pytest.fail.Exception, match="expected exact"):
        workers(1, 3).check(train_by_hand, True, at_least="exact")


@pytest.mark.parametrize("counts", [(), (2,), (1, 1), (0, 2)])
def test_counts_are_checked(workers, counts):
    with pytest.raises(ValueError, match="at least two different numbers"):
        workers(*counts)


def test_pytest_finds_the_fixture(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(samestep_workers):\n    samestep_workers(1, 2)\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        ".",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
