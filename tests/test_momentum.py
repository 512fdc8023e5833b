"""Momentum: policies, forms, the Caffe2 update, and what happens to the history when the rate changes."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import momentum
from samestep.errors import SpecError

ALL_POLICIES = [
    momentum.free(),
    momentum.frozen(),
    momentum.threshold(),
    momentum.relative(),
    momentum.every_change(),
]
WARM_UP_AND_STEPS = [0.02 + (0.1 - 0.02) * step / 20 for step in range(20)] + [0.1] * 20 + [0.01] * 20


def caffe2(lrs, factors, gradients, start, mu=0.9, nesterov=False, decay=0.0):
    """The obvious twin: V = mu s V + lr g, one number at a time, as the Caffe2 operator is written."""
    weight, velocity, trace = start, 0.0, []
    for lr, factor, gradient in zip(lrs, factors, gradients, strict=True):
        velocity *= factor
        gradient = gradient + decay * weight
        previous, velocity = velocity, mu * velocity + lr * gradient
        weight -= (1 + mu) * velocity - mu * previous if nesterov else velocity
        trace.append((weight, velocity))
    return trace


def run(optimizer, weight, policy, lrs, gradients, read=lambda state: state["momentum_buffer"].item()):
    """Drive an optimizer over a rate sequence with the policy applied before each update; return (w, buffer)."""
    trace, old = [], None
    for lr, gradient in zip(lrs, gradients, strict=True):
        if old is not None:
            momentum.apply(optimizer, policy, [old], [lr])
        optimizer.param_groups[0]["lr"] = old = lr
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        trace.append((weight.item(), read(optimizer.state[weight])))
    return trace


def one_weight(start=0.0):
    return torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))


def velocity_run(policy, lrs, gradients, start=0.0, **settings):
    weight = one_weight(start)
    optimizer = momentum.VelocitySGD([weight], lr=lrs[0], momentum=0.9, **settings)
    return run(optimizer, weight, policy, lrs, gradients)


def gradient_run(policy, lrs, gradients, start=0.0, **settings):
    weight = one_weight(start)
    optimizer = torch.optim.SGD([weight], lr=lrs[0], momentum=0.9, **settings)
    return run(optimizer, weight, policy, lrs, gradients)


def assert_close(left, right, tolerance=1e-12):
    for one, other in zip(left, right, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


def weights(trace):
    return [weight for weight, _ in trace]


def buffers(trace):
    return [buffer for _, buffer in trace]


# Policies


@pytest.mark.parametrize(
    ("old", "new", "ratio", "scale"),
    [  # table D8
        (1.0, 1.1, 1.100000023842, 1.1),
        (0.1, 0.11, 1.099999977648, None),
        (0.2, 0.22, 1.099999977648, None),
        (0.3, 0.33, 1.1, None),
        (0.01, 0.011, 1.100000018626, 1.1),
        (0.5, 0.55, 1.100000023842, 1.1),
        (2.0, 2.2, 1.100000023842, 1.1),
        (1.1, 1.0, 1.100000023842, 0.9090909),
        (0.11, 0.1, 1.099999977648, None),
        (0.22, 0.2, 1.099999977648, None),
        (1.0, 1.0999, 1.0999, None),
        (1.0, 1.1001, 1.1001, 1.1001),
        # D9
        (0.1, 0.0, 1e9, 0.0),
        (0.0, 0.1, 1e9, None),
        # D1
        (0.0, 0.02 / 3, 66666668.0, None),
        (0.02, 0.002, 9.9999993, 0.100000009),
        (0.002, 0.0002, 10.0000007, 0.099999994),
    ],
)
def test_threshold_is_strict_and_compares_float32_rates(old, new, ratio, scale):
    policy = momentum.threshold(1.1)
    assert policy.compared(old, new) == pytest.approx(ratio, rel=1e-6 if ratio > 1e6 else 1e-7)
    if 1.0999 < ratio < 1.1001:
        assert policy.compared(old, new) == pytest.approx(ratio, abs=5e-13 if ratio != 1.1 else 1e-9)
    expected = 1.0 if scale is None else scale
    assert policy(old, new) == pytest.approx(expected, abs=5e-8)
    assert (policy(old, new) == 1.0) is (scale is None)


def test_factor_digits_are_those_of_float32():
    assert f"{momentum.threshold()(0.02, 0.002):.9g}" == "0.100000009"
    assert f"{momentum.threshold()(0.002, 0.0002):.9g}" == "0.099999994"
    assert f"{momentum.relative()(0.01, 0.001):.9g}" == "0.100000009"
    assert momentum.every_change()(0.01, 0.001) == 0.1


def test_floor_is_compared_in_float64():
    # D10: float32(1e-7) is 1.0000000116860974e-07, just above the floor as float64.
    assert momentum.threshold()(1e-7, 1.0) > 1.0
    assert momentum.threshold()(9.9e-8, 1.0) == 1.0


def test_relative_sees_every_change_of_float32_rates_only():
    policy = momentum.relative(1e-7)
    assert policy(0.1, 0.1 * (1 + 1e-9)) == 1.0
    assert policy(0.1, 0.1001) == pytest.approx(1.001, rel=1e-6)


def test_every_change_divides_doubles_and_can_repeat_itself():
    # V6: a stored 0.001 / 3 that was rounded to 6 decimals
    assert momentum.every_change()(0.000333, 0.001 / 3) == pytest.approx(1.0010010010, abs=5e-11)
    assert momentum.every_change(times=8)(1.0, 0.5) == 0.5**8


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_rate_zero(policy):
    assert policy(0.0, 0.1) == 1.0
    assert policy(0.0, 0.0) == 1.0
    assert policy(0.1, 0.0) == (1.0 if policy == momentum.frozen() else 0.0)


@pytest.mark.parametrize("policy", [*ALL_POLICIES, momentum.threshold(1.5, 1e-3), momentum.every_change(2)])
def test_policies_are_data(policy):
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert momentum.policy_from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    with pytest.raises(AttributeError):
        policy.ratio = 2.0


def test_policies_differ():
    assert len(set(ALL_POLICIES)) == 5
    assert momentum.threshold(1.2) != momentum.threshold(1.1)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_bad_rates_are_named(policy, rate):
    with pytest.raises(ValueError, match="old_lr"):
        policy(rate, 0.1)
    with pytest.raises(ValueError, match="new_lr"):
        policy(0.1, rate)


def test_bad_settings_of_policies():
    for ratio in (0.9, math.nan, math.inf):
        with pytest.raises(ValueError, match="ratio"):
            momentum.threshold(ratio)
    with pytest.raises(ValueError, match="floor"):
        momentum.threshold(1.1, -1.0)
    with pytest.raises(ValueError, match="tolerance"):
        momentum.relative(math.nan)
    with pytest.raises(ValueError, match="times"):
        momentum.every_change(0)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"policy": "sometimes"},
        {"policy": ["free"]},
        {"policy": "threshold", "ratio": 1.1},
        {"policy": "free", "ratio": 1.1},
        {"policy": "relative", "tolerance": "small"},
        {"policy": "relative", "tolerance": True},
        {"policy": "threshold", "ratio": 0.5, "floor": 0.0},
    ],
)
def test_policy_from_dict_refuses(data):
    with pytest.raises(ValueError):
        momentum.policy_from_dict(data)


# The Caffe2 update and its emulation


@pytest.mark.parametrize(
    ("policy", "velocities", "positions", "torch_buffers"),
    [  # section 2.2: g = 1, mu = 0.9, rate 0.1 three times, then 0.01
        (
            momentum.threshold(),
            [0.1, 0.19, 0.271, 0.03439, 0.040951, 0.0468559],
            [-0.1, -0.29, -0.561, -0.59539, -0.636341, -0.6831969],
            [1, 1.9, 2.71, 3.439, 4.0951, 4.68559],
        ),
        (
            momentum.frozen(),
            [0.1, 0.19, 0.271, 0.2539, 0.23851, 0.224659],
            [-0.1, -0.29, -0.561, -0.8149, -1.05341, -1.278069],
            [1, 1.9, 2.71, 25.39, 23.851, 22.4659],
        ),
    ],
)
def test_drop_by_ten(policy, velocities, positions, torch_buffers):
    lrs, ones = [0.1] * 3 + [0.01] * 3, [1.0] * 6
    trace = velocity_run(policy, lrs, ones)
    # The threshold policy rounds its factor to float32: 0.1 comes as 0.09999999776.
    tolerance = 1e-12 if policy == momentum.frozen() else 2e-8
    assert_close(buffers(trace), velocities, tolerance)
    assert_close(weights(trace), positions, tolerance)
    trace = gradient_run(policy, lrs, ones)
    assert_close(buffers(trace), torch_buffers, 1e-12 if policy == momentum.frozen() else 2e-7)
    assert_close(weights(trace), positions, tolerance)


@pytest.mark.parametrize(
    ("policy", "velocities", "positions", "last_buffer"),
    [
        (momentum.every_change(), [0.01, 0.019, 0.271, 0.3439], [-0.01, -0.029, -0.3, -0.6439], 3.439),
        (momentum.frozen(), [0.01, 0.019, 0.1171, 0.20539], [-0.01, -0.029, -0.1461, -0.35149], 2.0539),
    ],
)
def test_jump_by_ten(policy, velocities, positions, last_buffer):
    lrs, ones = [0.01, 0.01, 0.1, 0.1], [1.0] * 4
    trace = velocity_run(policy, lrs, ones)
    assert_close(buffers(trace), velocities)
    assert_close(weights(trace), positions)
    trace = gradient_run(policy, lrs, ones)
    assert_close(weights(trace), positions)
    assert trace[-1][1] == pytest.approx(last_buffer, rel=1e-12)


def test_through_rate_zero():
    lrs, ones = [0.1, 0.1, 0.0, 0.1], [1.0] * 4
    for policy in (momentum.threshold(), momentum.every_change(), momentum.relative(), momentum.free()):
        trace = velocity_run(policy, lrs, ones)
        assert_close(buffers(trace), [0.1, 0.19, 0.0, 0.1])
        assert_close(weights(trace), [-0.1, -0.29, -0.29, -0.39])
    trace = velocity_run(momentum.frozen(), lrs, ones)
    assert_close(buffers(trace), [0.1, 0.19, 0.171, 0.2539])
    assert_close(weights(trace), [-0.1, -0.29, -0.461, -0.7149])
    # Gradient form: `free` is what torch does, the others are what the velocity form does.
    assert_close(weights(gradient_run(momentum.free(), lrs, ones)), [-0.1, -0.29, -0.29, -0.6339])
    for policy in (momentum.threshold(), momentum.every_change(), momentum.relative()):
        assert_close(weights(gradient_run(policy, lrs, ones)), [-0.1, -0.29, -0.29, -0.39])
    with pytest.raises(SpecError, match="VelocitySGD") as caught:
        gradient_run(momentum.frozen(), lrs, ones)
    assert caught.value.name == "momentum"


@pytest.mark.parametrize("policy", [momentum.every_change(), momentum.frozen()])
def test_rate_zero_at_the_start_and_the_end(policy):
    ones = [1.0] * 5
    start = [0.0, 0.0, 0.1, 0.2, 0.2]
    assert_close(
        weights(gradient_run(policy, start, ones)),
        weights(velocity_run(policy, start, ones)),
        tolerance=1e-12,
    )
    if policy == momentum.every_change():
        end = [0.2, 0.1, 0.1, 0.0, 0.0]
        assert_close(weights(gradient_run(policy, end, ones)), weights(velocity_run(policy, end, ones)))


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_emulated_caffe2_over_a_whole_run(policy, nesterov, decay):
    generator = torch.Generator().manual_seed(5)
    gradients = torch.randn(len(WARM_UP_AND_STEPS), generator=generator, dtype=torch.float64).tolist()
    lrs = WARM_UP_AND_STEPS
    factors = [1.0] + [policy(old, new) for old, new in itertools.pairwise(lrs)]
    expected = caffe2(lrs, factors, gradients, 0.3, nesterov=nesterov, decay=decay)
    velocity = velocity_run(policy, lrs, gradients, 0.3, nesterov=nesterov, weight_decay=decay)
    assert_close(weights(velocity), weights(expected))
    assert_close(buffers(velocity), buffers(expected))
    gradient = gradient_run(policy, lrs, gradients, 0.3, nesterov=nesterov, weight_decay=decay)
    assert_close(weights(gradient), weights(velocity))
    assert_close([lr * b for lr, b in zip(lrs, buffers(gradient), strict=True)], buffers(velocity))
    # Without emulation the two forms part by far, unless every change is corrected.
    plain = gradient_run(momentum.free(), lrs, gradients, 0.3, nesterov=nesterov, weight_decay=decay)
    apart = max(abs(a - b) for a, b in zip(weights(plain), weights(velocity), strict=True))
    assert (apart < 1e-5) is (policy not in (momentum.frozen(), momentum.threshold()))


rates = st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=30)


@settings(max_examples=60, deadline=None)
@given(lrs=rates, nesterov=st.booleans(), decay=st.sampled_from([0.0, 0.01]), seed=st.integers(0, 2**31))
def test_corrected_velocity_form_is_the_gradient_form(lrs, nesterov, decay, seed):
    gradients = torch.randn(
        len(lrs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()
    # With a large rate the decay makes the run diverge, which no absolute tolerance can follow: 1e-12 of its scale.
    options = {"nesterov": nesterov, "weight_decay": decay}
    left = velocity_run(momentum.free(), lrs, gradients, 0.5, **options)
    right = gradient_run(momentum.free(), lrs, gradients, 0.5, **options)
    plain = one_weight(0.5)
    torch_only = torch.optim.SGD([plain], lr=lrs[0], momentum=0.9, **options)
    for index, (lr, gradient) in enumerate(zip(lrs, gradients, strict=True)):
        torch_only.param_groups[0]["lr"] = lr
        plain.grad = torch.full_like(plain, gradient)
        torch_only.step()
        assert plain.item() == right[index][0]  # nothing was touched, to the last bit
    scale = max(1.0, *map(abs, weights(left)))
    assert max(abs(a - b) for a, b in zip(weights(left), weights(right), strict=True)) <= 1e-12 * scale


@settings(max_examples=60, deadline=None)
@given(lrs=rates, policy=st.sampled_from(ALL_POLICIES), seed=st.integers(0, 2**31))
def test_any_policy_is_the_same_in_both_forms(lrs, policy, seed):
    gradients = torch.randn(
        len(lrs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()
    left, right = velocity_run(policy, lrs, gradients), gradient_run(policy, lrs, gradients)
    scale = max(1.0, *map(abs, weights(left)))
    assert max(abs(a - b) for a, b in zip(weights(left), weights(right), strict=True)) <= 1e-12 * scale


@settings(deadline=None)
@given(
    lrs=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=2, max_size=20),
    policy=st.sampled_from([momentum.every_change(), momentum.threshold(1.0, 0.0)]),
)
def test_both_forms_agree_through_rate_zero(lrs, policy):
    ones = [1.0] * len(lrs)
    assert_close(weights(gradient_run(policy, lrs, ones)), weights(velocity_run(policy, lrs, ones)), 1e-10)


@settings(deadline=None)
@given(lrs=st.lists(st.floats(1e-8, 1e3), min_size=2, max_size=30))
def test_factors_telescope_under_free(lrs):
    factors = [momentum.free()(old, new) for old, new in itertools.pairwise(lrs)]
    assert math.prod(factors) == pytest.approx(lrs[-1] / lrs[0], rel=1e-12)


# apply


def two_groups(form=momentum.VelocitySGD, **options):
    first, second, frozen, untouched = (torch.nn.Parameter(torch.zeros(3)) for _ in range(4))
    optimizer = form(
        [{"params": [first, frozen], "lr": 0.1}, {"params": [second, untouched], "lr": 0.2}],
        lr=0.1,
        momentum=0.9,
        **options,
    )
    for param in (first, second, frozen):
        param.grad = torch.ones(3)
    optimizer.step()
    frozen.requires_grad_(False)
    return optimizer, first, second, frozen, untouched


def test_each_group_goes_by_its_own_ratio_and_only_trained_parameters_move():
    optimizer, first, second, frozen, untouched = two_groups()
    factors = momentum.apply(optimizer, momentum.free(), [0.1, 0.2], [0.05, 0.2])
    assert factors == [0.5, 1.0]
    state = optimizer.state
    torch.testing.assert_close(state[first]["momentum_buffer"], torch.full((3,), 0.05))
    torch.testing.assert_close(state[second]["momentum_buffer"], torch.full((3,), 0.2))
    torch.testing.assert_close(state[frozen]["momentum_buffer"], torch.full((3,), 0.1))
    assert untouched not in state


def test_gradient_form_gets_the_inverse_per_group():
    optimizer, first, second, *_ = two_groups(torch.optim.SGD)
    assert momentum.apply(optimizer, momentum.frozen(), [0.1, 0.2], [0.05, 0.8]) == [1.0, 1.0]
    assert optimizer.state[first]["momentum_buffer"].tolist() == [2.0] * 3
    assert optimizer.state[second]["momentum_buffer"].tolist() == [0.25] * 3


def test_apply_works_in_place_and_clears_overflowed_history():
    optimizer, first, *_ = two_groups()
    buffer = optimizer.state[first]["momentum_buffer"]
    buffer[0] = math.inf
    momentum.apply(optimizer, momentum.free(), [0.1, 0.2], [0.0, 0.0])
    assert optimizer.state[first]["momentum_buffer"] is buffer
    assert buffer.tolist() == [0.0, 0.0, 0.0]


def test_apply_before_the_first_update_and_without_momentum():
    weight = one_weight()
    for optimizer in (
        torch.optim.SGD([weight], lr=0.1, momentum=0.9),
        torch.optim.SGD([weight], lr=0.1),
        momentum.VelocitySGD([weight], lr=0.1, momentum=0.0),
    ):
        assert momentum.apply(optimizer, momentum.threshold(), [0.1], [1.0]) == [pytest.approx(10.0)]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        momentum.apply(optimizer, momentum.threshold(), [0.1], [1.0])


def test_apply_needs_one_rate_per_group():
    optimizer, *_ = two_groups()
    with pytest.raises(ValueError, match="expected 2 rates"):
        momentum.apply(optimizer, momentum.free(), [0.1], [0.1])


def test_refusal_leaves_everything_as_it_was():
    optimizer, first, second, *_ = two_groups(torch.optim.SGD)
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in (first, second)]
    with pytest.raises(SpecError):
        momentum.apply(optimizer, momentum.frozen(), [0.1, 0.2], [0.05, 0.0])
    for param, was in zip((first, second), before, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], was)


def test_any_callable_is_a_policy():
    optimizer, first, *_ = two_groups()
    assert momentum.apply(optimizer, lambda old, new: 0.25, [0.1, 0.2], [0.2, 0.2]) == [0.25, 0.25]
    torch.testing.assert_close(optimizer.state[first]["momentum_buffer"], torch.full((3,), 0.025))


def test_log_line_of_a_correction(caplog):
    optimizer, *_ = two_groups(torch.optim.SGD)
    with caplog.at_level(logging.INFO, logger="samestep.momentum"):
        momentum.apply(optimizer, momentum.threshold(), [0.02, 0.2], [0.002, 0.2])
        momentum.apply(optimizer, momentum.threshold(), [0.02, 0.2], [0.0201, 0.2])
        momentum.apply(optimizer, momentum.free(), [0.02, 0.2], [0.01, 0.2])
    assert [record.getMessage() for record in caplog.records] == [
        "momentum correction in param group 0: learning rate 0.02 -> 0.002, history x 0.100000009"
    ]
    assert caplog.records[0].levelno == logging.INFO


def test_rescale():
    optimizer, first, second, frozen, _ = two_groups()
    momentum.rescale(optimizer, 0.5)
    torch.testing.assert_close(optimizer.state[first]["momentum_buffer"], torch.full((3,), 0.05))
    torch.testing.assert_close(optimizer.state[second]["momentum_buffer"], torch.full((3,), 0.1))
    torch.testing.assert_close(optimizer.state[frozen]["momentum_buffer"], torch.full((3,), 0.1))
    for ratio in (-1.0, math.nan):
        with pytest.raises(ValueError, match="ratio"):
            momentum.rescale(optimizer, ratio)
    with pytest.raises(SpecError, match="cannot be rescaled"):
        momentum.rescale(torch.optim.Adam([one_weight()]), 0.5)


# Forms


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SGD", "gradient"),
        ("RMSprop", "gradient"),
        ("Adam", "statistics"),
        ("AdamW", "statistics"),
        ("Adamax", "statistics"),
        ("NAdam", "statistics"),
        ("RAdam", "statistics"),
        ("Adadelta", "statistics"),
        ("Adagrad", "statistics"),
        ("Adafactor", "statistics"),
        ("SparseAdam", "statistics"),
        ("LBFGS", "statistics"),
        ("ASGD", "statistics"),
        ("Rprop", "unsafe"),
    ],
)
def test_every_torch_optimizer_has_a_form(name, kind):
    assert momentum.form(getattr(torch.optim, name)([one_weight()], lr=0.1)).kind == kind


def test_no_torch_optimizer_is_forgotten():
    classes = {
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    } - {torch.optim.Optimizer}
    for optimizer_class in classes:
        optimizer = optimizer_class([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
        assert momentum.form(optimizer).kind in ("gradient", "statistics", "unsafe")


@pytest.mark.parametrize(
    ("build", "carried_over"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True), 1.0),
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1, maximize=True), 1.0),
        (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9), 1.0),
        (lambda p: torch.optim.Adam(p, lr=0.01), 1.0),
        (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0), 1.0),
        (lambda p: torch.optim.Adamax(p, lr=0.01), 1.0),
        (lambda p: torch.optim.NAdam(p, lr=0.01), 1.0),
        (lambda p: torch.optim.RAdam(p, lr=0.01), 1.0),
        (lambda p: torch.optim.Adadelta(p, lr=0.01), 1.0),
        (lambda p: torch.optim.Adagrad(p, lr=0.01), 1.0),
        (lambda p: torch.optim.Muon(p, lr=0.01, weight_decay=0.0), 1.0),
        (lambda p: torch.optim.ASGD(p, lr=0.01, lambd=0.0), 1.0),
        (lambda p: momentum.VelocitySGD(p, lr=0.01, momentum=0.9), 1.0),
    ],
)
@pytest.mark.parametrize("with_policy", [True, False])
def test_first_step_after_a_drop(build, carried_over, with_policy):
    """The table's test: 0.01 for 6 steps, then 0.001, against 0.001 all along; step divided by rate."""

    def step_over_rate(lrs):
        generator = torch.Generator().manual_seed(1)
        weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        optimizer, old = build([weight]), 0.01
        for lr in lrs:
            if with_policy:
                momentum.apply(optimizer, momentum.free(), [old], [lr])
            optimizer.param_groups[0]["lr"] = old = lr
            weight.grad = torch.randn(4, 4, generator=generator, dtype=torch.float64)
            before = weight.detach().clone()
            optimizer.step()
        return (weight.detach() - before) / old

    dropped, steady = step_over_rate([0.01] * 6 + [0.001]), step_over_rate([0.001] * 7)
    ratio = float(dropped.norm() / steady.norm())
    kind = momentum.form(build([torch.nn.Parameter(torch.zeros(4, 4))])).kind
    name = type(build([torch.nn.Parameter(torch.zeros(4, 4))])).__name__
    if with_policy or (kind != "velocity" and name != "ASGD"):
        assert ratio == pytest.approx(carried_over, rel=1e-3)
    else:
        assert ratio > 2.0  # the reason for correcting: the old rate is carried over


