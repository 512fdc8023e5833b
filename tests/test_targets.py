"""Start values from data: against pooled float64 references, the same bits on any number of workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from samestep import launch, reduce, targets
from samestep.errors import SpecError
from samestep.group import Group
from samestep.pooling import Pool, alone


def _rows(n: int = 90) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, generator=generator) * torch.tensor([1e-3, 1.0, 5.0, 100.0]) + 50.0


def _model() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(4, 5)), nn.BatchNorm1d(5), nn.Tanh(), norm(nn.Linear(5, 3)))


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _everything(points: Tensor, batches: list[Tensor], pool: Pool) -> dict[str, Tensor]:
    running = targets.RunningNormalizer(4, pool)
    running.update(points)
    running.update(points * 2)
    code = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)) * 50
    state = targets.ema_update(targets.ema_start(code, points, pool), points + 1, pool, decay=0.5)
    found = {
        "normalizer": targets.normalizer(points, pool),
        "running": running.values(),
        "pca": targets.whitening(points, pool),
        "zca": targets.whitening(points, pool, kind="zca"),
        "act": targets.act_norm(points, pool),
        "ema": state,
        "restart": targets.restart_dead(state, points, pool, threshold=30.0),
        "bn": targets.batch_norm(_model(), batches, pool),
        "lsuv": targets.lsuv(_plain(), batches, pool),
        "wn": targets.weight_norm(_model(), batches, pool),
    }
    return {f"{kind}.{name}": value for kind, values in found.items() for name, value in values.items()}


def _split(world_size: int, rank: int) -> tuple[Tensor, list[Tensor]]:
    points, batches = _rows(), list(_rows().split([8, 2, 40, 40]))
    if world_size == 1:
        return points, batches
    if world_size == 2:
        return (points[:20], batches[:1]) if rank == 0 else (points[20:], batches[1:])
    empty: list[Tensor] = []
    return [(points[:61], batches[:3]), (points[:0], empty), (points[61:], batches[3:])][rank]


def _work(group: Group) -> tuple[dict[str, Tensor], list[str]]:
    pool, errors = reduce.pool(group), []
    found = _everything(*_split(group.world_size, group.rank), pool)
    bad = _rows(4)
    if group.rank == group.world_size - 1:
        bad[1, 2] = torch.nan
    dims = torch.zeros(3, 4 if group.rank == 0 else 5)
    for wrong in (bad, dims, torch.zeros(0, 4)):
        try:
            targets.normalizer(wrong, pool)
            errors.append("")
        except SpecError as error:
            errors.append(str(error))
    return found, errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_on_any_number_of_workers_and_one_error_for_all(world_size: int) -> None:
    expected = _everything(*_split(1, 0), alone)
    results = launch.run(_work, world_size, timeout_seconds=120)
    for found, errors in results:
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        assert errors == results[0][1]
        assert "not finite" in errors[0]
        assert str(world_size - 1) in errors[0]
        assert "dim" in errors[1]
        assert "at least one row" in errors[2]


def test_statistics_equal_float64() -> None:
    points = _rows().double()
    found = targets.normalizer(_rows())
    assert torch.equal(found["mean"], points.mean(0).float())
    torch.testing.assert_close(found["std"].double(), points.std(0, correction=0), rtol=1e-6, atol=0)
    running = targets.RunningNormalizer(4)
    for part in _rows().split(7):
        running.update(part)
    for name, value in running.values().items():
        torch.testing.assert_close(value, found[name], rtol=1e-6, atol=0)


def test_whitening_whitens() -> None:
    points = _rows(400).double() / torch.tensor([1e-3, 1.0, 5.0, 100.0])
    for kind in ("pca", "zca"):
        found = targets.whitening(points.float(), kind=kind, eps=1e-9)
        white = (points - found["mean"].double()) @ found["weight"].double().T
        torch.testing.assert_close(white.T @ white / 400, torch.eye(4).double(), rtol=0, atol=2e-3)
    torch.testing.assert_close(found["weight"], found["weight"].T)


def test_batch_norm_weighs_by_true_counts() -> None:
    batches = [torch.zeros(8, 1), torch.full((2, 1), 10.0)]  # data_parallel 45: batches of 8 and 2
    found = targets.batch_norm(nn.BatchNorm1d(1), batches)
    everything = torch.cat(batches)
    assert found["running_mean"].item() == 2.0
    assert found["running_var"].item() == pytest.approx(everything.var(0).item())


def test_layers_come_out_with_unit_variance() -> None:
    batches = list(_rows().split([8, 2, 40, 40]))
    model = _plain()
    model.load_state_dict({**model.state_dict(), **targets.lsuv(model, batches)})
    hidden = model[0](torch.cat(batches))
    for output in (hidden, model[2](hidden.tanh())):
        assert output.var(correction=0).item() == pytest.approx(1.0, abs=0.011)
    normed = _model().eval()
    normed.load_state_dict({**normed.state_dict(), **targets.weight_norm(normed, batches)})
    output = normed(torch.cat(batches)).double()
    torch.testing.assert_close(output.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(output.var(0, correction=0), torch.ones(3).double(), rtol=1e-3, atol=0)


def test_reported_inputs() -> None:
    # 39: ranks {0, 0} and {10, 10}
    found = targets.normalizer(torch.tensor([[0.0], [0.0], [10.0], [10.0]]))
    assert (found["mean"].item(), found["std"].item() ** 2) == (5.0, 25.0)
    # 3: code 0, decay 0.5, batches of ones and of threes
    state = targets.ema_start(torch.zeros(1, 1), torch.zeros(4, 1))
    assert targets.ema_update(state, torch.tensor([[1.0], [1.0], [3.0], [3.0]]), decay=0.5)["codebook"] == 1.0
    # 35: the sum belongs to the count
    state = targets.ema_start(torch.ones(1, 1), torch.ones(100, 1))
    assert targets.ema_update(state, torch.ones(100, 1), decay=0.8)["codebook"] == 1.0
    # 47: a revived code keeps its new value
    state = targets.ema_start(torch.tensor([[0.0], [50.0]]), torch.zeros(4, 1))
    state = targets.restart_dead(state, torch.full((2, 1), 7.0))
    assert targets.ema_update(state, torch.full((3, 1), 7.0))["codebook"][1].item() == pytest.approx(7.0)
    assert targets.ema_update(state, torch.zeros(3, 1))["codebook"][1].item() == 7.0
