"""The scheduler on its one clock: in loops, under AMP, after loading in any order, over several workers."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import launch, momentum
from samestep import schedules as S
from samestep.errors import AgreementError, SpecError
from samestep.scheduler import LRScheduler

# The first update in a process makes torch import its compiler, which sets an environment variable.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()

COMPOSITE = S.with_warmup(S.cosine(60, 0.1), S.linear_warmup(8, 0.1)).then(S.multistep([50, 90], 0.1), at=60)


def one_weight(value=0.0):
    return torch.nn.Parameter(torch.full((3,), value, dtype=torch.float64))


def sgd(*lrs, **settings):
    groups = [{"params": [one_weight()], "lr": lr} for lr in (lrs or (1.0,))]
    return torch.optim.SGD(groups, lr=1.0, **settings)


def update(optimizer, gradient=1.0):
    """One update; return the LR that it used, per param group."""
    used = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, gradient)
    optimizer.step()
    return used


def run(optimizer, n):
    return [update(optimizer)[0] for _ in range(n)]


def want(schedule, n, base=1.0, start=0):
    return [base * schedule(step) for step in range(start, start + n)]


# -- the clock


def test_the_first_update_already_has_the_right_lr():
    optimizer = sgd(0.5)
    LRScheduler(optimizer, S.constant(0.1))
    assert optimizer.param_groups[0]["lr"] == 0.05
    kept = sgd(1.0)
    scheduler = LRScheduler(kept, COMPOSITE)
    assert run(kept, 200) == want(COMPOSITE, 200)
    assert scheduler.applied_steps == scheduler.last_epoch == 200


@pytest.mark.parametrize("calls", [0, 1, 7])
def test_report_20_41_calls_of_step_change_nothing(calls):
    """Per micro-batch, per process, per update or never: one clock."""
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, S.linear(8))
    used = []
    for _ in range(4):
        used += update(optimizer)
        for _ in range(calls):
            scheduler.step()
    assert used == [1, 0.875, 0.75, 0.625]


def test_step_refuses_to_be_moved():
    with pytest.raises(ValueError, match="epoch"):
        LRScheduler(sgd(), S.linear(8)).step(3)


def test_accumulation_does_not_advance():
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, S.linear(8))
    weight = optimizer.param_groups[0]["params"][0]
    for micro_batch in range(16):
        (weight.sum() / 4).backward()
        if micro_batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    assert scheduler.applied_steps == 4
    assert scheduler.get_last_lr() == [0.5]


def test_report_19_a_skipped_update_does_not_advance():
    schedule = S.linear_warmup(4, convention="count_from_one")
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, schedule)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    attempts = []
    for attempt in range(5):
        weight = optimizer.param_groups[0]["params"][0]
        attempts.append(optimizer.param_groups[0]["lr"])
        scaler.scale(weight.sum() * (float("inf") if attempt == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    assert attempts == [0.25, 0.25, 0.5, 0.75, 1]


def test_a_fused_optimizer_that_skips_by_itself_does_not_advance():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([weight], lr=1.0, fused=True)
    scheduler = LRScheduler(optimizer, S.linear(8))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for attempt in range(3):
        scaler.scale(weight.sum() * (float("inf") if attempt == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[weight]["step"] == 2
    assert scheduler.applied_steps == 2


def test_an_update_that_raises_does_not_advance():
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, S.linear(8))

    def closure():
        raise RuntimeError("bad batch")

    with pytest.raises(RuntimeError, match="bad batch"):
        optimizer.step(closure)
    assert scheduler.applied_steps == 0


@pytest.mark.parametrize("schedule", [S.linear(8), S.linear_warmup(4)])
def test_torch_checkpoints_that_make_state_by_an_update_at_lr_0_are_no_update(schedule):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = LRScheduler(optimizer, schedule)
    state = get_optimizer_state_dict(model, optimizer)
    assert scheduler.applied_steps == 0
    assert optimizer.param_groups[0]["lr"] == schedule(0)
    update(optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    loaded = LRScheduler(other, schedule)
    loaded.load_state_dict(scheduler.state_dict())
    for parameter in model.parameters():
        parameter.grad = None
    set_optimizer_state_dict(model, other, state)
    assert loaded.applied_steps == 1
    assert other.param_groups[0]["lr"] == schedule(1)


def test_one_owner_of_the_lr():
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, S.linear(8))
    with pytest.raises(SpecError, match="detach"):
        LRScheduler(optimizer, S.linear(8))
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(SpecError, match=r"`lr` of param group 0: expected 1\.0 at step 0, got 0\.3"):
        update(optimizer)
    optimizer.param_groups[0]["lr"] = 1.0
    update(optimizer)
    scheduler.detach()
    optimizer.param_groups[0]["lr"] = 0.3
    assert update(optimizer) == [0.3]
    second = LRScheduler(optimizer, S.linear(8))
    assert second.get_last_lr() == [1.0]


def test_works_for_as_long_as_the_optimizer_lives():
    optimizer = sgd()
    LRScheduler(optimizer, S.linear(8))
    gc.collect()
    assert run(optimizer, 3) == [1, 0.875, 0.75]
    LRScheduler.following(optimizer).detach()
    assert LRScheduler.following(optimizer) is None
    assert LRScheduler(optimizer, S.linear(8)).get_last_lr() == [1.0]
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


def test_cannot_be_copied_silently():
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, S.linear(8))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(scheduler)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 1.0


def test_is_a_torch_scheduler():
    scheduler = LRScheduler(sgd(0.1, 0.2), S.constant(0.5))
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert scheduler.base_lrs == [0.1, 0.2]
    assert scheduler.get_last_lr() == scheduler.get_lr() == [0.05, 0.1]
    scheduler._step_count += 1  # as Accelerate does while it accumulates
    assert scheduler.get_last_lr() == [0.05, 0.1]


# -- param groups


def test_every_group_has_its_own_base():
    optimizer = sgd(0.5625, 0.75, 1.0)
    LRScheduler(optimizer, S.step(1, 0.5))
    assert update(optimizer) == [0.5625, 0.75, 1.0]
    assert update(optimizer) == [0.28125, 0.375, 0.5]


def test_report_14_groups_added_later():
    schedule = S.step(2, 0.1)
    optimizer = sgd(0.1)
    scheduler = LRScheduler(optimizer, schedule)
    update(optimizer)
    optimizer.add_param_group({"params": [one_weight()], "lr": 0.05})
    assert scheduler.get_last_lr() == [0.1, 0.05]
    update(optimizer)
    assert update(optimizer) == pytest.approx([0.01, 0.005], rel=1e-15)


def test_a_group_on_its_own_clock():
    optimizer = sgd(1.0)
    scheduler = LRScheduler(optimizer, S.linear_warmup(4).then(S.linear(8), at=4))
    for _ in range(5):
        update(optimizer)
    scheduler.add_param_group({"params": [one_weight()], "lr": 0.5}, start_step=5)
    assert [update(optimizer)[1] for _ in range(5)] == [0, 0.125, 0.25, 0.375, 0.5]
    state = json.loads(json.dumps(scheduler.state_dict()))
    again = LRScheduler(sgd(1.0, 0.5), scheduler.schedule)
    again.load_state_dict(state)
    assert again.get_last_lr() == scheduler.get_last_lr()
    with pytest.raises(ValueError, match="start_step"):
        scheduler.add_param_group({"params": [one_weight()], "lr": 0.5}, start_step=11)


def test_a_group_that_is_added_before_the_update_uses_its_lr_at_once():
    optimizer = sgd(1.0)
    scheduler = LRScheduler(optimizer, S.constant(0.5))
    optimizer.add_param_group({"params": [one_weight()], "lr": 1.0})
    update(optimizer)
    assert optimizer.param_groups[1]["params"][0].tolist() == [-0.5] * 3
    assert scheduler.base_lrs == [1.0, 1.0]


def test_tensor_lrs_are_filled_and_never_shared():
    shared = torch.tensor(1.0)
    groups = [{"params": [one_weight()], "lr": shared}, {"params": [one_weight()], "lr": shared}]
    optimizer = torch.optim.Adam(groups, foreach=False)
    scheduler = LRScheduler(optimizer, S.step(1, 0.5), base_lrs=[1.0, 0.5])
    mine = optimizer.param_groups[0]["lr"]
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is mine
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    assert scheduler.get_last_lr() == [0.5, 0.25]


# -- momentum


def uncorrected_buffer(read):
    """LR 0.1 three times, then 0.01: w of the velocity form when nobody corrects, and when everybody does."""
    optimizer, policy = read
    LRScheduler(optimizer, S.multistep([3], 0.1), momentum=policy)
    weight = optimizer.param_groups[0]["params"][0]
    trace = []
    for _ in range(6):
        update(optimizer)
        trace.append(weight[0].item())
    return trace


@pytest.mark.parametrize("policy", [momentum.frozen(), momentum.free(), momentum.threshold()])
def test_report_42_the_history_follows_the_recipe_in_both_forms(policy):
    plain = [-0.1, -0.29, -0.561, -0.8149, -1.05341, -1.278069]
    corrected = [-0.1, -0.29, -0.561, -0.59539, -0.636341, -0.6831969]
    expected = plain if policy == momentum.frozen() else corrected
    gradient_form = torch.optim.SGD([one_weight()], lr=0.1, momentum=0.9)
    velocity_form = momentum.VelocitySGD([one_weight()], lr=0.1, momentum=0.9)
    # Detectron's factor is the quotient of float32 LRs.
    close = 1e-7 if policy == momentum.threshold() else 1e-14
    for optimizer in (gradient_form, velocity_form):
        assert uncorrected_buffer((optimizer, policy)) == pytest.approx(expected, rel=close)


def test_preview_is_what_happens():
    schedule = S.multistep([30], 0.1) * S.constant_warmup(10, 0.1)
    optimizer = sgd(0.02, 0.04, momentum=0.9)
    scheduler = LRScheduler(optimizer, schedule, momentum=momentum.threshold())
    rows = scheduler.preview(40, batch_sizes=S.BatchSizes([4, 8], [20]))
    assert [row.lrs for row in rows] == [tuple(update(optimizer)) for _ in range(40)]
    changes = {row.step: row.momentum_factor for row in rows if row.momentum_factor != 1}
    assert {step: f"{factor:.9g}" for step, factor in changes.items()} == {
        10: "9.99999905",
        30: "0.100000009",
    }
    assert [rows[step].batch_size for step in (0, 19, 20)] == [4, 4, 8]
    assert scheduler.preview(40, start=30) == [row._replace(batch_size=None) for row in rows[30:]]
    assert scheduler.applied_steps == 40


def detectron(step):
    """Table D1's scale column: the policy over the schedule, fresh start."""
    schedule = S.multistep([60000, 80000], 0.1) * S.linear_warmup(500, 1 / 3)
    scheduler = LRScheduler(sgd(0.02), schedule, momentum=momentum.threshold())
    return scheduler.preview(step + 1, start=step)[0].momentum_factor