def test_asgd_follows_the_rate_at_once():
    weight = one_weight()
    optimizer = torch.optim.ASGD([weight], lr=0.1, lambd=0.0)
    steps, old = [], 0.1
    for lr in (0.1, 0.1, 0.1, 0.01, 0.01):
        momentum.apply(optimizer, momentum.free(), [old], [lr])
        optimizer.param_groups[0]["lr"] = old = lr
        weight.grad = torch.ones_like(weight)
        before = weight.item()
        optimizer.step()
        steps.append(before - weight.item())
    assert steps == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01], rel=1e-6)


def test_asgd_eta_has_its_own_decay():
    weight = one_weight()
    optimizer = torch.optim.ASGD([weight], lr=0.1, lambd=0.5, alpha=0.75)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    momentum.apply(optimizer, momentum.free(), [0.1], [0.02])
    expected = 0.02 / (1 + 0.5 * 0.02 * 3) ** 0.75
    assert optimizer.state[weight]["eta"].item() == pytest.approx(expected, rel=1e-6)


def foreign(package, name, **group):
    """An optimizer class that claims to be from another package, which is not imported."""

    def step(self):
        raise AssertionError("not called")

    cls = type(name, (torch.optim.Optimizer,), {"step": step, "__module__": f"{package}.optim.module"})
    return cls([one_weight()], {"lr": 0.1, **group})


