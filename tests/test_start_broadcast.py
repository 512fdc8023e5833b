"""Replicas that start together: what a broadcast carries, refuses and proves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samestep import bulk, fingerprint, start
from samestep.errors import AgreementError, ReplicaMismatchError, SpecError
from samestep.group import Group
from samestep.start import _broadcast
from start_cases import CASES, WORLD_SIZES, case, chain, is_last, launched, same_error, values


@pytest.fixture(scope="module", params=WORLD_SIZES)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launched(request.param)


class Zoo(nn.Module):
    """Every kind of tensor that a module may hold."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
        self.plain = nn.Parameter(randn(7, 5))
        self.frozen = nn.Parameter(randn(3), requires_grad=False)
        self.short = nn.Parameter(randn(9).half())
        self.brain = nn.Parameter(randn(2, 3).bfloat16())
        self.wide = nn.Parameter(randn(4).double())
        self.phase = nn.Parameter(torch.complex(randn(3), randn(3)))
        self.empty = nn.Parameter(randn(0, 4))
        self.scalar = nn.Parameter(randn(()))
        self.turned = nn.Parameter(randn(6, 4).t())
        images = randn(2, 3, 4, 4)
        # The memory format may differ between workers; the values may not.
        layout = torch.channels_last if seed % 2 else torch.contiguous_format
        self.images = nn.Parameter(images.to(memory_format=layout))
        self.tied = self.plain
        self.alias = nn.Parameter(randn(7, 5))
        self.alias.data = self.plain.data
        self.register_buffer("flags", randn(11) > 0)
        self.register_buffer("counts", (1000 * randn(5)).long())
        self.register_buffer("bytes", (10 * randn(5)).abs().to(torch.uint8))
        self.register_buffer("hidden", randn(3), persistent=False)
        self.register_buffer("spread", randn(3, 1).expand(3, 8))
        self.register_buffer("mirror", torch.complex(randn(3), randn(3)).conj())
        odd = torch.tensor([float("nan"), -0.0, 0.0, float("inf")])
        self.register_buffer("odd", odd.roll(seed))
        self.big = nn.Parameter(randn(70, 1000))
        self.big_turned = nn.Parameter(randn(70, 1000).t())


def build_zoo(group: Group, source_rank: int) -> dict[str, Any]:
    zoo = Zoo(group.rank)
    calls: list[int] = []
    zoo.plain.register_hook(lambda grad: calls.append(1))
    ids = [id(p) for p in zoo.parameters()]
    start.broadcast(zoo, group=group, source_rank=source_rank)
    (zoo.plain.sum() + zoo.images.sum()).backward()
    return {
        "values": values(zoo),
        "requires_grad": [p.requires_grad for p in zoo.parameters()],
        "same_objects": ids == [id(p) for p in zoo.parameters()],
        "tied": zoo.tied is zoo.plain and zoo.alias.data_ptr() == zoo.plain.data_ptr(),
        "hook_calls": len(calls),
    }


@case
def zoo_from_first(group: Group) -> Any:
    return build_zoo(group, 0)


@case
def zoo_from_last(group: Group) -> Any:
    return build_zoo(group, group.world_size - 1)


@case
def zoo_in_small_parcels(group: Group) -> Any:
    sizes = bulk._PIECE_BYTES, bulk._SMALL_BYTES, bulk._PARCEL_BYTES, bulk._FLIGHTS
    bulk._PIECE_BYTES, bulk._SMALL_BYTES, bulk._PARCEL_BYTES, bulk._FLIGHTS = 5000, 300, 700, 3
    try:
        return build_zoo(group, 0)
    finally:
        bulk._PIECE_BYTES, bulk._SMALL_BYTES, bulk._PARCEL_BYTES, bulk._FLIGHTS = sizes


@pytest.mark.parametrize("name", ["zoo_from_first", "zoo_from_last", "zoo_in_small_parcels"])
def test_a_broadcast_carries_every_kind_of_tensor_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    source = len(ranks) - 1 if name == "zoo_from_last" else 0
    expected = values(Zoo(source))
    for result in ranks:
        found = result[name]
        assert found["values"] == expected
        assert found["requires_grad"] == [p.requires_grad for p in Zoo(0).parameters()]
        assert found["same_objects"]
        assert found["tied"]
        assert found["hook_calls"] == 1


