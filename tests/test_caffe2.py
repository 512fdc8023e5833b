"""Recipes of the Caffe2 era: every table of the originals, their own files, and what is refused."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from samestep import caffe2, momentum
from samestep.errors import SpecError

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "caffe2_recipes"
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="the original recipes are not here")


@pytest.fixture
def read(tmp_path):
    def read(family=None, faithful=(), top=None, **solver):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"SOLVER": solver, **(top or {})}))
        return caffe2.read_recipe(path, family=family, faithful=faithful)

    return read


def digits(value):
    return f"{value:.9g}"


def factor(recipe, step):
    """The factor on the history before update `step`; the VRD kin compares doubles, the others what they fed."""
    if step == 0:
        return 1.0
    if recipe.family in ("vrd", "self_supervision"):
        old, new = (recipe.base_lr * recipe.schedule(each) for each in (step - 1, step))
        return recipe.momentum(old, new)
    return recipe.momentum(recipe.lr(step - 1), recipe.lr(step))


def check_table(recipe, rows, scale_digits=9):
    for step, lr, scale in rows:
        assert digits(recipe.lr(step)) == lr, step
        assert np.float32(recipe.base_lr * recipe.schedule(step)) == pytest.approx(
            recipe.lr(step), rel=2e-7, abs=1e-12
        )
        got = factor(recipe, step)
        assert (got == 1.0) if scale is None else f"{got:.{scale_digits}g}" == scale, (step, got)


D1 = {"LR_POLICY": "steps_with_decay", "BASE_LR": 0.02, "STEPS": [0, 60000, 80000], "MAX_ITER": 90000}


def test_d1_steps_with_decay_after_a_linear_warm_up(read):
    recipe = read(**D1)
    check_table(
        recipe,
        [
            (0, "0.00666666683", None),
            (1, "0.00669333339", None),
            (2, "0.00671999995", None),
            (249, "0.0133066671", None),
            (250, "0.0133333337", None),
            (499, "0.0199733339", None),
            (500, "0.0199999996", None),
            (59999, "0.0199999996", None),
            (60000, "0.00200000009", "0.100000009"),
            (79999, "0.00200000009", None),
            (80000, "0.000199999995", "0.099999994"),
            (89999, "0.000199999995", None),
            (90000, "0.000199999995", None),
            (10**9, "0.000199999995", None),
        ],
    )
    ratios = {1: 1.00399998, 2: 1.00398405, 249: 1.00200809, 250: 1.002004, 499: 1.00133694, 500: 1.00133506}
    for step, ratio in ratios.items():
        assert recipe.momentum.compared(recipe.lr(step - 1), recipe.lr(step)) == pytest.approx(
            ratio, abs=5e-9
        )
    assert recipe.momentum == momentum.threshold(1.1, 1e-7)
    assert recipe.total_steps == 90000
    # D11: a resume at 60000 knows the rate of 59999 here, so it corrects as the uninterrupted run does; the
    # original starts from a rate of 0 and does not.
    assert digits(recipe.momentum(recipe.lr(59999), recipe.lr(60000))) == "0.100000009"
    assert recipe.momentum(0.0, recipe.lr(60000)) == 1.0


def test_d2_steps_with_lrs(read):
    steps = {"STEPS": [0, 60, 80], "MAX_ITER": 90, "WARM_UP_ITERS": 0}
    recipe = read(LR_POLICY="steps_with_lrs", LRS=[0.02, 0.002, 0.0002], **steps)
    rows = [
        (0, "0.0199999996", None),
        (59, "0.0199999996", None),
        (60, "0.00200000009", "0.100000009"),
        (79, "0.00200000009", None),
        (80, "0.000199999995", "0.099999994"),
        (1000, "0.000199999995", None),
    ]
    check_table(recipe, rows)
    check_table(read(LR_POLICY="steps_with_decay", BASE_LR=0.02, GAMMA=0.1, **steps), rows)


def test_d3_step(read):
    recipe = read("detectron", LR_POLICY="step", BASE_LR=0.001, GAMMA=0.1, STEP_SIZE=30000, WARM_UP_ITERS=0)
    check_table(
        recipe,
        [
            (29999, "0.00100000005", None),
            (30000, "9.99999975e-05", "0.099999994"),
            (60000, "9.99999975e-06", "0.100000001"),
        ],
    )


def test_d4_cosine_decay(read):
    recipe = read("detectron", LR_POLICY="cosine_decay", BASE_LR=1, MAX_ITER=10, WARM_UP_ITERS=0)
    lrs = "1 0.97552824 0.904508471 0.793892622 0.654508471 0.5 0.345491499 0.206107378 0.0954915062 0.0244717412 0"
    scales = "- - - 0.87770611 0.824429452 0.763932049 0.690982997 0.596562803 0.463309497 0.256271392 0"
    rows = [
        (step, lr, None if scale == "-" else scale)
        for step, (lr, scale) in enumerate(zip(lrs.split(), scales.split(), strict=True))
    ]
    check_table(recipe, [*rows, (11, "0.0244717412", None)])


@pytest.mark.parametrize(
    ("total", "corrected"), [(1000, range(980, 1000)), (300, range(280, 300)), (90000, range(0))]
)
def test_d4_which_updates_of_a_cosine_are_corrected(read, total, corrected):
    recipe = read("detectron", LR_POLICY="cosine_decay", BASE_LR=0.02, MAX_ITER=total, WARM_UP_ITERS=0)
    looked_at = range(1, total) if total < 2000 else range(total - 2000, total)
    assert [step for step in looked_at if factor(recipe, step) != 1.0] == list(corrected)


def test_d5_exp_decay(read):
    recipe = read("detectron", LR_POLICY="exp_decay", BASE_LR=0.02, GAMMA=0.1, MAX_ITER=100, WARM_UP_ITERS=0)
    rows = {0: "0.0199999996", 1: "0.0195447449", 25: "0.0112468265", 50: "0.00632455526"}
    rows |= {99: "0.00204658601", 100: "0.00200000009"}
    check_table(recipe, [(step, lr, None) for step, lr in rows.items()])
    assert recipe.momentum.compared(recipe.lr(49), recipe.lr(50)) == pytest.approx(1.0233, abs=5e-5)


def test_d6_constant_warm_up(read):
    warm_up = {"WARM_UP_METHOD": "constant", "WARM_UP_FACTOR": 0.1, "WARM_UP_ITERS": 100}
    recipe = read(LR_POLICY="steps_with_decay", BASE_LR=0.02, STEPS=[0, 200], MAX_ITER=300, **warm_up)
    check_table(
        recipe,
        [
            (0, "0.00200000009", None),
            (99, "0.00200000009", None),
            (100, "0.0199999996", "9.99999905"),
            (200, "0.00200000009", "0.100000009"),
        ],
    )


V2 = {
    "BASE_LR": 0.1,
    "STEP_SIZES": [30, 30, 20],
    "NUM_ITERATIONS": 90,
    "WARM_UP_ITERS": 5,
    "WARM_UP_LR": 0.01,
    "GRADUAL_INCREASE_LR": True,
    "GRADUAL_LR_STEP": 0.02,
    "SCALE_MOMENTUM": True,
}


def check_one_based(recipe, rows):
    """Rows as (1-based iteration, rate, factor on V)."""
    for iteration, lr, scale in rows:
        assert recipe.lr(iteration - 1) == pytest.approx(lr, rel=1e-7)
        assert recipe.base_lr * recipe.schedule(iteration - 1) == pytest.approx(lr, rel=1e-12)
        assert factor(recipe, iteration - 1) == (1.0 if scale is None else pytest.approx(scale, rel=5e-5))


def test_v1_shipped_recipe_with_correction(read):
    recipe = read(
        BASE_LR=0.001,
        STEP_SIZES=[5670],
        NUM_ITERATIONS=6615,
        WARM_UP_ITERS=100,
        WARM_UP_LR=1e-4,
        SCALE_MOMENTUM=True,
    )
    assert recipe.family == "vrd"
    assert recipe.momentum == momentum.every_change()
    check_one_based(
        recipe,
        [
            (1, 1e-4, None),
            (100, 1e-4, None),
            (101, 1e-3, 10.0),
            (5670, 1e-3, None),
            (5671, 1e-4, 0.1),  # V6: the rate before it is known after a resume too
            (6615, 1e-4, None),
        ],
    )


def test_v2_constant_then_gradual(read):
    check_one_based(
        read(**V2),
        [
            (1, 0.01, None),
            (5, 0.01, None),
            (6, 0.03, 3.0),
            (7, 0.05, 1.6667),
            (8, 0.07, 1.4),
            (9, 0.09, 1.2857),
            (10, 0.1, 1.1111),
            (11, 0.1, None),
            (30, 0.1, None),
            (31, 0.01, 0.1),
            (61, 0.001, 0.1),
            (81, 0.0001, 0.1),
        ],
    )


@pytest.mark.parametrize(
    ("start", "rates"),
    [(0.01, [0.01, 0.03, 0.05, 0.07, 0.09, 0.1, 0.1]), (0.02, [0.02, 0.04, 0.06, 0.08, 0.1, 0.1])],
)
def test_v3_gradual_only(read, start, rates):
    recipe = read(**{**V2, "WARM_UP_ITERS": -1, "GRADUAL_LR_START": start})
    for step, rate in enumerate(rates):
        assert recipe.lr(step) == pytest.approx(rate, rel=1e-7)
        assert recipe.base_lr * recipe.schedule(step) == pytest.approx(rate, rel=1e-12)


def test_v5_warm_up_hides_a_decay(read):
    recipe = read(**{**V2, "STEP_SIZES": [3, 100]})
    check_one_based(
        recipe,
        [
            (4, 0.01, None),
            (6, 0.03, 3.0),
            (9, 0.09, 1.2857),
            (10, 0.1, 1.1111),
            (11, 0.01, 0.1),
            (103, 0.01, None),
        ],
    )
    check_one_based(recipe, [(104, 0.001, 0.1)])


@pytest.mark.parametrize("sizes", [[3, 100], [5, 1], [6, 2, 1], [1, 1, 1], [4, 6]])
@pytest.mark.parametrize("hold", [-1, 0, 1, 5])
@pytest.mark.parametrize(("start", "step"), [(0.01, 0.02), (0.02, 0.02), (0.1, 0.02), (0.01, 0.03)])
def test_vrd_schedule_is_the_originals_everywhere(read, sizes, hold, start, step):
    settings = {"STEP_SIZES": sizes, "WARM_UP_ITERS": hold, "WARM_UP_LR": start, "GRADUAL_LR_START": start}
    recipe = read(**{**V2, **settings, "GRADUAL_LR_STEP": step})
    for at in range(30):
        i, k = at + 1, sum(bound < at + 1 for bound in np.cumsum(sizes))
        rises = math.ceil((0.1 - start) / step)
        right = 0.1 * 0.1**k
        if i <= hold:
            right = start
        elif hold > 0:
            right = min(0.1, start + step * (i - hold)) if i <= hold + rises else right
        elif i <= rises:
            right = min(0.1, start + step * (i - 1))
        assert recipe.lr(at) == pytest.approx(right, rel=1e-7)
        assert recipe.base_lr * recipe.schedule(at) == pytest.approx(right, rel=1e-12)


N1 = {
    "LR_POLICY": "steps_with_relative_lrs",
    "BASE_LR": 0.01,
    "LRS": [1, 0.1, 0.01],
    "STEP_SIZES": [150000, 150000, 100000],
    "MAX_ITER": 400000,
    "SCALE_MOMENTUM": True,
}


def test_n1_relative_lrs(read):
    recipe = read("nonlocal", **N1)
    assert recipe.momentum == momentum.relative(1e-7)
    check_table(
        recipe,
        [
            (149999, "0.00999999978", None),
            (150000, "0.00100000005", "0.100000009"),
            (300000, "9.99999975e-05", digits(np.float32(1e-4) / np.float32(1e-3))),
            (399999, "9.99999975e-05", None),
            (400000, "9.99999975e-05", None),  # the original has an IndexError here, one update past the end
        ],
    )
    with pytest.raises(SpecError) as caught:
        read("nonlocal", **{**N1, "MAX_ITER": 400001})
    assert caught.value.name == "LRS"


def test_n2_warm_up_to_a_large_rate(read):
    warm_up = {"WARMUP_ON": True, "WARMUP_START_LR": 0.1, "WARMUP_END_ITER": 25025}
    recipe = read(**{**N1, "BASE_LR": 3.2, "WARMUP": warm_up})
    rows = {0: "0.100000001", 1: "0.100123882", 12512: "1.6500001", 25023: "3.19987631"}
    rows |= {25024: "3.20000005", 25025: "3.20000005"}
    for step, lr in rows.items():
        assert digits(recipe.lr(step)) == lr
        assert recipe.base_lr * recipe.schedule(step) == pytest.approx(recipe.lr(step), rel=2e-7)
    assert sum(factor(recipe, step) != 1.0 for step in range(1, 25026)) == 25024


def test_nonlocal_warm_up_replaces_the_schedule_and_may_be_one_step(read):
    warm_up = {"WARMUP_ON": True, "WARMUP_START_LR": 0.001, "WARMUP_END_ITER": 4}
    recipe = read(**{**N1, "STEP_SIZES": [2, 8, 10], "MAX_ITER": 20, "WARMUP": warm_up})
    assert [round(recipe.lr(step), 9) for step in range(5)] == [
        0.001
    ] * 5  # its target is schedule(4), after the drop
    one = read(**{**N1, "WARMUP": {**warm_up, "WARMUP_END_ITER": 1}})
    assert one.lr(0) == one.lr(1) == float(np.float32(0.01))  # 0 / 0 in the original


# The files themselves


@needs_files
@pytest.mark.parametrize(
    ("name", "family", "base_lr", "total", "batch", "policy", "nesterov"),
    [
        ("detectron_e2e_mask_rcnn_R-50-FPN_2x", "detectron", 0.02, 180000, 16, momentum.threshold(), False),
        ("detectron_retinanet_R-101-FPN_1x", "detectron", 0.01, 90000, 16, momentum.threshold(), False),
        (
            "detectron_tutorial_1gpu_e2e_faster_rcnn_R-50-FPN",
            "detectron",
            0.0025,
            60000,
            2,
            momentum.threshold(),
            False,
        ),
        ("nonlocal_kinetics_resnet_8gpu_c2d_400k", "nonlocal", 0.01, 400000, 64, momentum.relative(), True),
        (
            "selfsup_imagenet_linear_resnet50_jigsaw",
            "self_supervision",
            0.01,
            140000,
            256,
            momentum.frozen(),
            True,
        ),
        ("vrd_VGG16_softmaxed_triplet_8gpu", "vrd", 0.001, 6615, 8, momentum.frozen(), True),
    ],
)
def test_original_files_are_read_as_they_are(name, family, base_lr, total, batch, policy, nesterov):
    recipe = caffe2.read_recipe(FOLDER / f"{name}.yaml")
    assert (recipe.family, recipe.base_lr, recipe.total_steps) == (family, base_lr, total)
    assert (recipe.global_batch_size, recipe.momentum, recipe.nesterov) == (batch, policy, nesterov)
    assert recipe.sgd_momentum == 0.9
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    for step in range(0, total, 97):
        assert recipe.base_lr * recipe.schedule(step) == pytest.approx(recipe.lr(step), rel=1e-7)


@needs_files
def test_group_rules_of_the_original_files():
    rules = {path.name.split("_")[0]: caffe2.read_recipe(path).param_groups for path in FOLDER.glob("*.yaml")}
    assert rules == {
        "detectron": caffe2.GroupRules(1e-4, 2.0, 0.0, 1.0, 0.0),
        "vrd": caffe2.GroupRules(5e-4, 2.0, 0.0, 1.0, 0.0),
        "nonlocal": caffe2.GroupRules(1e-4, 1.0, 1e-4, 1.0, 0.0),
        "selfsup": caffe2.GroupRules(1e-4, 1.0, 1e-4, 0.0, 0.0),  # BN_NO_SCALE_SHIFT
    }


@needs_files
def test_the_tutorial_of_detectron_is_the_linear_rule():
    # The comments of the file give the same recipe for 1, 2, 4 and 8 devices.
    from samestep import scaling

    recipe = caffe2.read_recipe(FOLDER / "detectron_tutorial_1gpu_e2e_faster_rcnn_R-50-FPN.yaml")
    for devices, lr, total in [(1, 0.0025, 60000), (2, 0.005, 30000), (4, 0.01, 15000), (8, 0.02, 7500)]:
        assert scaling.scale(recipe.base_lr, recipe.global_batch_size, 2 * devices).lr == lr
        assert recipe.total_steps // devices == total


# Detection and refusals


def test_a_file_that_fits_two_families_must_be_told(read):
    with pytest.raises(SpecError, match="Give family=") as caught:
        read(BASE_LR=0.1, NUM_ITERATIONS=10)
    assert caught.value.name == "family"
    assert read("self_supervision", BASE_LR=0.1, NUM_ITERATIONS=10).family == "self_supervision"
    with pytest.raises(SpecError, match="`family`"):
        read("caffe", BASE_LR=0.1)
    with pytest.raises(SpecError, match="family"):
        read(MAX_ITER=10, NUM_ITERATIONS=10)


@pytest.mark.parametrize(
    ("family", "solver", "key"),
    [
        ("detectron", {"BASE_RL": 0.1}, "BASE_RL"),
        ("detectron", {"NESTEROV": True}, "NESTEROV"),
        ("detectron", {"NUM_ITERATIONS": 10}, "NUM_ITERATIONS"),
        ("detectron", {"BASE_LR": "fast"}, "BASE_LR"),
        ("detectron", {"BASE_LR": 0.0}, "BASE_LR"),
        ("detectron", {"BASE_LR": float("nan")}, "BASE_LR"),
        ("detectron", {"MAX_ITER": 1.5}, "MAX_ITER"),
        ("detectron", {"SCALE_MOMENTUM": 1}, "SCALE_MOMENTUM"),
        ("detectron", {"SCALE_MOMENTUM_THRESHOLD": 0.9}, "SCALE_MOMENTUM_THRESHOLD"),
        ("detectron", {"MOMENTUM": 1.0}, "MOMENTUM"),
        ("detectron", {"WEIGHT_DECAY": -1e-4}, "WEIGHT_DECAY"),
        ("detectron", {"LR_POLICY": "poly"}, "LR_POLICY"),
        ("detectron", {"LR_POLICY": "step", "STEPS": [0, 10]}, "STEPS"),
        ("detectron", {"LR_POLICY": "steps_with_decay"}, "STEPS"),
        ("detectron", {"LR_POLICY": "steps_with_decay", "STEPS": [10, 20]}, "STEPS"),
        ("detectron", {"LR_POLICY": "steps_with_decay", "STEPS": [0, 20, 10]}, "STEPS"),
        ("detectron", {"LR_POLICY": "steps_with_decay", "STEPS": [0, 20], "LRS": [1, 2]}, "LRS"),
        ("detectron", {"LR_POLICY": "steps_with_lrs", "STEPS": [0, 20], "LRS": [1]}, "LRS"),
        ("detectron", {"LR_POLICY": "exp_decay", "GAMMA": 0.0}, "GAMMA"),
        ("detectron", {"WARM_UP_METHOD": "cubic"}, "WARM_UP_METHOD"),
        ("nonlocal", {"STEPS": [0, 10], "STEP_SIZES": [10]}, "STEPS"),
        ("nonlocal", {"STEP_SIZES": [10, 10], "LRS": [1]}, "LRS"),
        ("nonlocal", {"STEP_SIZES": [10], "LRS": [1, 1, 1]}, "LRS"),
        ("nonlocal", {"STEP_SIZES": []}, "STEP_SIZES"),
        ("nonlocal", {"WARMUP": {"WARMUP_UP": True}}, "WARMUP.WARMUP_UP"),
        ("vrd", {"GRADUAL_INCREASE_LR": True, "GRADUAL_LR_STEP": 0.0}, "GRADUAL_LR_STEP"),
        ("vrd", {"LR_TYPE": "constant"}, "LR_TYPE"),
        ("vrd", {"LR_POLICY": "cosine_decay"}, "LR_POLICY"),
        ("self_supervision", {"WARM_UP_ITERS": 10}, "WARM_UP_ITERS"),
        ("self_supervision", {"STEP_SIZES": [1.5]}, "STEP_SIZES"),
    ],
)
def test_unknown_and_contradictory_keys_are_named(read, family, solver, key):
    with pytest.raises(SpecError) as caught:
        read(family, **solver)
    assert caught.value.name == key
    assert key in str(caught.value)


def test_values_are_coerced_as_the_originals_do(read):
    recipe = read(
        LR_POLICY="steps_with_decay", BASE_LR="2e-2", STEPS="(0, 60)", MAX_ITER=90, WARM_UP_ITERS="0"
    )
    assert recipe.lr(60) == float(np.float32(0.02 * 0.1))


def test_unreadable_files(tmp_path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(SpecError, match="missing"):
        caffe2.read_recipe(missing)
    for text in ("a: [", "- 1", "MODEL: {}", "SOLVER: 3", "SOLVER: !!python/object:os.system {}"):
        missing.write_text(text)
        with pytest.raises(SpecError):
            caffe2.read_recipe(missing)


def test_batches_must_divide(read):
    top = {"TRAIN": {"BATCH_SIZE": 60, "VIDEO_LENGTH": 8}}
    with pytest.raises(SpecError) as caught:
        read(top=top, **N1)
    assert caught.value.name == "BATCH_SIZE"


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_steps_are_whole_numbers(read, step):
    with pytest.raises(ValueError, match="`step`"):
        read(**D1).lr(step)


# Known defects, only on demand


def test_defects_are_repeated_by_name_only(read):
    vrd = {**V2, "WEIGHT_DECAY": 5e-4, "WEIGHT_DECAY_BN": 0.0}
    right = read(**vrd)
    assert (right.nesterov, right.param_groups.norm_weight_decay) == (True, 0.0)
    names = ("vrd_plain_momentum", "vrd_norm_decay_ignored", "vrd_momentum_per_device")
    wrong = read(faithful=names, top={"NUM_DEVICES": 4}, **vrd)
    assert (wrong.nesterov, wrong.param_groups.norm_weight_decay) == (False, 5e-4)
    assert wrong.momentum(0.1, 0.05) == 0.5**4
    assert wrong.faithful == names
    top = {"MODEL": {"NO_BIAS_DECAY": True}}
    solver = {"NUM_ITERATIONS": 10, "WEIGHT_DECAY": 1e-4}
    assert read("self_supervision", top=top, **solver).param_groups == caffe2.GroupRules(
        1e-4, 2.0, 0.0, 1.0, 1e-4
    )
    dropped = read("self_supervision", ["self_supervision_no_weight_decay"], top, **solver)
    assert dropped.param_groups.weight_decay == 0.0
    for faithful in (["unknown"], ["vrd_plain_momentum"], "vrd_plain_momentum"):
        with pytest.raises(SpecError, match="`faithful`"):
            read("detectron", faithful, BASE_LR=0.1)
    assert {family for family, _ in caffe2.FAITHFUL.values()} == {"vrd", "self_supervision"}


# Built for a model


def test_build_trains_as_the_caffe2_update_does(read):
    steps = {"LR_POLICY": "steps_with_decay", "STEPS": [0, 12, 18], "MAX_ITER": 24, "WARM_UP_ITERS": 6}
    recipe = read(BASE_LR=0.02, WEIGHT_DECAY=0.01, **steps)
    model = nn.Linear(1, 1).double()
    start = (model.weight.item(), model.bias.item())
    optimizer, scheduler = recipe.build(model)
    state = [[start[0], 0.0], [start[1], 0.0]]
    used = []
    for step in range(recipe.total_steps):
        used.append(optimizer.param_groups[0]["lr"])
        model.weight.grad = torch.full_like(model.weight, 1.0 + step % 3)
        model.bias.grad = torch.full_like(model.bias, 2.0 - step % 2)
        optimizer.step()
        lr = recipe.base_lr * recipe.schedule(step)
        gradients = (1.0 + step % 3 + 0.01 * state[0][0], 2.0 * (2.0 - step % 2))
        for pair, gradient in zip(state, gradients, strict=True):
            pair[1] = 0.9 * factor(recipe, step) * pair[1] + lr * gradient
            pair[0] -= pair[1]
    assert model.weight.item() == pytest.approx(state[0][0], abs=1e-12)
    assert model.bias.item() == pytest.approx(state[1][0], abs=1e-12)
    assert used == pytest.approx([recipe.lr(step) for step in range(24)], rel=1e-7)
    assert scheduler.applied_steps == 24


def test_build_puts_named_parameters_on_the_second_rate(read):
    recipe = read(**{**V2, "LR_FACTOR": 10.0})
    optimizer, _ = recipe.build(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), second_lr_params=["1.*"])
    rates = {group["name"]: group["initial_lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"weights": 0.1, "biases": 0.2, "weights x 10": 1.0, "biases x 10": 2.0})
    assert [group["nesterov"] for group in optimizer.param_groups] == [True] * 4