@pytest.mark.parametrize(
    ("optimizer", "kind", "keys"),
    [
        (foreign("timm", "SGDW"), "gradient", {"momentum_buffer": 0}),
        (foreign("timm", "SGDP"), "gradient", {"momentum": 0}),
        (foreign("timm", "RMSpropTF", lr_in_momentum=True), "velocity", {"momentum_buffer": 1}),
        (foreign("timm", "RMSpropTF", lr_in_momentum=False), "gradient", {"momentum_buffer": 0}),
        (foreign("timm", "Lars", trust_clip=False), "gradient", {"momentum_buffer": 0}),
        (foreign("timm", "Lars", trust_clip=True), "unsafe", {}),
        (foreign("timm", "Adafactor", beta1=0.9), "velocity", {"exp_avg": 1}),
        (foreign("timm", "Adafactor", beta1=None), "statistics", {}),
        (foreign("transformers", "Adafactor", beta1=0.9), "velocity", {"exp_avg": 1}),
        (foreign("timm", "Lion"), "statistics", {}),
        (foreign("apex", "FusedSGD"), "gradient", {"momentum_buffer": 0}),
        (foreign("apex", "LARC"), "unsafe", {}),
        (foreign("fairseq", "NAG"), "gradient", {"momentum_buffer": 0}),
        (foreign("dadaptation", "DAdaptAdan"), "velocity", {"exp_avg": 1, "exp_avg_diff": 1}),
        (foreign("pytorch_optimizer", "DeMo"), "velocity", {"delta": 1}),
        (foreign("pytorch_optimizer", "MADGRAD"), "unsafe", {}),
        (foreign("prodigyopt", "Prodigy"), "unsafe", {}),
        (foreign("schedulefree", "AdamWScheduleFree"), "unsafe", {}),
        (foreign("pytorch_optimizer", "FTRL"), "unsafe", {}),
    ],
)
def test_foreign_optimizers_by_name(optimizer, kind, keys):
    form = momentum.form(optimizer)
    assert (form.kind, dict(form.buffers)) == (kind, keys)


