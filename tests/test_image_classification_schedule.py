"""From settings to updates, rates and param groups: the papers' rules, and the files of the Detectron family."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from samestep.caffe2 import read_recipe
from samestep.errors import SpecError
from samestep.momentum import VelocitySGD
from samestep.recipes.image_classification import models
from samestep.recipes.image_classification.schedule import build, outline, plan_of
from samestep.recipes.image_classification.spec import Spec

FILES = sorted((Path(__file__).parents[2] / "shared" / "data" / "caffe2_recipes").glob("*.yaml"))
SOLVER = """
NUM_GPUS: 2
TRAIN: {IMS_PER_BATCH: 4, DATASETS: ('coco_2014_train',)}
SOLVER: {BASE_LR: 0.02, GAMMA: 0.1, MAX_ITER: 90, STEPS: [0, 60, 80], LR_POLICY: steps_with_decay,
  WEIGHT_DECAY: 0.0001, WARM_UP_ITERS: 10, MOMENTUM: 0.9}
"""


def rates(spec: Spec, n_samples: int) -> list[float]:
    plan = plan_of(spec, n_samples)
    return [plan.peak_lr * plan.schedule(step) for step in range(plan.steps)]


def test_the_schedule_of_the_paper() -> None:
    # Goyal et al. 2017, section 5.1: 0.1 per 256, batch 8,192, 90 epochs, /10 at 30, 60, 80, 5 epochs of warm-up.
    spec = Spec(
        global_batch_size=8192, reference_lr=0.1, reference_batch_size=256, epochs=90, decay="multistep",
        milestones=[30, 60, 80], warmup_epochs=5,
    )  # fmt: skip
    lrs = rates(spec, 1_281_167)
    per_epoch = 1_281_167 // 8192
    assert len(lrs) == 90 * per_epoch
    assert lrs[0] == pytest.approx(0.1)
    assert lrs[1] - lrs[0] == pytest.approx((3.2 - 0.1) / (5 * per_epoch))
    for epoch, lr in ((5, 3.2), (29, 3.2), (30, 0.32), (59, 0.32), (60, 0.032), (80, 0.0032), (89, 0.0032)):
        assert lrs[epoch * per_epoch] == pytest.approx(lr)


@given(
    batch=st.integers(1, 512), reference=st.integers(1, 512), epochs=st.floats(0.1, 9), warmup=st.floats(0, 0.1),
    rule=st.sampled_from(["linear", "sqrt", "constant"]), drop_last=st.booleans(),
)  # fmt: skip
def test_the_rate_starts_at_the_reference_and_stays_below_the_scaled_one(
    batch: int, reference: int, epochs: float, warmup: float, rule: str, drop_last: bool
) -> None:
    spec = Spec(
        shards=1, global_batch_size=batch, reference_batch_size=reference, epochs=epochs, warmup_epochs=warmup,
        scaling_rule=rule, drop_last=drop_last,
    )  # fmt: skip
    plan = plan_of(spec, 1000)
    kappa = batch / reference
    ratio = {"linear": kappa, "sqrt": math.sqrt(kappa), "constant": 1.0}[rule]
    lrs = rates(spec, 1000)
    assert plan.steps_per_epoch == (1000 // batch if drop_last else math.ceil(1000 / batch))
    assert abs(plan.steps - epochs * plan.steps_per_epoch) <= 1
    assert plan.peak_lr == pytest.approx(0.05 * ratio)
    assert max(lrs) <= plan.peak_lr * (1 + 1e-12)
    if plan.steps_of(warmup) and ratio > 1:
        assert lrs[0] == pytest.approx(0.05)


def test_other_lengths_and_shapes() -> None:
    assert len(rates(Spec(steps=7), 1000)) == 7
    assert len(rates(Spec(epochs=0.001), 1000)) == 1
    assert rates(Spec(decay="constant", warmup_epochs=0, epochs=2), 640) == [0.05] * 20
    falling = rates(Spec(decay="cosine", epochs=2), 640)
    assert falling[10] == pytest.approx(0.025)
    started = rates(Spec(decay="constant", warmup_epochs=1, warmup_start_factor=0.2, epochs=2), 640)
    assert started[0] == pytest.approx(0.01)
    assert started[10:] == [0.05] * 10


def test_what_cannot_be_is_refused() -> None:
    for settings, fragment in [
        ({"global_batch_size": 2000}, "at most the 1,000 training samples, got 2,000"),
        ({"global_batch_size": 256, "epochs": 2, "warmup_epochs": 3}, "`warmup_epochs`: expected at most"),
        ({"decay": "multistep", "milestones": [1, 30], "epochs": 20}, "`milestones`"),
        ({"decay": "multistep", "milestones": [1, 1.01]}, "growing steps"),
        ({"solver": "/nowhere.yaml"}, "/nowhere.yaml"),
    ]:
        with pytest.raises(SpecError, match=fragment):
            plan_of(Spec(**settings), 1000)
    for settings, fragment in [
        ({"decay": "multistep"}, "`milestones`"),
        ({"milestones": [3]}, "`milestones`"),
        ({"decay": "multistep", "milestones": [3, 2]}, "growing epochs"),
        ({"momentum": 0}, "`nesterov`"),
        ({"solver": "a.yaml", "weight_decay": 0.1}, "`weight_decay`: expected none with `solver`"),
        ({"solver": "a.yaml", "reference_lr": 1.0}, "`reference_lr`: expected none with `solver`"),
        ({"blocks": [1, 0]}, "`blocks`"),
        ({"hidden": [0]}, "`hidden`"),
    ]:
        with pytest.raises(ValidationError, match=fragment):
            Spec(**settings)


def test_param_groups_have_their_own_rates_and_decays() -> None:
    spec = Spec(bias_lr_factor=2.0, second_lr_factor=10.0, weight_decay=0.01)
    optimizer, scheduler = build(plan_of(spec, 1000), models.of_spec(spec, (1, 8, 8), 10))
    table = {group["name"]: (group["initial_lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert table == {
        "weights": (0.05, 0.01),
        "norms": (0.05, 0.0),
        "weights x 10": (0.5, 0.01),
        "biases x 10": (1.0, 0.0),
    }
    assert type(optimizer) is torch.optim.SGD
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (0.9, True)
    velocity = Spec(momentum_form="velocity", momentum_policy="threshold")
    optimizer, scheduler = build(plan_of(velocity, 1000), models.of_spec(velocity, (1, 8, 8), 10))
    assert isinstance(optimizer, VelocitySGD)
    assert scheduler.momentum.name == "threshold"
    wrong = Spec(second_lr_factor=2.0, second_lr_params=["tail.*"])
    with pytest.raises(SpecError, match=r"`second_lr_params`.*'tail"):
        build(plan_of(wrong, 1000), models.of_spec(wrong, (1, 8, 8), 10))


def test_a_solver_file_decides(tmp_path: Path) -> None:
    path = tmp_path / "solver.yaml"
    path.write_text(SOLVER)
    plan = plan_of(Spec(solver=str(path), global_batch_size=8), 1000)
    # By hand: Detectron warms up from a third of the rate, linearly over 10 iterations.
    wanted = (
        [0.02 * (1 / 3 * (1 - i / 10) + i / 10) for i in range(10)]
        + [0.02] * 50
        + [0.002] * 20
        + [0.0002] * 10
    )
    assert plan.steps == 90
    assert [plan.peak_lr * plan.schedule(step) for step in range(90)] == pytest.approx(wanted, rel=1e-6)
    assert (plan.form, plan.policy.name, plan.momentum, plan.nesterov) == (
        "velocity",
        "threshold",
        0.9,
        False,
    )
    assert plan_of(Spec(solver=str(path), global_batch_size=8, steps=20), 1000).steps == 20
    with pytest.raises(SpecError, match=r"`global_batch_size`: expected 8, for which .* was written, got 64"):
        plan_of(Spec(solver=str(path)), 1000)


@pytest.mark.skipif(not FILES, reason="no recipes beside the checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_published_files_drive_the_recipe_with_the_rates_of_their_trainers(path: Path) -> None:
    recipe = read_recipe(path)
    spec = Spec(solver=str(path), global_batch_size=recipe.global_batch_size)
    plan = plan_of(spec, 50_000)
    optimizer, scheduler = build(plan, models.of_spec(spec, (1, 8, 8), 10))
    names = [group["name"] for group in optimizer.param_groups]
    factors = {
        "weights": 1.0,
        "biases": recipe.param_groups.bias_lr_factor,
        "norms": recipe.param_groups.norm_lr_factor,
    }
    for step in np.linspace(0, recipe.total_steps - 1, 40).astype(int).tolist():
        row = scheduler.preview(step + 1, start=step)[0]
        for name, lr in zip(names, row.lrs):
            assert lr == pytest.approx(factors[name] * recipe.lr(step), rel=1e-6)


def test_the_outline_for_the_command_line() -> None:
    shown = outline(Spec(global_batch_size=128, momentum_form="velocity"), None)
    assert (shown.steps, shown.base_lr, shown.policy.name) == (20 * (1438 // 128), 0.1, "free")
    assert "VelocitySGD, momentum 0.9, Nesterov" in shown.optimizer
    assert outline(Spec(), None).policy is None