def test_words_taken_while_tensors_land_are_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_broadcast, "_HASHED_BYTES", 100)
    named = {f"t{i}": torch.randn(i * 7, generator=torch.Generator().manual_seed(i)) for i in range(9)}
    words = _broadcast._Words(list(named.items()))
    for number in (3, 1, 0, 2, 8, 10, 7, 4, 6, 9, 5):  # two that are not of this state
        words.landed(number)
    assert words.total == fingerprint.word(named)


@case
def told_once_when_whole(group: Group) -> Any:
    tensors = [torch.full((n,), float(group.rank)) for n in (0, 3, 3000, 40, 0, 2000)]
    told: list[tuple[int, bool]] = []
    pieces = bulk._PIECE_BYTES, bulk._SMALL_BYTES
    bulk._PIECE_BYTES, bulk._SMALL_BYTES = 5000, 300
    try:
        bulk.broadcast_tensors(tensors, group, 0, lambda i: told.append((i, bool((tensors[i] == 0).all()))))
    finally:
        bulk._PIECE_BYTES, bulk._SMALL_BYTES = pieces
    return sorted(told)


def test_each_tensor_is_told_of_once_and_whole(ranks: list[dict[str, Any]]) -> None:
    assert all(result["told_once_when_whole"] == [(i, True) for i in range(6)] for result in ranks)


class BuffersOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 3))


@case
def buffers_only(group: Group) -> Any:
    torch.manual_seed(group.rank)
    module = BuffersOnly()
    start.broadcast(module, group=group)
    return module.table


def test_a_module_without_parameters_starts_together(ranks: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    expected = torch.randn(4, 3)
    assert all(torch.equal(result["buffers_only"], expected) for result in ranks)


# ---- structures that differ ----


def mismatch(build: Callable[[bool], tuple[Any, ...]]) -> Callable[[Group], Any]:
    def run(group: Group) -> Any:
        torch.manual_seed(group.rank)
        things = build(is_last(group))
        before = [values(thing) for thing in things if isinstance(thing, nn.Module)]
        try:
            start.broadcast(*things, group=group)
        finally:
            assert before == [values(thing) for thing in things if isinstance(thing, nn.Module)]

    return run


def tied_chain(tied: bool) -> nn.Module:
    model = chain(3, 3, 3)
    if tied:
        model[1].weight = model[0].weight
    return model


def with_optimizer(kind: type[torch.optim.Optimizer], n_groups: int = 1) -> tuple[Any, ...]:
    model = chain(2, 2)
    groups = (
        [{"params": list(model.parameters())}]
        if n_groups == 1
        else [{"params": [p]} for p in model.parameters()]
    )
    return model, kind(groups, lr=0.1)


def reordered(turned: bool) -> tuple[Any, ...]:
    model = chain(2, 2, 2)
    parameters = list(model.parameters())
    return model, torch.optim.SGD(parameters[::-1] if turned else parameters, lr=0.1)


MISMATCHES: dict[str, tuple[Callable[[bool], tuple[Any, ...]], str]] = {
    "layer": (lambda last: (chain(3, 4, 4) if last else chain(3, 4),), "1.weight"),
    "shape": (lambda last: (chain(3, 5 if last else 4),), "0.weight"),
    "dtype": (lambda last: (chain(3, 4).double() if last else chain(3, 4),), "0.weight"),
    "kind": (lambda last: (nn.BatchNorm1d(4, affine=not last),), "weight"),
    "tie": (lambda last: (tied_chain(last),), "1.weight"),
    "optimizer": (lambda last: with_optimizer(torch.optim.Adam if last else torch.optim.SGD), "things[1]"),
    "groups": (lambda last: with_optimizer(torch.optim.SGD, 2 if last else 1), "things[1]"),
    "order": (reordered, "things[1].options.0.params.0"),
    "number": (lambda last: (chain(2, 2),) * (2 if last else 1), "things"),
}
for label, (build, _) in MISMATCHES.items():
    CASES[f"mismatch_{label}"] = mismatch(build)


@case
def mismatch_source(group: Group) -> None:
    start.broadcast(chain(2, 2), group=group, source_rank=int(is_last(group) and group.world_size > 1))


@pytest.mark.parametrize("label", [*MISMATCHES, "source"])
def test_structures_that_differ_are_refused_everywhere_alike(ranks: list[dict[str, Any]], label: str) -> None:
    if len(ranks) == 1:
        assert ranks[0][f"mismatch_{label}"] is None
        return
    last = len(ranks) - 1
    error = same_error(ranks, f"mismatch_{label}", AgreementError, f"rank {last} of {last + 1}: ")
    assert error.name == ("source_rank" if label == "source" else MISMATCHES[label][1])
    assert error.rank == last
    others = "rank 0 of 2" if last == 1 else f"ranks {', '.join(map(str, range(last)))} of {last + 1}"
    assert f"{others}: " in error.message


@case
def not_a_thing(group: Group) -> None:
    start.broadcast(torch.zeros(3), group=group)


@case
def sparse_buffer(group: Group) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("links", torch.eye(2).to_sparse())
    start.broadcast(module, group=group)


@case
def sharded_tensor(group: Group) -> None:
    module = nn.Linear(2, 2)
    module.weight.placements = ()  # how a DTensor is told
    start.broadcast(module, group=group)


@case
def no_such_source(group: Group) -> None:
    start.broadcast(nn.Linear(2, 2), group=group, source_rank=group.world_size)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("not_a_thing", "got Tensor"),
        ("sparse_buffer", "`links`"),
        ("sharded_tensor", "sharded"),
        ("no_such_source", "`source_rank`"),
    ],
)
def test_what_cannot_travel_is_refused(ranks: list[dict[str, Any]], name: str, fragment: str) -> None:
    same_error(ranks, name, SpecError, fragment)