@pytest.mark.parametrize(
    ("step", "scale"),
    [
        (0, "1"),
        (1, "1"),
        (250, "1"),
        (500, "1"),
        (59999, "1"),
        (60000, "0.100000009"),
        (80000, "0.099999994"),
    ],
)
def test_table_d1_scale_column(step, scale):
    assert f"{detectron(step):.9g}" == scale


@pytest.mark.parametrize(
    ("total", "corrected"), [(1000, range(980, 1000)), (300, range(280, 300)), (90000, range(0))]
)
def test_table_d4_where_a_cosine_is_corrected(total, corrected):
    scheduler = LRScheduler(sgd(0.02), S.cosine(total), momentum=momentum.threshold())
    rows = scheduler.preview(total)
    assert [row.step for row in rows if row.momentum_factor != 1] == list(corrected)


def test_report_44_pairs_that_make_no_sense():
    rprop = torch.optim.Rprop([one_weight()], lr=0.1)
    with pytest.raises(SpecError, match="Rprop"):
        LRScheduler(rprop, S.linear(8))
    LRScheduler(rprop, S.constant(0.5))
    assert update(rprop) == [0.05]
    weight = one_weight()
    asgd = torch.optim.ASGD([weight], lr=0.1, lambd=0.0, alpha=0.0)
    LRScheduler(asgd, S.multistep([3], 0.1))
    moves, before = [], 0.0
    for _ in range(5):
        update(asgd)
        moves.append(before - weight[0].item())
        before = weight[0].item()
    assert moves == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01])
    unknown = type("Unknown", (torch.optim.Optimizer,), {"step": lambda self: None})
    with pytest.raises(SpecError, match="register"):
        LRScheduler(unknown([one_weight()], {"lr": 0.1}), S.linear(8))
    assert LRScheduler(unknown([one_weight()], {"lr": 0.1}), S.linear(8), momentum=None).momentum is None
    with pytest.raises(SpecError, match="momentum"):
        LRScheduler(torch.optim.Adam([one_weight()]), S.linear(8), momentum=momentum.frozen())


