"""How a model may be called under a `TrainStep`: wrapped, unwrapped, compiled; the gradient is the same mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.errors import SpecError
from samestep.group import Group
from samestep.sharding import Shard, shard_range
from samestep.step import TrainStep
from workers import state_digest

N_SHARDS = 4
MODES = ("fast", "exact")


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))


def shards(step: int, sizes: tuple[int, ...] = (4,) * N_SHARDS) -> list[Shard]:
    found = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(100 * step + index)
        x, y = torch.randn(size, 5, generator=generator), torch.randn(size, 3, generator=generator) + index
        found.append(Shard(index, torch.arange(size), (x, y)))
    return found


def mine(group: Group, found: list[Shard]) -> list[Shard]:
    block = shard_range(N_SHARDS, group.world_size, group.rank)
    return found[block.start : block.stop]


def squares(model: nn.Module, shard: Shard) -> tuple[Tensor, int]:
    x, y = shard.batch
    return (model(x) - y).square().sum(), len(x)


def error(model: nn.Module, step: int) -> float:
    """How far the gradient is from that of all samples at once, in float64, relative to its largest entry."""
    twin = net().double()
    everything = shards(step)
    total = sum((twin(s.batch[0].double()) - s.batch[1].double()).square().sum() for s in everything)
    (total / sum(len(s.batch[0]) for s in everything)).backward()
    pairs = list(zip(model.parameters(), twin.parameters()))
    largest = max(float(t.grad.abs().max()) for _, t in pairs)
    return max(float((p.grad.double() - t.grad).abs().max()) for p, t in pairs) / largest


def handed(group: Group) -> dict[str, Any]:
    """A model that comes in a DDP wrapper, called as it is handed over or by a name from outside."""
    found: dict[str, Any] = {}
    for mode in MODES:
        for way in ("handed", "unwrapped"):
            plain = net()
            wrapped = DistributedDataParallel(plain) if group.world_size > 1 else plain
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
            step = TrainStep(wrapped, optimizer, group=group, shards=N_SHARDS, mode=mode)

            def loss(model: nn.Module, shard: Shard, own: Any = plain, w: str = way) -> tuple[Tensor, int]:
                return squares(model if w == "handed" else own, shard)

            for i in range(3):
                step.train_step(mine(group, shards(i)), loss)
            found[f"{mode} {way}"] = error(plain, 2)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_way_of_calling_the_model_escapes_the_reduction(world_size):
    for found in launch.run(handed, world_size, timeout_seconds=120):
        assert max(found.values()) < 1e-6, found


class Spread(nn.Module):
    """Sums over the samples, so that a kernel's way of adding shows in the bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(5, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.first(x))
        return self.last(torch.softmax(h, 0) + h.std(0, keepdim=True) + h.mean(0, keepdim=True))


def compiled(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in MODES:
        plain = net()
        model = torch.compile(plain, backend="inductor")
        still = TrainStep(
            model, torch.optim.SGD(plain.parameters(), lr=0.0), group=group, shards=N_SHARDS, mode=mode
        )
        still.train_step(mine(group, shards(0)), squares)
        found[f"{mode} error"] = error(plain, 0)
    for dynamic in (None, True):
        plain = Spread()
        model = torch.compile(plain, backend="inductor", dynamic=dynamic)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        step = TrainStep(model, optimizer, group=group, shards=N_SHARDS, mode="exact")
        for i in range(3):
            step.train_step(mine(group, shards(i, (17, 200, 90, 300))), squares)
        found[f"digest {dynamic}"] = state_digest(plain, optimizer)
    return found


@pytest.mark.slow
def test_models_compiled_by_inductor():
    """Each worker meets other shapes in another order: a kernel that depends on those before it is found here."""
    runs = [launch.run(compiled, n, timeout_seconds=250) for n in (1, 2, 4)]
    for found in (result for run in runs for result in run):
        assert max(found[f"{mode} error"] for mode in MODES) < 1e-5
        assert found["digest None"] == runs[0][0]["digest None"]
        assert found["digest True"] == runs[0][0]["digest True"]


def many_shapes(group: Group) -> str:
    model = torch.compile(net(), backend="aot_eager")
    step = TrainStep(
        model, torch.optim.SGD(model.parameters(), lr=0.0), group=group, shards=N_SHARDS, mode="exact"
    )
    for i in range(3):
        step.train_step(mine(group, shards(i, tuple(range(2 + 4 * i, 6 + 4 * i)))), squares)
    return ""


def test_more_shapes_than_the_compiler_keeps_kernels_for_are_refused():
    with pytest.raises(SpecError, match=r"more than 8 shapes came\. Use torch\.compile\(dynamic=True\)"):
        launch.run(many_shapes, 1, timeout_seconds=120)