# ---- lazy and meta tensors ----


def deferred(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        )
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    model[0].weight.tag = "kept"
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@case
def meta(group: Group) -> Any:
    torch.manual_seed(group.rank)
    model, optimizer = deferred("meta" if group.rank else "cpu")
    start.broadcast(model, optimizer, group=group)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return (
        values(model),
        model[3].weight is model[2].weight,
        [p.requires_grad for p in model.parameters()],
        model[0].weight.tag,
    )


def test_meta_tensors_get_memory_and_the_sources_values(ranks: list[dict[str, Any]]) -> None:
    assert all(result["meta"] == ranks[0]["meta"] for result in ranks)
    assert ranks[0]["meta"][1:] == (True, [True, False, True, True, True, True], "kept")


@case
def lazy(group: Group) -> Any:
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    if group.rank == 0:
        model(torch.ones(2, 3))
    start.broadcast(model, group=group)
    kept = values(model)
    model.eval()
    return kept, model(torch.ones(2, 3)), [type(layer).__name__ for layer in model]


def test_lazy_modules_are_built_from_the_sources_shapes(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        kept, out, kinds = result["lazy"]
        assert kept == ranks[0]["lazy"][0]
        assert torch.equal(out, ranks[0]["lazy"][1])
        assert kinds == ["Linear", "BatchNorm1d"]


@case
def meta_source(group: Group) -> None:
    start.broadcast(deferred("meta" if group.rank == 0 else "cpu")[0], group=group)


@case
def lazy_source(group: Group) -> None:
    start.broadcast(nn.LazyLinear(4), group=group)


@case
def meta_other_shape(group: Group) -> None:
    with torch.device("meta" if group.rank else "cpu"):
        model = nn.Linear(3, 4 if group.rank == 0 else 5)
    try:
        start.broadcast(model, group=group)
    finally:
        assert model.weight.is_meta == bool(group.rank)


@case
def meta_hook(group: Group) -> None:
    model, _ = deferred("meta" if group.rank else "cpu")
    model[0].weight.register_hook(lambda grad: grad)
    start.broadcast(model, group=group)


def test_lazy_and_meta_tensors_without_values_are_refused(ranks: list[dict[str, Any]]) -> None:
    same_error(ranks, "meta_source", SpecError, "`0.weight`", "meta device")
    same_error(ranks, "lazy_source", SpecError, "`weight`", "lazy")
    if len(ranks) > 1:
        same_error(ranks, "meta_other_shape", AgreementError, "`weight`", "(5, 3)")
        same_error(ranks, "meta_hook", SpecError, "hooks")


# ---- optimizers and other state ----


class Nested(torch.optim.Optimizer):
    """State of every shape: nested, None, numbers, text, tensors of other sizes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "shape": (1, [2.0, None])})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept.setdefault("factors", {"rows": torch.zeros(p.shape[0]), "none": None})
                kept["factors"]["rows"] += 1
                kept["history"] = [torch.full((2,), group["lr"]), ("text", torch.tensor(3))]


def optimizer_case(kind: Callable[..., torch.optim.Optimizer], has_state: str) -> Callable[[Group], Any]:
    def run(group: Group) -> Any:
        torch.manual_seed(group.rank)
        model = chain(3, 4)
        optimizer = kind(model.parameters(), lr=0.5 if group.rank == 0 else 0.125)
        if has_state == "all" or (has_state == "source") == (group.rank == 0):
            for _ in range(2 + group.rank):
                model(torch.randn(5, 3)).square().sum().backward()
                optimizer.step()
            optimizer.param_groups[0]["only_here"] = group.rank
        start.broadcast(model, optimizer, group=group)
        told = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        model(torch.ones(5, 3)).square().sum().backward()
        optimizer.step()
        return repr(told), repr(optimizer.state_dict()), values(model)

    return run


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "tensor_lr": lambda params, lr: torch.optim.Adam(
        params, lr=torch.tensor(lr), capturable=False, foreach=False
    ),
    "nested": Nested,
}
for kind_name, kind in OPTIMIZERS.items():
    for has_state in ("source", "others", "all"):
        CASES[f"optimizer_{kind_name}_{has_state}"] = optimizer_case(kind, has_state)


@pytest.mark.parametrize("has_state", ["source", "others", "all"])
@pytest.mark.parametrize("kind_name", OPTIMIZERS)
def test_optimizers_take_the_sources_state_and_options(
    ranks: list[dict[str, Any]], kind_name: str, has_state: str
) -> None:
    name = f"optimizer_{kind_name}_{has_state}"
    alone = optimizer_case(OPTIMIZERS[kind_name], has_state)(Group.single())
    for result in ranks:
        assert result[name] == alone


class Part:
    """Something with state, some of which it may lose."""

    def __init__(self, value: Any, loses: bool = False, fails: bool = False) -> None:
        self.value, self.loses, self.fails = value, loses, fails
        self.local = torch.tensor([0.0])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "local": self.local}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise RuntimeError("no room left")
        self.value = state["value"]
        if not self.loses:
            self.local = state["local"]


class Extra(nn.Module):
    def __init__(self, amax: list[float]) -> None:
        super().__init__()
        self.amax = torch.tensor(amax)

    def get_extra_state(self) -> dict[str, Any]:
        return {"amax": self.amax}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.amax = state["amax"]


@case
def other_state(group: Group) -> Any:
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(2, 2), Extra([1.0] * (3 - min(group.rank, 2))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if group.rank == 0 else 16.0)
    part = Part({"ids": [1, 2], "t": torch.arange(3) * (group.rank + 1)})
    if group.rank == 0:
        for _ in range(3):
            optimizer.step()
            scheduler.step()
    start.broadcast(model, optimizer, scheduler, scaler, part, group=group)
    return (
        repr(scheduler.state_dict()),
        optimizer.param_groups[0]["lr"],
        scaler.get_scale(),
        repr(part.value),
        model[1].amax.tolist(),
    )


def test_schedulers_scalers_and_extra_state_travel(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["other_state"] == ranks[0]["other_state"]
    assert ranks[0]["other_state"][1:] == (
        0.25,
        8.0,
        "{'ids': [1, 2], 't': tensor([0, 1, 2])}",
        [1.0, 1.0, 1.0],
    )


@case
def part_that_loses(group: Group) -> None:
    part = Part(3, loses=is_last(group))
    part.local += group.rank
    start.broadcast(part, group=group)


@case
def part_that_fails(group: Group) -> None:
    start.broadcast(Part(3, fails=is_last(group)), group=group)


@case
def part_that_cannot_be_compared(group: Group) -> None:
    start.broadcast(nn.Linear(1, 1), Part(object()), group=group)


@case
def part_that_cannot_be_pickled(group: Group) -> None:
    class Unpicklable(str):
        def __reduce__(self) -> Any:
            raise TypeError("stays at home")

    start.broadcast(Part(Unpicklable("x")), group=group)


def test_state_that_does_not_arrive_is_told_everywhere(ranks: list[dict[str, Any]]) -> None:
    same_error(ranks, "part_that_cannot_be_compared", SpecError, "`things[1]`", "object")
    same_error(ranks, "part_that_cannot_be_pickled", SpecError, "`things[0]`", "stays at home")
    if len(ranks) > 1:
        last = len(ranks) - 1
        error = same_error(ranks, "part_that_loses", ReplicaMismatchError, f"rank {last} of {last + 1}")
        assert (error.name, error.rank) == ("things[0].local", last)
        same_error(ranks, "part_that_fails", AgreementError, f"rank {last} of {last + 1}", "no room left")