# -- resume


def make(policy, velocity=False):
    weight = one_weight(0.3)
    cls = momentum.VelocitySGD if velocity else torch.optim.SGD
    optimizer = cls([weight], lr=0.1, momentum=0.9, nesterov=True)
    return weight, optimizer, LRScheduler(optimizer, COMPOSITE, momentum=policy)


def drive(weight, optimizer, steps):
    trace = []
    for step in steps:
        update(optimizer, gradient=1.0 + step % 3)
        trace.append((weight[0].item(), optimizer.state[weight]["momentum_buffer"][0].item()))
    return trace


ORDERS = ["optimizer first", "scheduler first", "built last"]


@pytest.mark.parametrize("velocity", [False, True])
@pytest.mark.parametrize("policy", [momentum.free(), momentum.threshold()])
def test_resume_at_every_step_equals_the_uninterrupted_run(policy, velocity):
    weight, optimizer, scheduler = make(policy, velocity)
    states, trace = [], []
    for step in range(200):
        states.append(json.loads(json.dumps(scheduler.state_dict())))
        states[-1] = (weight.detach().clone(), copy.deepcopy(optimizer.state_dict()), states[-1])
        trace += drive(weight, optimizer, [step])
    for step in range(200):
        saved_weight, saved_optimizer, saved_scheduler = states[step]
        weight, optimizer, scheduler = make(policy, velocity)
        with torch.no_grad():
            weight.copy_(saved_weight)
        if step % 2:
            optimizer.load_state_dict(copy.deepcopy(saved_optimizer))
            scheduler.load_state_dict(saved_scheduler)
        else:
            scheduler.load_state_dict(saved_scheduler)
            optimizer.load_state_dict(copy.deepcopy(saved_optimizer))
        assert optimizer.param_groups[0]["lr"] == 0.1 * COMPOSITE(step)
        # Three updates show every way to go wrong at a boundary; the state after them is compared exactly.
        assert drive(weight, optimizer, range(step, min(200, step + 3))) == trace[step : step + 3]