def test_several_buffers_and_buffers_per_factor():
    optimizer = foreign("dadaptation", "DAdaptAdan")
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight] = {"exp_avg": torch.ones(1), "exp_avg_diff": torch.ones(1), "s": torch.ones(1)}
    momentum.apply(optimizer, momentum.free(), [0.1], [0.05])
    assert [optimizer.state[weight][key].item() for key in ("exp_avg", "exp_avg_diff", "s")] == [
        0.5,
        0.5,
        1.0,
    ]
    optimizer = foreign("pytorch_optimizer", "AggMo")
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.state[weight] = {"momentum_buffer": {0.0: torch.ones(1), 0.9: torch.ones(1)}}
    momentum.apply(optimizer, momentum.frozen(), [0.1], [0.05])
    assert [buffer.item() for buffer in optimizer.state[weight]["momentum_buffer"].values()] == [2.0, 2.0]


def test_unknown_class_says_how_to_register():
    with pytest.raises(SpecError, match=r"momentum\.register\(Mystery"):
        momentum.form(foreign("nowhere", "Mystery"))


def test_subclass_is_known_unless_it_steps_itself():
    class Named(torch.optim.SGD):
        pass

    class Other(torch.optim.SGD):
        def step(self, closure=None):
            return None

    for _ in range(2):  # torch wraps `step` on the first instance
        assert momentum.form(Named([one_weight()], lr=0.1)).kind == "gradient"
        with pytest.raises(SpecError, match="Other"):
            momentum.form(Other([one_weight()], lr=0.1))


