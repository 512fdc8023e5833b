"""Replicas that start together: broadcasts, values computed from data, and the way by gradient.

All cases of a world size run in one launch: a case is a function ``case(group) -> result`` whose error, if any, is
its result. The tests then look at the results of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from samestep import bulk, kmeans, launch, start
from samestep.errors import AgreementError, ReplicaMismatchError, SamestepError, SpecError, WorkerError
from samestep.group import Group
from samestep.reduce import ordered_sum, pool

WORLD_SIZES = (1, 2, 3, 4)
CASES: dict[str, Callable[[Group], Any]] = {}


@dataclass
class Raised:
    """An error that a case raised on one rank."""

    kind: str
    message: str
    rank: int | None
    name: str | None


def case(fn: Callable[[Group], Any]) -> Callable[[Group], Any]:
    CASES[fn.__name__] = fn
    return fn


def work(group: Group) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, fn in CASES.items():
        results[name] = attempt(fn, group)
        group.barrier()
    return results


def attempt(fn: Callable[[Group], Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except SamestepError as error:
        return Raised(type(error).__name__, str(error), error.rank, error.name)
    except Exception as error:
        return Raised(type(error).__name__, traceback.format_exc(), None, None)


@pytest.fixture(scope="module", params=WORLD_SIZES)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch.run(work, request.param, timeout_seconds=60)


def same_error(ranks: list[dict[str, Any]], name: str, kind: type[SamestepError], *fragments: str) -> Raised:
    """Check that a case raised one and the same error everywhere, and return it."""
    found = [result[name] for result in ranks]
    assert all(isinstance(error, Raised) for error in found), found
    assert len({(e.kind, e.message, e.rank, e.name) for e in found}) == 1, found
    assert found[0].kind == kind.__name__, found[0]
    for fragment in fragments:
        assert fragment in found[0].message, found[0].message
    return found[0]


def raw(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def values(module: nn.Module) -> dict[str, bytes]:
    found = {name: raw(t) for name, t in module.named_parameters(remove_duplicate=False)}
    return found | {name: raw(t) for name, t in module.named_buffers(remove_duplicate=False)}


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


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def is_last(group: Group) -> bool:
    return group.rank == group.world_size - 1


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


# ---- values computed from data ----


class Book(nn.Module):
    """Codebooks in several dtypes, with counts beside them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.codes = nn.Parameter(torch.randn(4, 3, generator=draw))
        self.low = nn.Parameter(torch.randn(4, 3, generator=draw).bfloat16())
        self.fp16 = nn.Parameter(torch.randn(4, generator=draw).half(), requires_grad=False)
        self.other = nn.Linear(3, 2)
        self.twin = self.codes
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        start.mark(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) + (x @ self.codes.t()).sum() + (x.bfloat16() @ self.low.t()).sum()


def targets() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(99)
    return {
        "codes": torch.randn(4, 3, generator=draw, dtype=torch.float64),
        "low": torch.randn(4, 3, generator=draw),
        "fp16": torch.randn(4, generator=draw),
        "counts": torch.tensor([5.0, 0.0, 7.0, 2.0]),
        "mean": torch.randn(3, generator=draw),
    }


def wrapped(module: nn.Module, group: Group, **options: Any) -> nn.Module:
    """Return the module in DDP, or as it is where there is no process group."""
    if group.world_size == 1:
        return module
    return DistributedDataParallel(module, process_group=group.process_group, **options)


@case
def set_on_source(group: Group) -> Any:
    calls: list[Any] = []

    def compute(module: nn.Module) -> dict[str, Tensor]:
        calls.append((type(module).__name__, torch.is_grad_enabled()))
        return targets()

    book = Book(group.rank)
    ran = start.initialize(book, compute, group)
    again = start.initialize(book, compute, group)
    return ran, again, calls, values(book), book.fp16.requires_grad, book.initialized.item()


def test_values_from_the_source_arrive_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    expected = Book(0)
    wanted = {
        name: raw(value.to(expected.get_buffer(name).dtype))
        for name, value in targets().items()
        if name in ("counts", "mean")
    }
    wanted |= {
        name: raw(value.to(expected.get_parameter(name).dtype))
        for name, value in targets().items()
        if name not in wanted
    }
    for rank, result in enumerate(ranks):
        ran, again, calls, found, fp16_grad, mark = result["set_on_source"]
        assert (ran, again, fp16_grad, mark) == (True, False, False, 1)
        assert calls == ([("Book", False)] if rank == 0 else [])
        assert {name: found[name] for name in wanted} == wanted
        assert found["twin"] == found["codes"]