@pytest.mark.parametrize("order", ORDERS)
def test_report_11_12_23_loading_order_does_not_matter(order):
    schedule = S.step(1, 0.9)
    first = sgd(0.1)
    scheduler = LRScheduler(first, schedule)
    run(first, 10)
    saved = copy.deepcopy(first.state_dict()), scheduler.state_dict()
    second = sgd(0.1)
    if order == "built last":
        second.load_state_dict(saved[0])
        loaded = LRScheduler(second, schedule)
        loaded.load_state_dict(saved[1])
    else:
        loaded = LRScheduler(second, schedule)
        for which in (0, 1) if order == "optimizer first" else (1, 0):
            (second if which == 0 else loaded).load_state_dict(saved[which])
    assert second.param_groups[0]["lr"] == pytest.approx(0.0348678, abs=1e-7)
    update(second)
    assert second.param_groups[0]["lr"] == pytest.approx(0.03138, abs=1e-5)


def test_report_12_15_loading_only_the_scheduler():
    optimizer = sgd(0.1)
    scheduler = LRScheduler(optimizer, S.step(1, 0.9))
    state = dict(scheduler.state_dict(), step=10)
    scheduler.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0348678, abs=1e-7)
    assert run(optimizer, 2)[1] == pytest.approx(0.03138, abs=1e-5)


def test_report_28_loading_sets_and_never_adds():
    schedule = S.with_warmup(S.cosine(90), S.linear_warmup(10), "prefix")
    optimizer = sgd()
    scheduler = LRScheduler(optimizer, schedule)
    run(optimizer, 40)
    state = scheduler.state_dict()
    for _ in range(3):
        scheduler.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75)


