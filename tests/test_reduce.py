"""Small sums and copies over workers: against a loop on one worker, for every dtype and shape."""

from __future__ import annotations

from functools import reduce as fold
from typing import Any

import pytest
import torch

from samestep import launch, reduce
from samestep.errors import SpecError
from samestep.group import Group
from workers import outcome

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.uint8]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator).abs() * 10.0**rank).to(dtype)


def sums(group: Group) -> list[str]:
    wrong = []
    for shape in ((), (5,), (2, 3), (0,)):
        for dtype in FLOATS + WHOLE:
            parts = [part(rank, shape, dtype) for rank in range(group.world_size)]
            mine = parts[group.rank]
            kept = mine.clone()
            right = {
                "sum": fold(torch.add, parts),
                "max": torch.stack(parts).amax(0) if mine.numel() else mine,
                "min": torch.stack(parts).amin(0) if mine.numel() else mine,
            }
            for op, value in right.items():
                if not torch.equal(reduce.reduce(mine, group, op), value):
                    wrong.append(f"{op} {shape} {dtype}")
            if not torch.equal(reduce.ordered_sum(mine, group), right["sum"]) or not torch.equal(mine, kept):
                wrong.append(f"ordered {shape} {dtype}")
    return wrong


def others(group: Group) -> dict[str, Any]:
    n, rank = group.world_size, group.rank
    weights = [3.0, 0.0, 1.0][:n]
    mean = reduce.weighted_mean(
        torch.tensor([float(rank), float("nan") if rank == 1 else 1.0]), weights[rank], group
    )
    pool = reduce.pool(group)
    tensor = torch.full((2, 3), float(rank)).t()  # not contiguous
    word = reduce.broadcast_object({"rank": rank}, group, n - 1)
    return {
        "mean": mean.tolist(),
        "right": [sum(r * w for r, w in enumerate(weights)) / sum(weights), 1.0],
        "offset": pool.offset(rank + 1) == sum(range(1, rank + 1)),
        "pool": float(pool(torch.tensor(1.5))) == 1.5 * n,
        "main": pool.is_main == (rank == 0),
        "refused": outcome(lambda: pool.agree(rank != n - 1, "no")),
        "weight": outcome(lambda: reduce.weighted_mean(torch.ones(1), -1.0 if rank == 0 else 1.0, group)),
        "no weight": outcome(lambda: reduce.weighted_mean(torch.ones(1), 0.0, group)),
        "broadcast": reduce.broadcast_tensor(tensor, group, n - 1).tolist() == [[n - 1.0] * 2] * 3,
        "flag": reduce.broadcast_tensor(torch.tensor(rank == 0), group).item(),
        "object": word,
        "parts": [int(p) for p in reduce.gather_parts(torch.tensor(rank), group)],
    }


def both(group: Group) -> Any:
    return sums(group), others(group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reductions(world_size):
    for wrong, found in launch.run(both, world_size, timeout_seconds=120):
        assert wrong == []
        assert found["mean"] == found["right"]
        assert all(found[name] for name in ("offset", "pool", "main", "broadcast", "flag"))
        for name in ("refused", "weight", "no weight"):
            assert found[name][0] == "SpecError"
        assert found["object"] == {"rank": world_size - 1}
        assert found["parts"] == list(range(world_size))


def test_unknown_operations_are_refused():
    with pytest.raises(ValueError, match="median"):
        reduce.reduce(torch.ones(1), Group.single(), "median")
    with pytest.raises(SpecError):
        reduce.weighted_mean(torch.ones(1), float("nan"), Group.single())
