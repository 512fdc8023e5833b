"""Scaling rules and param groups, against the numbers of the papers and the trainers that use them."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samestep import scaling

# Rules


def test_linear_rule_of_goyal():
    scaled = scaling.scale(
        0.1, 256, 8192, weight_decay=1e-4, betas=(0.9, 0.999), eps=1e-8, warmup_steps=25025
    )
    assert (scaled.lr, float(scaled), scaled.kappa) == (3.2, 3.2, 32.0)
    assert (scaled.weight_decay, scaled.betas, scaled.eps) == (1e-4, (0.9, 0.999), 1e-8)
    assert scaled.warmup_steps == 782


@pytest.mark.parametrize(("workers", "lr"), [(2, 0.1), (3, 0.15), (1, 0.05)])
def test_elastic_resize_under_the_linear_rule(workers, lr):
    assert scaling.scale(0.1, 64, 32 * workers).lr == lr


@pytest.mark.parametrize(
    ("kappa", "betas"), [(1, (0.9, 0.999)), (2, (0.8, 0.998)), (8, (0.2, 0.992)), (10, (0.0, 0.99))]
)
def test_sde_betas(kappa, betas):
    scaled = scaling.scale(1e-3, 64, 64 * kappa, "sde", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    assert scaled.betas == betas
    assert scaled.lr == pytest.approx(1e-3 * kappa**0.5)
    assert scaled.eps == pytest.approx(1e-8 / kappa**0.5)
    assert scaled.weight_decay == pytest.approx(0.1 * kappa**0.5)


def test_sde_refuses_a_negative_beta_with_the_largest_kappa():
    with pytest.raises(ValueError, match=r"at most 10 times .* got 32 times, where it would become -2\.2"):
        scaling.scale(1e-3, 64, 64 * 32, "sde", betas=(0.9, 0.999))
    # The limit itself is legal although 1 - 100 * (1 - 0.99) is below 0 in floats.
    assert scaling.scale(1e-3, 1, 100, "sde", betas=(0.99,)).betas == (0.0,)
    with pytest.raises(ValueError, match=r"betas\[1\]=0\.5"):
        scaling.scale(1e-3, 1, 3, "sde", betas=(0.9, 0.5))


@pytest.mark.parametrize(("kappa", "decay"), [(4, 0.996006), (16, 0.984119)])
def test_average_of_weights_keeps_its_length_in_samples(kappa, decay):
    for rule in ("linear", "sqrt", "sde", "legw", "beta2", "constant"):
        assert scaling.scale(0.1, 1, kappa, rule, ema_decay=0.999).ema_decay == pytest.approx(decay, abs=5e-7)


def test_other_rules():
    scaled = scaling.scale(0.1, 256, 1024, "sqrt", betas=(0.9, 0.999), weight_decay=0.1, warmup_steps=100)
    assert (scaled.lr, scaled.betas, scaled.weight_decay, scaled.warmup_steps) == (0.2, (0.9, 0.999), 0.1, 25)
    scaled = scaling.scale(0.1, 256, 1024, "legw", warmup_steps=100)
    assert (scaled.lr, scaled.warmup_steps) == (
        0.2,
        100,
    )  # 4 times the epochs, at a quarter of the steps per epoch
    scaled = scaling.scale(0.1, 256, 1024, "beta2", betas=(0.9, 0.999))
    assert (scaled.lr, scaled.betas) == (0.1, (0.9, pytest.approx(0.996006, abs=5e-7)))
    assert scaling.scale(0.1, 256, 2560, "constant").lr == 0.1


def test_a_warmup_never_vanishes():
    assert scaling.scale(0.1, 1, 1000, warmup_steps=3).warmup_steps == 1
    assert scaling.scale(0.1, 1, 1000, warmup_steps=0).warmup_steps == 0
    assert scaling.scale(0.1, 1000, 1, warmup_steps=3).warmup_steps == 3000


def test_restarts_do_not_compound():
    # From a stored reference, 4 workers give 0.004 after any number of restarts.
    assert {scaling.scale(0.001, 32, 128).lr for _ in range(3)} == {0.004}
    result = scaling.scale(0.001, 32, 128)
    assert pickle.loads(pickle.dumps(result)) == result
    with pytest.raises(AttributeError):
        result.lr = 1.0


@given(
    lr=st.floats(1e-6, 10.0),
    batch=st.integers(1, 10_000),
    first=st.integers(1, 10_000),
    rule=st.sampled_from(["linear", "sqrt", "sde", "legw", "beta2", "constant"]),
)
def test_scaling_is_consistent(lr, batch, first, rule):
    assert scaling.scale(lr, batch, batch, rule).lr == lr
    assert scaling.scale(lr, batch, first, rule) == scaling.scale(lr, batch, first, rule)
    there = scaling.scale(lr, batch, first, rule)
    assert scaling.scale(there.lr, first, batch, rule).lr == pytest.approx(lr, rel=1e-12)


@given(beta=st.decimals("0", "0.9999", places=4), kappa=st.integers(1, 50))
def test_sde_keeps_the_memory_in_samples(beta, kappa):
    exact = 1 - kappa * (1 - Fraction(beta))
    if exact < 0:
        with pytest.raises(ValueError, match="global_batch_size"):
            scaling.scale(1.0, 1, kappa, "sde", betas=(float(beta),))
    else:
        assert scaling.scale(1.0, 1, kappa, "sde", betas=(float(beta),)).betas == (float(exact),)


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("reference_lr", (0.0, 1, 1), {}),
        ("reference_lr", (float("nan"), 1, 1), {}),
        ("reference_batch_size", (0.1, 0, 1), {}),
        ("reference_batch_size", (0.1, 1.5, 1), {}),
        ("global_batch_size", (0.1, 1, True), {}),
        ("rule", (0.1, 1, 1, "cubic"), {}),
        ("betas[0]", (0.1, 1, 1), {"betas": (1.0,)}),
        ("eps", (0.1, 1, 1), {"eps": -1e-8}),
        ("weight_decay", (0.1, 1, 1), {"weight_decay": float("inf")}),
        ("ema_decay", (0.1, 1, 1), {"ema_decay": 1.1}),
        ("warmup_steps", (0.1, 1, 1), {"warmup_steps": -1}),
    ],
)
def test_bad_arguments_are_named(name, arguments, options):
    with pytest.raises(ValueError) as caught:
        scaling.scale(*arguments, **options)
    assert f"`{name}`" in str(caught.value)


@pytest.mark.parametrize(
    ("variance", "squared", "gain"), [(1, 0, 8), (0, 1, 1), (1, 1, 1.7778), (4, 1, 3.3333)]
)
def test_adascale_gain(variance, squared, gain):
    assert scaling.adascale_gain(variance, squared, 8) == pytest.approx(gain, abs=5e-5)


def test_a_larger_batch_in_place_of_a_decay():
    assert scaling.noise_scale(1_280_000, 0.01, 256, 0.9) == pytest.approx(500)
    assert scaling.noise_scale(1_280_000, 0.1, 2560, 0.9) == pytest.approx(500)
    with pytest.raises(ValueError, match="squared_norm"):
        scaling.adascale_gain(0.0, 0.0, 2.0)


# Param groups


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)])
        self.attention = nn.MultiheadAttention(4, 1)
        self.bn = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)


def named(model, groups):
    names = {id(param): name for name, param in model.named_parameters()}
    return {group["name"]: [names[id(param)] for param in group["params"]] for group in groups}


def test_kinds_of_parameters():
    model = Net()
    groups = scaling.param_groups(
        model,
        0.1,
        weight_decay=1e-4,
        bias_lr_factor=2.0,
        bias_weight_decay=0.0,
        norm_lr_factor=0.5,
        norm_weight_decay=1e-5,
    )
    assert {group["name"]: (group["lr"], group["weight_decay"]) for group in groups} == {
        "weights": (0.1, 1e-4),
        "biases": (0.2, 0.0),
        "norms": (0.05, 1e-5),
    }
    assert named(model, groups) == {
        "weights": [
            "embed.weight",
            "blocks.0.0.weight",
            "blocks.1.0.weight",
            "attention.in_proj_weight",
            "attention.out_proj.weight",
        ],
        "biases": ["blocks.0.0.bias", "blocks.1.0.bias", "attention.in_proj_bias", "attention.out_proj.bias"],
        "norms": [
            "blocks.0.1.weight",
            "blocks.0.1.bias",
            "blocks.1.1.weight",
            "blocks.1.1.bias",
            "bn.weight",
            "bn.bias",
        ],
    }
    torch.optim.SGD(groups, lr=1.0).zero_grad()


def test_second_rate_for_named_parameters():
    model = Net()
    groups = scaling.param_groups(model, 0.1, bias_lr_factor=2.0, lr_factors={"blocks.1.*": 0.5})
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates["weights x 0.5"] == 0.05
    assert rates["biases x 0.5"] == 0.1
    assert rates["norms x 0.5"] == 0.05
    assert "blocks.1.0.weight" in named(model, groups)["weights x 0.5"]


def test_tied_parameters_are_found_by_any_of_their_names():
    model = Net()
    groups = scaling.param_groups(model, 0.1, lr_factors={"head.*": 3.0})
    assert named(model, groups)["weights x 3"] == ["embed.weight"]
    assert sum(len(group["params"]) for group in groups) == len({id(p) for g in groups for p in g["params"]})


def test_layer_wise_decay():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    groups = scaling.param_groups(model, 1.0, layer_decay=0.75, layers=["0.*", "1.*"])
    assert sorted({group["lr"] for group in groups}) == [0.5625, 0.75, 1.0]


def test_norms_of_model_libraries_count_by_name():
    class MyRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    class NormalizedLinear(nn.Linear):
        pass

    model = nn.Sequential(MyRMSNorm(), NormalizedLinear(2, 2, bias=False))
    assert named(model, scaling.param_groups(model, 0.1)) == {"norms": ["0.scale"], "weights": ["1.weight"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_factors": {"haed.*": 2.0}}, r"`lr_factors`.*'haed\.\*'"),
        ({"lr_factors": {"frozen.*": 2.0}}, "matches none"),
        ({"lr_factors": {"embed.*": 2.0, "*.weight": 3.0}}, "Make them disjoint"),
        ({"lr_factors": {"embed.*": -2.0}}, r"lr_factors\['embed\.\*'\]"),
        ({"layers": ["nothing"], "layer_decay": 0.5}, "`layers`"),
        ({"layer_decay": 0.5}, "`layers`"),
        ({"weight_decay": -1.0}, "`weight_decay`"),
        ({"bias_lr_factor": float("nan")}, "`bias_lr_factor`"),
    ],
)
def test_bad_rules_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        scaling.param_groups(Net(), 0.1, **options)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="requires_grad"):
        scaling.param_groups(nn.ReLU(), 0.1)


def test_scaling_the_loss_is_not_scaling_the_rate():
    # Goyal's remark 1: w = 1, g = 1, lr 0.1, wd 0.1, k = 8.
    def after(lr, loss_scale, decay):
        weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        weight.grad = torch.full_like(weight, loss_scale)
        torch.optim.SGD([weight], lr=lr, weight_decay=decay).step()
        return weight.item()

    assert after(scaling.scale(0.1, 1, 8).lr, 1.0, 0.1) == pytest.approx(0.12)
    assert after(0.1, 8.0, 0.1) == pytest.approx(0.19)
    assert after(0.1, 8.0, 0.8) == pytest.approx(0.12)