def test_report_22_another_world_size_changes_nothing():
    state = dict(LRScheduler(sgd(), S.linear_warmup(10)).state_dict(), step=5)
    optimizer = sgd()
    LRScheduler(optimizer, S.linear_warmup(10)).load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_table_d11_a_resume_on_a_boundary_is_corrected_like_the_run_that_went_on():
    schedule = S.multistep([3], 0.1)
    weight, optimizer, scheduler = make(momentum.threshold(), velocity=True)
    scheduler.detach()
    scheduler = LRScheduler(optimizer, schedule, momentum=momentum.threshold(), base_lrs=[0.02])
    run(optimizer, 3)
    before = optimizer.state[weight]["momentum_buffer"].clone()
    saved = copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()
    weight, other, built = make(momentum.threshold(), velocity=True)
    built.detach()
    again = LRScheduler(other, schedule, momentum=momentum.threshold(), base_lrs=[0.02])
    again.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    update(other, gradient=0.0)
    factor = other.state[weight]["momentum_buffer"][0] / (0.9 * before[0])
    assert f"{factor.item():.9g}" == "0.100000009"


def conflict(resume, schedule=None, base=0.05, step=10, **settings):
    saved = dict(LRScheduler(sgd(0.1), S.cosine(100), global_batch_size=256).state_dict(), step=step)
    optimizer = sgd(base)
    scheduler = LRScheduler(optimizer, schedule or S.cosine(100), resume=resume, **settings)
    scheduler.load_state_dict(saved)
    assert scheduler.applied_steps == scheduler.state_dict()["step"]
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    return scheduler


def test_report_13_27_29_what_counts_is_said_and_logged(caplog):
    caplog.set_level(logging.INFO, "samestep.scheduler")
    assert round(conflict("keep").get_last_lr()[0], 5) == 0.09755
    assert round(conflict("override").get_last_lr()[0], 5) == 0.04878
    assert len(caplog.records) == 2
    assert "step 10" in caplog.text
    assert "override" in caplog.text
    assert "0.05" in caplog.text
    with pytest.raises(SpecError, match=r"base_lrs.*0\.1.*0\.05"):
        conflict("must_match")
    decayed = S.cosine(100, 0.1)
    assert 6e-3 * conflict("override", decayed, 0.1, 50).get_last_lr()[0] == pytest.approx(3.3e-4)
    with pytest.raises(SpecError, match="schedule"):
        conflict("must_match", decayed, 0.1)
    assert conflict("keep", decayed, 0.1).schedule == S.cosine(100)
    with pytest.raises(SpecError, match="momentum"):
        conflict("must_match", base=0.1, momentum=momentum.threshold())


def test_report_26_rescale_from_the_stored_pair_any_number_of_times():
    for step, batch, converted in [(25025, 8192, 782), (5005, 8192, 156), (1000, 384, 666)]:
        scheduler = conflict("rescale", base=123.0, step=step, global_batch_size=batch)
        assert scheduler.applied_steps == converted
        assert scheduler.base_lrs == pytest.approx([0.1 * batch / 256])
        for _ in range(3):
            again = LRScheduler(sgd(1.0), S.cosine(100), resume="rescale", global_batch_size=batch)
            again.load_state_dict(scheduler.state_dict())
            assert again.base_lrs == scheduler.base_lrs
            assert again.applied_steps == converted
    trained = LRScheduler(sgd(0.1), S.constant(), global_batch_size=256)
    run(trained.optimizer, 4)
    bigger = LRScheduler(sgd(0.1), S.constant(), resume="rescale", global_batch_size=512)
    bigger.load_state_dict(trained.state_dict())
    assert bigger.state_dict()["history_lrs"] == [0.1]  # what the momentum history is still relative to
    scheduler = conflict("rescale", global_batch_size=1024, rescale_rule="sqrt")
    assert scheduler.base_lrs == [0.2]
    with pytest.raises(SpecError, match="global_batch_size"):
        conflict("rescale")


