"""What the originals document, run: their way beside ours, on two and three real workers."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep import hooks, launch, momentum, schedules, start
from samestep.errors import AgreementError
from samestep.momentum import VelocitySGD
from samestep.scheduler import LRScheduler

ROOT = Path(__file__).parents[1]
TARGET = torch.tensor([[3.0, 4.0]])


def seed_step(group, before):
    """The first seed as it is documented, then ours: where a step from `before` lands."""
    landed = []
    for ours in (False, True):
        layer = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(before)
        ddp = DistributedDataParallel(layer)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        if ours:
            loss = start.initialization_loss(ddp, {"weight": TARGET} if group.is_main else None, group)
            loss = loss + 0.0 * ddp(torch.zeros(1, 2)).sum()  # DDP reduces what its forward has seen
        else:
            aim = TARGET if group.is_main else torch.zeros(1, 2)
            loss = group.world_size * (ddp(torch.eye(2)).T - aim).square().sum()
        loss.backward()
        optimizer.step()
        landed.append(layer.weight.detach().flatten().tolist())
    return landed


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_first_seeds_step_lands_where_its_documentation_says_from_zero_alone(world_size):
    for before in (0.0, 0.25):
        for original, ours in launch.run(seed_step, world_size, before):
            missed = [value - (world_size - 1) * before for value in (3.0, 4.0)]
            assert original == pytest.approx(missed, rel=1e-6)
            assert ours == pytest.approx([3.0, 4.0], rel=1e-6)


def broadcast_unlike(group):
    """As many parameters on every rank, but not the same ones."""
    wide = group.rank == 1
    model = nn.Sequential(nn.Linear(2, 3 if wide else 4), nn.Linear(3 if wide else 4, 1))
    n_parameters = len(list(model.parameters()))
    with pytest.raises(AgreementError) as caught:
        start.broadcast(model, group=group)
    return n_parameters, caught.value.name, str(caught.value)


def test_the_count_that_the_originals_check_is_not_enough():
    first, second = launch.run(broadcast_unlike, 2)
    assert first == second  # the same number of parameters, and the same error
    assert "0.weight" in first[2]


def uneven_mean(group):
    """Rank 0 holds one sample, rank 1 three: the gradient under DDP's own mean, and under ours."""
    samples = torch.tensor([[4.0], [1.0], [2.0], [1.0]])
    mine = samples[:1] if group.is_main else samples[1:]
    means = []
    for weighted in (False, True):
        layer = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(layer)
        loss = ddp(mine).mean()
        if weighted:
            loss = hooks.register(ddp, hooks.weighted_mean, group).weigh(loss, len(mine))
        loss.backward()
        means.append(layer.weight.grad.item())
    return means


def test_the_mean_over_devices_is_not_the_mean_over_samples():
    for of_means, of_samples in launch.run(uneven_mean, 2):
        assert of_means == pytest.approx((4.0 + 4.0 / 3.0) / 2.0)
        assert of_samples == pytest.approx(2.0)


def transport(group):
    return str(torch.distributed.get_backend(group.process_group)), group.device.type


def test_the_transport_follows_the_device():
    assert launch.run(transport, 2) == [("gloo", "cpu")] * 2


@pytest.mark.gpu
def test_cuda_tensors_travel_by_nccl_and_cpu_tensors_by_gloo():
    (backend, device), *_ = launch.run(transport, torch.cuda.device_count(), device="cuda")
    assert device == "cuda"
    assert "nccl" in backend


def change_pace(group):
    """Constant gradient 1 at rate 0.1, then 0.01: rates, histories and weights at each update, by two policies."""
    told = {}
    for name, policy in (("corrected", momentum.threshold(1.1)), ("uncorrected", momentum.frozen())):
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(layer.weight)
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        optimizer = VelocitySGD([layer.weight, frozen], lr=0.1, momentum=0.9)
        LRScheduler(optimizer, schedules.multistep([3], 0.1), momentum=policy, group=group)
        rows = []
        for _ in range(6):
            rate = optimizer.param_groups[0]["lr"]
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
            history = next(iter(optimizer.state[layer.weight].values())).item()
            rows.append((rate, history, layer.weight.item()))
        told[name] = rows
    return told


def test_all_replicas_change_pace_before_the_same_update():
    first, second = launch.run(change_pace, 2)
    assert first == second  # the same bits on both replicas, scaled once each
    expected = {
        "corrected": ([0.1, 0.19, 0.271, 0.03439, 0.040951, 0.0468559], -0.6831969),
        "uncorrected": ([0.1, 0.19, 0.271, 0.2539, 0.23851, 0.224659], -1.278069),
    }
    for name, (histories, weight) in expected.items():
        rates, found, weights = zip(*first[name], strict=True)
        assert rates == pytest.approx([0.1] * 3 + [0.01] * 3)
        assert found == pytest.approx(histories)
        assert weights[-1] == pytest.approx(weight)


def test_every_row_of_the_page_names_tests_that_exist():
    text = (ROOT / "docs" / "lineage.md").read_text()
    named = re.findall(r"`(test_\w+)::(test_\w+)`", text)
    assert len(named) > 20
    for file, function in named:
        assert f"def {function}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file} lacks {function}"
    for row in text.split("\n### ")[1:]:
        assert all(part in row for part in ("*Original.*", "*Defects.*", "*Here.*", "*Tests.*"))