def test_register():
    calls = []

    class Inverse(torch.optim.Optimizer):
        def step(self, closure=None):
            return None

    momentum.register(Inverse, {"over_lr": -1}, also=lambda *arguments: calls.append(arguments[1:]))
    weight = one_weight()
    optimizer = Inverse([weight], {"lr": 0.1})
    optimizer.state[weight]["over_lr"] = torch.ones(1)
    assert momentum.form(optimizer).kind == "velocity"
    # g / lr: to stay free of the rate it goes by old/new, the other way round.
    momentum.apply(optimizer, momentum.free(), [0.1], [0.05])
    assert optimizer.state[weight]["over_lr"].item() == pytest.approx(2.0)
    momentum.apply(optimizer, momentum.frozen(), [0.1], [0.05])
    assert optimizer.state[weight]["over_lr"].item() == pytest.approx(8.0)
    assert calls == [(0, 0.1, 0.05)] * 2
    momentum.register("elsewhere.Late", "unsafe", reason="it says so")
    assert momentum.form(foreign("elsewhere", "Late")).kind == "unsafe"


def test_register_refuses():
    with pytest.raises(ValueError, match="reason"):
        momentum.register(torch.optim.SGD, "unsafe")
    with pytest.raises(ValueError, match="reason"):
        momentum.register(torch.optim.SGD, {}, refuses="decay")
    with pytest.raises(ValueError, match="exponent"):
        momentum.register(torch.optim.SGD, {"momentum_buffer": 0.5})
    with pytest.raises(ValueError, match="buffers"):
        momentum.register(torch.optim.SGD, "safe")
    assert momentum.form(torch.optim.SGD([one_weight()], lr=0.1)).kind == "gradient"