@case
def set_in_ddp(group: Group) -> Any:
    torch.manual_seed(group.rank)
    book = Book(group.rank)
    model = wrapped(book, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    start.initialize(model, lambda module: {"codes": torch.ones(4, 3)}, group, optimizer=optimizer)
    kept = book.codes in optimizer.state, book.low in optimizer.state
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    return kept, values(book)


def test_ddp_goes_on_averaging_after_values_were_set(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        kept, found = result["set_in_ddp"]
        assert kept == (False, True)
        assert found == ranks[0]["set_in_ddp"][1]


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*:DeprecationWarning"
)  # torch's own, on the import of its compiler
def test_names_are_those_of_the_module_inside_a_compiled_wrapper() -> None:
    book = Book(0)
    compiled = torch.compile(book)
    assert start.needs_initialization(compiled)
    assert start.initialize(compiled, lambda module: {"codes": torch.ones(4, 3)}, Group.single())
    assert torch.equal(book.codes, torch.ones(4, 3))
    assert not start.needs_initialization(book)
    start.broadcast(compiled, group=Group.single())


# ---- the mark ----


def test_the_mark_is_in_every_state_dict_and_survives_loading() -> None:
    fresh, trained = Book(0), Book(1)
    assert start.mark(fresh) is fresh
    assert fresh.state_dict().keys() == trained.state_dict().keys()
    start.initialize(trained, lambda module: {"codes": torch.ones(4, 3)}, Group.single())
    fresh.load_state_dict(trained.state_dict())
    assert not start.needs_initialization(fresh)

    def never(module: nn.Module) -> dict[str, Tensor]:
        raise AssertionError("a resumed module was initialized again")

    assert not start.initialize(fresh, never, Group.single())
    fresh.load_state_dict(Book(2).state_dict())
    assert start.needs_initialization(fresh)


def test_a_taken_name_for_the_mark_is_refused() -> None:
    layer = nn.Linear(1, 1)
    layer.initialized = False
    with pytest.raises(SpecError, match="initialized"):
        start.mark(layer)


@case
def unmarked(group: Group) -> Any:
    layer = nn.Linear(2, 1, bias=False)
    compute = lambda layer: {"weight": torch.ones(1, 2)}  # noqa: E731
    error = attempt(lambda: start.initialize(layer, compute, group))
    return error.kind, start.initialize(layer, compute, group, once=False), layer.weight.tolist()


def test_a_module_without_mark_is_refused_unless_told(ranks: list[dict[str, Any]]) -> None:
    assert all(result["unmarked"] == ("SpecError", True, [[1.0, 1.0]]) for result in ranks)


@case
def loaded_on_source_only(group: Group) -> None:
    book = Book(0)
    if group.rank == 0:
        book.initialized.fill_(1)
    start.initialize(book, lambda module: targets(), group)


def test_marks_that_differ_are_refused(ranks: list[dict[str, Any]]) -> None:
    if len(ranks) > 1:
        same_error(ranks, "loaded_on_source_only", AgreementError, f"rank 0 of {len(ranks)} only")


# ---- results that do not fit, errors in compute ----


def returning(change: dict[str, Any] | Any) -> Callable[[Group], Any]:
    def run(group: Group) -> None:
        book = Book(0)
        before = values(book)
        try:
            start.initialize(book, lambda module: change, group)
        finally:
            assert values(book) == before

    return run


MISFITS: dict[str, tuple[Any, str, str]] = {
    "wrapped_name": ({"module.codes": torch.ones(4, 3)}, "module.codes", "such as `codes`"),
    "shape": ({"codes": torch.ones(3, 4)}, "codes", "(4, 3), got shape (3, 4)"),
    "nan": ({"codes": torch.full((4, 3), float("nan"))}, "codes", "12 that are NaN"),
    "overflow": (
        {"fp16": torch.full((4,), 1e6)},
        "fp16",
        "within the range of torch.float16, got up to 1e+06",
    ),
    "lossy": ({"counts": torch.tensor([1.0, 2.5, 3.0, 4.0])}, "counts", "torch.int64"),
    "complex": ({"codes": torch.ones(4, 3, dtype=torch.complex64)}, "codes", "real values"),
    "list": ({"codes": [[1.0]]}, "codes", "got list"),
    "empty": ({}, "", "empty mapping"),
    "none": (None, "", "NoneType"),
    "two_values": ({"codes": torch.ones(4, 3), "twin": torch.zeros(4, 3)}, "twin", "same tensor as `codes`"),
    "mark": ({"initialized": torch.tensor(1)}, "initialized", "expected the name"),
}
for label, (change, _, _) in MISFITS.items():
    CASES[f"misfit_{label}"] = returning(change)


@pytest.mark.parametrize("label", MISFITS)
def test_results_that_do_not_fit_are_refused_everywhere(ranks: list[dict[str, Any]], label: str) -> None:
    _, name, fragment = MISFITS[label]
    same_error(ranks, f"misfit_{label}", SpecError, f"`{name}`" if name else "`compute`", fragment)


@case
def compute_raises(group: Group) -> Any:
    book = Book(0)

    def compute(module: nn.Module) -> dict[str, Tensor]:
        raise ValueError("buffer smaller than K")

    began = time.monotonic()
    error = attempt(lambda: start.initialize(book, compute, group))
    return error, time.monotonic() - began, start.needs_initialization(book)


def test_an_error_in_compute_is_raised_on_all_ranks_with_its_traceback(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        error, seconds, still_needed = result["compute_raises"]
        assert error == ranks[0]["compute_raises"][0]
        assert error.kind == "AgreementError"
        assert "ValueError: buffer smaller than K" in error.message
        assert "Traceback" in error.message
        assert seconds < 10
        assert still_needed


@case
def compute_changes_the_module(group: Group) -> None:
    model = start.mark(nn.Sequential(nn.BatchNorm1d(3)))

    def compute(module: nn.Module) -> dict[str, Tensor]:
        module(torch.randn(4, 3))
        return {"0.weight": torch.ones(3)}

    start.initialize(model, compute, group)


def test_a_compute_that_changes_the_module_itself_is_refused(ranks: list[dict[str, Any]]) -> None:
    same_error(ranks, "compute_changes_the_module", SpecError, "leave the module as it is")


# ---- collective computations ----


def codebook(group: Group, rows: list[float], n_centroids: int = 2) -> Any:
    book = start.mark(nn.Embedding(n_centroids, 1))

    def compute(module: nn.Module) -> dict[str, Tensor]:
        points = torch.tensor(rows).reshape(-1, 1)
        found = kmeans.fit(points, n_centroids, seed=0, pool=pool(group))
        return {"weight": found.centroids[found.centroids[:, 0].argsort()]}

    start.initialize(book, compute, group, collective=True)
    return book.weight.detach().flatten().tolist()


@case
def pooled_kmeans(group: Group) -> Any:
    rows = [[0.0, 0.0, 1.0, 1.0], [10.0, 10.0, 11.0, 11.0]]
    return codebook(
        group, rows[0] + rows[1] if group.world_size == 1 else rows[group.rank] if group.rank < 2 else []
    )


@case
def permuted_rows(group: Group) -> Any:
    return codebook(group, [10.0, 0.0] if group.rank % 2 else [0.0, 10.0])


@case
def too_few_rows(group: Group) -> Any:
    return codebook(group, [float(group.rank)], n_centroids=9)


def test_k_means_over_all_workers_data_reaches_every_replica(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["pooled_kmeans"] == [0.5, 10.5]
        assert result["permuted_rows"] == [0.0, 10.0]
    same_error(ranks, "too_few_rows", SpecError)


@case
def pooled_statistics(group: Group) -> Any:
    rows = {0: [0.0, 0.0], 1: [10.0, 10.0]}.get(group.rank, [])
    norm = start.mark(nn.BatchNorm1d(1))

    def compute(module: nn.Module) -> dict[str, Tensor]:
        x = torch.tensor(rows, dtype=torch.float64)
        n, total, squares = ordered_sum(
            torch.stack([torch.tensor(float(len(x))).double(), x.sum(), x.square().sum()]), group
        )
        mean = total / n
        return {"running_mean": mean.reshape(1), "running_var": (squares / n - mean**2).reshape(1)}

    start.initialize(norm, compute, group, collective=True)
    return norm.running_mean.item(), norm.running_var.item()


def test_statistics_over_all_workers_are_not_those_of_a_mean_of_means(ranks: list[dict[str, Any]]) -> None:
    expected = (5.0, 25.0) if len(ranks) > 1 else (0.0, 0.0)
    assert all(result["pooled_statistics"] == expected for result in ranks)


@case
def collective_disagrees(group: Group) -> None:
    layer = start.mark(nn.Linear(1, 1))
    value = torch.full((1, 1), float(is_last(group)))
    start.initialize(layer, lambda layer: {"weight": value}, group, collective=True)


def test_a_collective_compute_must_return_equal_values(ranks: list[dict[str, Any]]) -> None:
    if len(ranks) > 1:
        error = same_error(ranks, "collective_disagrees", AgreementError, "equal values everywhere")
        assert (error.name, error.rank) == ("weight", len(ranks) - 1)


def lone_failure(group: Group, before_collective: bool) -> tuple[Raised, float]:
    layer = start.mark(nn.Linear(1, 1))

    def compute(module: nn.Module) -> dict[str, Tensor]:
        if group.rank == 1:
            raise ValueError("a NaN in row 7")
        if before_collective:
            ordered_sum(torch.zeros(3), group)
        return {"weight": torch.zeros(1, 1)}

    began = time.monotonic()
    error = attempt(lambda: start.initialize(layer, compute, group, collective=True))
    seconds = time.monotonic() - began
    time.sleep(2 if group.rank == 1 else 0)  # the others learn it before this worker ends
    return error, seconds


def fail_alone(group: Group, before_collective: bool) -> None:
    error, seconds = lone_failure(group, before_collective)
    raise AssertionError(f"{error.kind} after {'little' if seconds < 1.8 else 'long'} time: {error.message}")


@pytest.mark.parametrize("before_collective", [True, False])
def test_one_rank_that_raises_inside_a_collective_compute_ends_it_for_all(before_collective: bool) -> None:
    with pytest.raises(WorkerError) as caught:
        launch.run(fail_alone, 2, before_collective, timeout_seconds=60)
    text = str(caught.value)
    assert text.count("after little time") >= 2
    assert text.count("ValueError: a NaN in row 7") >= 2


# ---- the way by gradient ----


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
