"""The way by gradient: where it lands, and what it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from samestep import start
from samestep.errors import ReplicaMismatchError, SpecError
from samestep.group import Group
from start_cases import CASES, WORLD_SIZES, attempt, case, is_last, launched, same_error, seeded, wrapped


@pytest.fixture(scope="module", params=WORLD_SIZES)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launched(request.param)


# ---- the way by gradient ----


@case
def by_gradient(group: Group) -> Any:
    found = []
    for value in (0.0, 0.25, -3.0, None):
        layer = start.mark(nn.Linear(20, 30))
        with torch.no_grad():
            layer.weight.copy_(seeded((30, 20), 5)) if value is None else layer.weight.fill_(value)
            layer.bias.fill_(7.0)
        ran = start.initialize(layer, lambda layer: {"weight": seeded((30, 20), 1)}, group, by="gradient")
        found.append(
            (ran, layer.weight.detach(), layer.bias.detach(), layer.weight.grad, layer.initialized.item())
        )
    return found


def test_the_way_by_gradient_lands_on_the_target_from_any_start(ranks: list[dict[str, Any]]) -> None:
    target = seeded((30, 20), 1)
    for result in ranks:
        for (ran, weight, bias, grad, mark), first in zip(result["by_gradient"], ranks[0]["by_gradient"]):
            assert ran
            assert mark == 1
            assert grad is None
            assert torch.equal(weight, first[1])
            torch.testing.assert_close(weight, target, rtol=0, atol=2e-6)  # p - (p - t) rounds twice
            assert torch.equal(bias, torch.full((30,), 7.0))
        if len(ranks) in (1, 2, 4):
            assert torch.equal(result["by_gradient"][0][1], target)


def ddp_step(
    group: Group,
    start_value: float = 0.0,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.5,
    n_backwards: int = 1,
    scale: float = 1.0,
    clip_norm: float | None = None,
    hook: Any = None,
    dtype: torch.dtype = torch.float32,
    target: tuple[float, float] = (3.0, 4.0),
    **options: Any,
) -> Any:
    """Take the seed's step through DDP's own mean, with what a training loop may do to it."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 3)).to(dtype)
    with torch.no_grad():
        inner[0].weight.fill_(start_value)
    before = {name: p.detach().clone() for name, p in inner.named_parameters()}
    goal = {"0.weight": torch.tensor([target])} if group.rank == 0 else None

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self) -> Tensor:
            return start.initialization_loss(self.inner, goal, group)

    model = wrapped(Loss(), group)
    if hook is not None and group.world_size > 1:
        model.register_comm_hook(None, hook)
    optimizer = make(model.parameters(), lr=lr, **options)
    check = attempt(
        lambda: start.check_gradient_way(
            model,
            optimizer,
            group,
            clip_norm=clip_norm,
            n_accumulated=n_backwards,
            scaler=torch.amp.GradScaler("cpu") if scale > 2 else None,
        )
    )
    for _ in range(n_backwards):
        (model() * scale).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    landed = attempt(lambda: start.check_landed(inner, goal, before, group))
    others = all(torch.equal(p, before[name]) for name, p in inner.named_parameters() if name != "0.weight")
    return check, landed, inner[0].weight.detach().flatten().tolist(), others


# Rows of the table of what breaks the trick: arguments, where the step ends, what the check says before, and after.
ROWS: dict[str, tuple[dict[str, Any], tuple[float, float], str, str]] = {
    "as_designed": ({}, (3, 4), "", ""),
    "nonzero_start": ({"start_value": 0.25}, (3, 4), "", ""),
    "mean": ({"scale": 0.5}, (1.5, 2), "", "0.5 of the way: the loss was averaged"),
    "lr": ({"lr": 0.1}, (0.6, 0.8), "expected lr=0.5, got 0.1", "0.2 of the way"),
    "adam": ({"make": torch.optim.Adam}, (0.5, 0.5), "got Adam", "of the way"),
    "nesterov": ({"momentum": 0.9, "nesterov": True}, (5.7, 7.6), "momentum=0, got 0.9", "1.9 of the way"),
    "clipped": ({"clip_norm": 1.0}, (0.3, 0.4), "`clip_norm`", "of the way"),
    "accumulated": ({"n_backwards": 2}, (6, 8), "`n_accumulated`", "2 of the way: the loss was scaled, or"),
    "scaled": (
        {"scale": 65536.0},
        (3 * 65536, 4 * 65536),
        "`scaler`",
        "65536 of the way: the loss was scaled",
    ),
    "decay": ({"weight_decay": 0.1}, (3, 4), "weight_decay=0", ""),
    "bf16": ({"dtype": torch.bfloat16}, (3, 4), "", ""),
}
for label, (options, _, _, _) in ROWS.items():
    CASES[f"row_{label}"] = lambda group, options=options: ddp_step(group, **options)