def test_groups_of_two_forms():
    optimizer = foreign("timm", "RMSpropTF", lr_in_momentum=True)
    optimizer.add_param_group({"params": [one_weight()], "lr_in_momentum": False})
    with pytest.raises(SpecError, match="gradient"):
        momentum.form(optimizer)
    assert [momentum.group_form(optimizer, index).kind for index in (0, 1)] == ["velocity", "gradient"]


# Pairs that make no sense


def test_check_pair():
    weight = [one_weight()]
    momentum.check_pair(torch.optim.SGD(weight, lr=0.1), False)
    momentum.check_pair(torch.optim.Adam(weight, lr=0.1), False, policy=momentum.free())
    momentum.check_pair(torch.optim.Rprop(weight, lr=0.1), True)
    with pytest.raises(SpecError, match="schedule has no effect") as caught:
        momentum.check_pair(torch.optim.Rprop(weight, lr=0.1), False)
    assert caught.value.name == "Rprop"
    for package, name in [("schedulefree", "SGDScheduleFree"), ("prodigyopt", "Prodigy")]:
        optimizer = foreign(package, name)
        momentum.check_pair(optimizer, True)
        momentum.check_pair(optimizer, False, schedule_decays=False)
        for decays in (None, True):
            with pytest.raises(SpecError, match=name):
                momentum.check_pair(optimizer, False, schedule_decays=decays)
    with pytest.raises(SpecError, match="breaks it"):
        momentum.check_pair(foreign("pytorch_optimizer", "FTRL"), False, schedule_decays=False)


