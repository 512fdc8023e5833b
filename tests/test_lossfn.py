"""What a loss function returns is checked; shards are cut without losing a sample."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from samestep import lossfn
from samestep.errors import SpecError
from samestep.sharding import Shard


def shard(n: int) -> Shard:
    return Shard(0, torch.arange(n), {"x": torch.arange(2.0 * n).view(n, 2), "name": "train"})


@given(n=st.integers(1, 30), size=st.integers(1, 40))
def test_cutting_keeps_every_sample_in_order(n, size):
    pieces = list(lossfn.cut(shard(n), size))
    assert all(1 <= len(piece.sample_ids) <= size for piece in pieces)
    assert torch.equal(torch.cat([piece.batch["x"] for piece in pieces]), shard(n).batch["x"])
    assert torch.cat([piece.sample_ids for piece in pieces]).tolist() == list(range(n))
    assert {piece.batch["name"] for piece in pieces} == {"train"}


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(SpecError, match="micro_batch_size"):
        list(lossfn.cut((torch.zeros(2), torch.zeros(3)), 1))
    with pytest.raises(SpecError, match="micro_batch_size"):
        list(lossfn.cut("text", 1))


def test_figures_may_be_tensors_of_any_kind():
    model = nn.Linear(2, 1)
    found = lossfn.call(
        lambda m, s: (
            m(s.batch["x"]).sum().view(1),
            torch.tensor(3),
            {"right": torch.tensor([2], dtype=torch.int32)},
        ),
        model,
        shard(3),
    )
    assert (found.row.count, found.row.sums) == (3.0, {"right": 2.0})
    assert found.loss.shape == ()