@pytest.mark.parametrize("label", ROWS)
def test_what_breaks_the_step_is_refused_before_and_found_after(
    ranks: list[dict[str, Any]], label: str
) -> None:
    _, where, before, after = ROWS[label]
    for result in ranks:
        check, landed, got, others = result[f"row_{label}"]
        assert check == ranks[0][f"row_{label}"][0]
        assert landed == ranks[0][f"row_{label}"][1]
        assert got == pytest.approx(where, rel=0.01 if label == "bf16" else 1e-5)
        assert others or label == "decay"
        assert (before in check.message) if before else check is None
        assert (after in landed.message) if after else landed is None


@case
def hooked(group: Group) -> Any:
    return [
        ddp_step(group, hook=fp16_compress_hook, target=target) for target in ((1.001, 3.0007), (1.0, 3e4))
    ]


def test_compression_hooks_are_refused_and_their_rounding_and_overflow_found(
    ranks: list[dict[str, Any]],
) -> None:
    if len(ranks) > 1:
        for result in ranks:
            (check, rounded, _, _), (_, overflowed, _, _) = result["hooked"]
            assert "fp16_compress_hook" in check.message
            assert "elements off" in rounded.message
            assert "range of its dtype" in overflowed.message


@case
def under_no_sync(group: Group) -> None:
    model = wrapped(nn.Linear(2, 1), group)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with model.no_sync() if group.world_size > 1 else contextlib.nullcontext():
        start.check_gradient_way(model, sgd, group)


def test_a_step_under_no_sync_is_refused(ranks: list[dict[str, Any]]) -> None:
    if len(ranks) > 1:
        same_error(ranks, "under_no_sync", SpecError, "no_sync")


@case
def leftover_gradient(group: Group) -> None:
    layer = start.mark(nn.Linear(2, 1))
    layer.bias.grad = torch.ones(1)
    start.initialize(layer, lambda layer: {"weight": torch.ones(1, 2)}, group, by="gradient")


@case
def gradient_to_buffer(group: Group) -> None:
    layer = start.mark(nn.BatchNorm1d(2))
    start.initialize(layer, lambda layer: {"running_mean": torch.ones(2)}, group, by="gradient")


@case
def gradient_by_adam(group: Group) -> None:
    layer = start.mark(nn.Linear(2, 1))
    adam = torch.optim.Adam(layer.parameters(), lr=0.5)
    start.initialize(layer, lambda layer: {"weight": torch.ones(1, 2)}, group, by="gradient", optimizer=adam)


@case
def gradient_with_foreign_optimizer(group: Group) -> None:
    layer = start.mark(nn.Linear(2, 1))
    nn.init.zeros_(layer.weight)
    sgd = torch.optim.SGD([layer.bias], lr=0.5)
    start.initialize(layer, lambda layer: {"weight": torch.ones(1, 2)}, group, by="gradient", optimizer=sgd)


@case
def gradient_out_of_range(group: Group) -> None:
    layer = start.mark(nn.Linear(2, 1, bias=False).half())
    nn.init.zeros_(layer.weight)
    start.initialize(layer, lambda layer: {"weight": torch.full((1, 2), 5e4)}, group, by="gradient")


@case
def gradient_from_replicas_that_differ(group: Group) -> None:
    layer = start.mark(nn.Linear(2, 1))
    nn.init.constant_(layer.weight, float(is_last(group)))
    start.initialize(layer, lambda layer: {"weight": torch.ones(1, 2)}, group, by="gradient")


@case
def unknown_way(group: Group) -> None:
    start.initialize(start.mark(nn.Linear(2, 1)), lambda layer: {}, group, by="magic")


def test_the_way_by_gradient_says_what_it_cannot_do(ranks: list[dict[str, Any]]) -> None:
    same_error(ranks, "leftover_gradient", SpecError, "`bias`", "zero_grad")
    same_error(ranks, "gradient_to_buffer", SpecError, "`running_mean`", "a buffer")
    same_error(ranks, "gradient_by_adam", SpecError, "Adam")
    same_error(ranks, "gradient_with_foreign_optimizer", SpecError, "does not hold it")
    same_error(ranks, "gradient_out_of_range", SpecError, "range of its dtype")
    same_error(ranks, "unknown_way", SpecError, "`by`")
    if len(ranks) > 1:
        same_error(
            ranks, "gradient_from_replicas_that_differ", ReplicaMismatchError, "start.broadcast before"
        )