@pytest.mark.parametrize("policy", ALL_POLICIES[1:])
def test_policies_without_a_meaning_are_refused(policy):
    optimizer = torch.optim.Adam([one_weight()], lr=0.1)
    with pytest.raises(SpecError, match=r"free\(\)"):
        momentum.check_pair(optimizer, False, policy=policy)
    with pytest.raises(SpecError, match=r"free\(\)"):
        momentum.apply(optimizer, policy, [0.1], [0.01])
    assert momentum.apply(optimizer, momentum.free(), [0.1], [0.05]) == [0.5]


# VelocitySGD as an optimizer


@pytest.mark.parametrize("nesterov", [False, True])
def test_state_exchange_with_sgd_at_any_point(nesterov):
    generator = torch.Generator().manual_seed(2)
    gradients = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.01}

    def train(optimizer, weight, rows):
        for row in rows:
            weight.grad = row.clone()
            optimizer.step()

    whole = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    train(torch.optim.SGD([whole], lr=0.1, **options), whole, gradients)
    mixed = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([mixed], lr=0.1, **options)
    for index in range(0, 12, 3):
        train(optimizer, mixed, gradients[index : index + 3])
        is_sgd = isinstance(optimizer, torch.optim.SGD)
        optimizer = momentum.VelocitySGD.from_sgd(optimizer) if is_sgd else optimizer.to_sgd()
    torch.testing.assert_close(mixed, whole, rtol=1e-12, atol=1e-12)