def test_an_override_is_a_change_of_lr_to_the_history():
    weight, optimizer, scheduler = make(momentum.free(), velocity=True)
    drive(weight, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()
    held = optimizer.state[weight]["momentum_buffer"].clone()
    old = 0.1 * COMPOSITE(4)
    for first in (0, 1):
        weight = one_weight()
        other = momentum.VelocitySGD([weight], lr=0.3, momentum=0.9)
        loaded = LRScheduler(other, S.constant(), resume="override")
        for which in (first, 1 - first):
            (other if which == 0 else loaded).load_state_dict(copy.deepcopy(saved[which]))
        assert other.param_groups[0]["lr"] == 0.3
        update(other, gradient=0.0)
        got = other.state[weight]["momentum_buffer"]
        torch.testing.assert_close(got, held * 0.9 * (0.3 / old), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda state: None, "state_dict"),
        (lambda state: {"last_epoch": 3}, "format_version"),
        (lambda state: state | {"step": -1}, "step"),
        (lambda state: state | {"step": 1.5}, "step"),
        (lambda state: state | {"base_lrs": [float("nan")]}, "base_lrs"),
        (lambda state: state | {"base_lrs": [0.1, 0.2]}, "base_lrs"),
        (lambda state: state | {"schedule": {"kind": "sine"}}, "kind"),
        (lambda state: state | {"momentum": {"policy": "always"}}, "policy"),
        (lambda state: {k: v for k, v in state.items() if k != "history_lrs"}, "history_lrs"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, part):
    optimizer = sgd(0.1)
    scheduler = LRScheduler(optimizer, S.linear(8))
    run(optimizer, 2)
    before = scheduler.state_dict()
    with pytest.raises(SpecError, match=part):
        scheduler.load_state_dict(change(dict(before)))
    assert scheduler.state_dict() == before


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 4))
def test_the_lr_series_survives_any_splitting_accumulation_and_skips(pieces, accumulate):
    schedule = S.linear_warmup(6).then(S.step(5, 0.5), at=6)
    state, used = None, []
    for piece in [*pieces, 3]:
        optimizer = sgd()
        scheduler = LRScheduler(optimizer, schedule)
        if state is not None:
            scheduler.load_state_dict(json.loads(json.dumps(state)))
        for micro_batch in range(piece * accumulate):
            if micro_batch % accumulate == accumulate - 1:
                used += update(optimizer)
            scheduler.step()
        state = scheduler.state_dict()
    assert used == want(schedule, sum(pieces) + 3)


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (TypeError, lambda: LRScheduler(None, S.linear(8))),
        (TypeError, lambda: LRScheduler(sgd(), lambda step: 1.0)),
        (TypeError, lambda: LRScheduler(sgd(), S.linear(8), momentum=lambda old, new: 1.0)),
        (SpecError, lambda: LRScheduler(sgd(), S.linear(8), resume="merge")),
        (SpecError, lambda: LRScheduler(sgd(), S.linear(8), base_lrs=[1.0, 2.0])),
        (SpecError, lambda: LRScheduler(sgd(), S.linear(8), base_lrs=[-1.0])),
        (SpecError, lambda: LRScheduler(sgd(), S.linear(8), rescale_rule="cubic")),
        (SpecError, lambda: LRScheduler(sgd(), S.linear(8), global_batch_size=0)),
    ],
)
def test_wrong_arguments(error, make):
    with pytest.raises(error, match="`"):
        make()


# -- several workers


def caught(make):
    try:
        make()
    except (AgreementError, SpecError) as error:
        return type(error).__name__, str(error)
    return "", ""


def work(group):
    found = {}
    optimizer = sgd(0.1)
    scheduler = LRScheduler(optimizer, S.linear(8), group=group)
    found["series"] = run(optimizer, 4)
    found["base"] = caught(lambda: LRScheduler(sgd(0.1 + group.rank), S.linear(8), group=group))
    found["schedule"] = caught(lambda: LRScheduler(sgd(0.1), S.linear(8 + group.rank), group=group))
    state = scheduler.state_dict()
    state["step"] = 4 + group.rank
    found["step"] = caught(lambda: scheduler.load_state_dict(state))
    damaged = {} if group.rank == 1 else state
    found["damaged"] = caught(lambda: scheduler.load_state_dict(damaged))
    found["wrong on one"] = caught(
        lambda: LRScheduler(sgd(0.1), S.linear(8), base_lrs=[0.1] * (1 + group.rank), group=group)
    )
    return found


def test_all_ranks_use_the_same_lr_or_none_goes_on():
    results = launch.run(work, 2)
    assert results[0] == results[1]
    assert results[0]["series"] == want(S.linear(8), 4, 0.1)
    for name in ("base", "schedule", "step"):
        assert results[0][name][0] == "AgreementError", name
        assert "rank 1" in results[0][name][1]
    for name in ("damaged", "wrong on one"):
        assert results[0][name][0] == "SpecError", name
        assert "rank 1" in results[0][name][1]
