"""The likeliest mistakes, and what is said of each: read it as a table. No message may come from inside torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from samestep import codebooks, environment, explain, hooks, kmeans, momentum, schedules, start
from samestep.caffe2 import read_recipe
from samestep.checkpoint import Checkpointer
from samestep.cli import app
from samestep.group import Group
from samestep.scheduler import LRScheduler
from samestep.sharding import ShardLoader
from samestep.step import TrainStep

ONE = Group.single()


def model():
    return nn.Linear(2, 1)


def sgd(net, **settings):
    return torch.optim.SGD(net.parameters(), lr=0.1, **settings)


def step_with(loss_fn, batch=None, **settings):
    net = model()
    step = TrainStep(net, sgd(net), group=ONE, **settings)
    return step.train_step([torch.ones(3, 2) if batch is None else batch], loss_fn)


def restore_into_another_shape(tmp_path):
    checkpointer = Checkpointer(tmp_path, group=ONE)
    checkpointer.save(1, model=model())
    checkpointer.restore(model=nn.Linear(3, 1))


def two_schedulers(tmp_path):
    optimizer = sgd(model())
    LRScheduler(optimizer, schedules.constant(1.0))
    LRScheduler(optimizer, schedules.constant(1.0))


def bad_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "SOLVER: {LR_POLICY: steps_with_decay, BASE_LR: 0.1, STEPS: [0, 5], MAX_ITER: 9, GAMA: 0.1}"
    )
    read_recipe(path, family="detectron")


def half_a_torchrun(tmp_path):
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RANK", "0")
        environ.delenv("WORLD_SIZE", raising=False)
        environment.read_env()


class Homemade(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})


MISTAKES = {
    "the loss function returns a mean and no count": (
        lambda tmp_path: step_with(lambda net, x: net(x).mean()),
        "`loss_fn`: expected (loss_sum, count)",
    ),
    "the loss is one number per sample": (
        lambda tmp_path: step_with(lambda net, x: (net(x), 3)),
        "scalar",
    ),
    "a negative count": (
        lambda tmp_path: step_with(lambda net, x: (net(x).sum(), -3)),
        "count",
    ),
    "the loss is NaN": (
        lambda tmp_path: step_with(lambda net, x: (net(x).sum() * float("nan"), 3)),
        "loss of shard 0: expected a finite sum, got nan",
    ),
    "more shards than samples in a batch": (
        lambda tmp_path: ShardLoader(TensorDataset(torch.ones(9, 2)), 4, 8, group=ONE),
        "`global_batch_size`: expected at least",
    ),
    "a comm hook on a model that is not wrapped": (
        lambda tmp_path: hooks.register(model(), hooks.weighted_mean, ONE),
        "DistributedDataParallel",
    ),
    "two schedulers on one optimizer": (two_schedulers, "scheduler"),
    "a warm-up of less than nothing": (lambda tmp_path: schedules.linear_warmup(-5), "`steps`"),
    "an optimizer whose momentum nobody knows": (
        lambda tmp_path: LRScheduler(Homemade([nn.Parameter(torch.ones(1))]), schedules.linear(5)),
        "momentum.register",
    ),
    "a policy that is no policy": (lambda tmp_path: momentum.threshold(0.5), "expected"),
    "more centroids than rows": (lambda tmp_path: kmeans.fit(torch.randn(5, 2), 8), "at least n_centroids=8"),
    "a NaN among the rows": (
        lambda tmp_path: kmeans.fit(torch.tensor([[0.0], [float("nan")], [1.0]]), 2),
        "row 1",
    ),
    "codebooks of another dim": (
        lambda tmp_path: codebooks.encode(torch.randn(4, 3), codebooks.fit(torch.randn(9, 2), [2])),
        "dim",
    ),
    "a target that the model does not have": (
        lambda tmp_path: start.initialize(model(), lambda net: {"wieght": net.weight}, ONE, once=False),
        "wieght",
    ),
    "a target of another shape": (
        lambda tmp_path: start.initialize(model(), lambda net: {"weight": torch.ones(3)}, ONE, once=False),
        "`weight`",
    ),
    "a checkpoint of another model": (restore_into_another_shape, "shape"),
    "a Caffe2 key with a typing mistake": (bad_recipe, "GAMMA"),
    "only half of torchrun's variables": (half_a_torchrun, "RANK is set but WORLD_SIZE is not"),
    "a builder that returns the model alone": (
        lambda tmp_path: explain.one_step(model, torch.ones(4, 2), 2),
        "`build`: expected (model, optimizer, loss_fn)",
    ),
}

COMMANDS = {
    "a recipe with a typing mistake": (["train", "semantic-id"], "semantic-ids"),
    "a setting with a typing mistake": (
        ["train", "semantic-ids", "--set", "step=9"],
        "Did you mean `steps`?",
    ),
    "a setting of the wrong kind": (["train", "semantic-ids", "--set", "steps=many"], "`steps`"),
    "a file that is not there": (["train", "semantic-ids", "--set", "data=[nowhere.npy]"], "nowhere.npy"),
    "no data": (["train", "semantic-ids"], "`data`: expected a value, got none"),
    "more workers than shards": (
        ["train", "semantic-ids", "--set", "data=items.npy", "--workers", "4", "--shards", "2"],
        "--workers: expected at most shards=2, got 4",
    ),
    "a folder that is no run": (["report", "nowhere"], "nowhere"),
    "a schedule with a typing mistake": (["schedule", "cosin(10)"], "cosine"),
    "a trace that is not there": (["compare", "nowhere", "elsewhere"], "nowhere"),
    "a module that is not there": (["explain", "nowhere:build"], "nowhere"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, tmp_path):
    act, said = MISTAKES[mistake]
    with pytest.raises(Exception) as caught:
        act(tmp_path)
    assert said in str(caught.value)
    assert type(caught.value).__module__.startswith("samestep") or type(caught.value) in (
        ValueError,
        TypeError,
    )


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_on_the_command_line_is_one_message(mistake, tmp_path, monkeypatch):
    words, said = COMMANDS[mistake]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())