def test_state_exchange_uses_each_groups_rate_and_keeps_settings():
    optimizer, first, second, *_ = two_groups(torch.optim.SGD)
    optimizer.param_groups[1]["weight_decay"] = 0.5
    velocity = momentum.VelocitySGD.from_sgd(optimizer)
    torch.testing.assert_close(velocity.state[first]["momentum_buffer"], torch.full((3,), 0.1))
    torch.testing.assert_close(velocity.state[second]["momentum_buffer"], torch.full((3,), 0.2))
    back = velocity.to_sgd()
    for ours, theirs in zip(back.param_groups, optimizer.param_groups, strict=True):
        for key in ("lr", "momentum", "weight_decay", "nesterov", "dampening"):
            assert ours[key] == theirs[key]
    torch.testing.assert_close(back.state[second]["momentum_buffer"], torch.ones(3))


@pytest.mark.parametrize("option", [{"dampening": 0.1}, {"maximize": True}, {"differentiable": True}])
def test_from_sgd_refuses_what_has_no_counterpart(option):
    with pytest.raises(SpecError) as caught:
        momentum.VelocitySGD.from_sgd(torch.optim.SGD([one_weight()], lr=0.1, momentum=0.9, **option))
    assert caught.value.name == next(iter(option))


def test_to_sgd_needs_a_rate():
    optimizer, *_ = two_groups()
    optimizer.param_groups[1]["lr"] = 0.0
    with pytest.raises(SpecError, match="param group 1"):
        optimizer.to_sgd()


def test_velocity_sgd_checks_its_numbers():
    for name, options in [
        ("lr", {"lr": -0.1}),
        ("lr", {"lr": math.nan}),
        ("weight_decay", {"weight_decay": math.inf}),
        ("momentum", {"momentum": 1.0}),
        ("nesterov", {"momentum": 0.0, "nesterov": True}),
    ]:
        with pytest.raises(ValueError, match=f"`{name}`"):
            momentum.VelocitySGD([one_weight()], **options)
    optimizer = momentum.VelocitySGD([one_weight()])
    with pytest.raises(ValueError, match="`lr`"):
        optimizer.add_param_group({"params": [one_weight()], "lr": -1.0})


def test_velocity_sgd_closure_missing_and_sparse_gradients():
    weight, unused = one_weight(1.0), one_weight(1.0)
    optimizer = momentum.VelocitySGD([weight, unused], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (weight.item(), unused.item()) == (0.0, 1.0)
    table = torch.nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(SpecError, match="sparse"):
        momentum.VelocitySGD(table.parameters()).step()


def test_velocity_sgd_leaves_gradients_alone_and_saves_its_state():
    weight = one_weight(1.0)
    optimizer = momentum.VelocitySGD([weight], lr=0.1, weight_decay=0.1, nesterov=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.grad.item() == 1.0
    twin = torch.nn.Parameter(weight.detach().clone())
    other = momentum.VelocitySGD([twin])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, each in ((weight, optimizer), (twin, other)):
        param.grad = torch.ones_like(param)
        each.step()
    assert torch.equal(weight, twin)
