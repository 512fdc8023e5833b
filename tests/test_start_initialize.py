"""Values computed from data: set once, on all replicas alike, and the optimizer's memory of the old ones."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep import kmeans, launch, start
from samestep.errors import AgreementError, SpecError, WorkerError
from samestep.group import Group
from samestep.reduce import ordered_sum, pool
from start_cases import (
    CASES,
    WORLD_SIZES,
    Raised,
    attempt,
    case,
    is_last,
    launched,
    raw,
    same_error,
    values,
    wrapped,
)


@pytest.fixture(scope="module", params=WORLD_SIZES)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launched(request.param)


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


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
}


@case
def some_rows(group: Group) -> Any:
    found = {}
    for name, build in OPTIMIZERS.items():
        torch.manual_seed(0)
        layer = start.mark(nn.Linear(2, 4))
        optimizer = build(layer.parameters())
        for _ in range(3):
            layer(torch.randn(5, 2)).square().sum().backward()
            optimizer.step()
        if is_last(group):
            with torch.no_grad():
                layer.weight[3] += 1.0  # so that this row too is another one here afterwards
        before = copy.deepcopy(optimizer.state[layer.weight])

        def compute(layer: nn.Module) -> dict[str, Tensor]:
            new = layer.weight.detach().clone()
            new[1] = torch.tensor([7.0, 8.0])
            return {"weight": new}

        start.initialize(layer, compute, group, optimizer=optimizer)
        found[name] = before, dict(optimizer.state[layer.weight]), layer.bias in optimizer.state
    return found


def test_the_optimizer_forgets_the_rows_that_were_replaced_and_no_others(ranks: list[dict[str, Any]]) -> None:
    moments = {"sgd": ["momentum_buffer"], "adamw": ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]}
    replaced = [1, 3] if len(ranks) > 1 else [1]
    kept = [row for row in range(4) if row not in replaced]
    for result in ranks:
        for name, keys in moments.items():
            before, after, bias_kept = result["some_rows"][name]
            assert bias_kept
            assert after.keys() == before.keys() >= set(keys)
            for key in keys:
                assert not after[key][replaced].any()
                assert torch.equal(after[key][kept], before[key][kept])
                assert before[key].all()
        assert result["some_rows"]["adamw"][1]["step"] == 3
        assert result["some_rows"]["adagrad"][1:] == ({}, True)  # its sums do not start at zero


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
