"""The watch over a model's parameters: quiet where nothing changed, in words where something did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.watch import ModelWatch


def model() -> nn.Module:
    found = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    found[0].bias.requires_grad_(False)
    return found


def test_what_training_does_is_no_change():
    net = model()
    watch = ModelWatch(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    net.load_state_dict(model().state_dict())
    net.eval()
    net.register_buffer("cache", torch.zeros(1))
    assert watch.change() == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[0].weight.requires_grad_(False), "`0.weight` was frozen"),
        (lambda m: m[0].bias.requires_grad_(True), "`0.bias` was unfrozen"),
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 2))), "`0.weight` was replaced"),
        (lambda m: setattr(m[2], "bias", nn.Parameter(torch.zeros(1))), "`2.bias` was added"),
        (lambda m: setattr(m[0], "extra", nn.Parameter(torch.zeros(1))), "of `0` was added or removed"),
        (lambda m: m.append(nn.ReLU()), "the model"),
        (lambda m: m.__setitem__(1, nn.BatchNorm1d(3)), "replaced"),
        (lambda m: m.to(torch.float64), "moved from torch.float32"),
    ],
)
def test_changes_are_named(change, words):
    net = model()
    watch = ModelWatch(net)
    change(net)
    assert words in watch.change()
