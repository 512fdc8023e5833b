"""One call, one applied update: the exact mean, all that may go wrong in a step, and nothing left behind by it."""

from __future__ import annotations

import gc
import json
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep import launch
from samestep.errors import AgreementError, SpecError, WorkerError
from samestep.group import Group
from samestep.sharding import Shard, ShardLoader, shard_range
from samestep.step import TrainStep
from workers import digest, each, generators_digest, outcome, state_digest

COUNTS = [6, 3, 2, 1]
WORLD_SIZES = [1, 2, 3, 4]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def net(seed: int = 1, kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(seed)
    return kind()


def make(
    group: Group, model: nn.Module, shards: int | None = 4, lr: float = 0.1, **options: Any
) -> TrainStep:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return TrainStep(model, optimizer, group=group, shards=shards, **options)


def all_shards(counts: list[int], step: int = 0) -> list[Shard]:
    found = []
    for index, count in enumerate(counts):
        generator = torch.Generator().manual_seed(1000 * step + index)
        x = torch.randn(count, 5, generator=generator) + index
        y = torch.randn(count, 3, generator=generator)
        found.append(Shard(index, torch.arange(count), (x, y) if count else None))
    return found


def mine(group: Group, counts: list[int] | None = None, step: int = 0) -> list[Shard]:
    counts = COUNTS if counts is None else counts
    block = shard_range(len(counts), group.world_size, group.rank)
    return all_shards(counts, step)[block.start : block.stop]


def squares(model: nn.Module, shard: Shard) -> tuple[Tensor, int]:
    x, y = shard.batch
    return (model(x) - y).square().sum(), len(x)


def reference(counts: list[int], step: int = 0) -> list[Tensor]:
    """The slow twin: all samples at once, in float64."""
    model = net().double()
    total = torch.zeros((), dtype=torch.float64)
    for shard in all_shards(counts, step):
        if shard.n_samples:
            x, y = shard.batch
            total = total + (model(x.double()) - y.double()).square().sum()
    (total / sum(counts)).backward()
    return [p.grad for p in model.parameters()]


def error(model: nn.Module, right: list[Tensor]) -> float:
    largest = max(float(r.abs().max()) for r in right)
    return max(float((p.grad.double() - r).abs().max()) for p, r in zip(model.parameters(), right)) / largest


# ---- cases: every one runs at every world size, many in one launch


def exact_mean(group: Group) -> dict[str, float]:
    found = {}
    for counts in (COUNTS, [9, 3, 0, 0], [0, 0, 0, 5]):
        for mode in ("fast", "exact"):
            for micro in (None, 2):
                model = net()
                step = make(group, model, mode=mode, micro_batch_size=micro)
                for _ in range(2):
                    model.load_state_dict(net().state_dict())
                    result = step.train_step(mine(group, counts), squares)
                assert result.count == sum(counts)
                found[f"{counts} {mode} {micro}"] = error(model, reference(counts))
    return found


def low_precision(group: Group) -> dict[str, float]:
    found = {}
    autocast = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    for name, options, dtype in (("autocast", autocast, torch.float32), ("parameters", {}, torch.bfloat16)):
        for mode in ("fast", "exact"):
            model = net().to(dtype)
            step = make(group, model, mode=mode, lr=0.0, **options)
            step.train_step(mine(group), lambda m, s, d=dtype: _sum_in(m, s, d))
            assert all(p.grad.dtype == dtype for p in model.parameters())
            found[f"{name} {mode}"] = error(model, reference(COUNTS))
    return found


def _sum_in(model: nn.Module, shard: Shard, dtype: torch.dtype) -> tuple[Tensor, int]:
    x, y = shard.batch
    return (model(x.to(dtype)).float() - y).square().sum(), len(x)


def piecewise_bfloat16(group: Group) -> float:
    """257 samples of gradient 1, one at a time: bfloat16 alone stops at 256."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    step = make(group, model, mode="exact", micro_batch_size=1, shards=4)
    shards = [
        Shard(i, torch.arange(n), torch.ones(n, 1, dtype=torch.bfloat16))
        for i, n in enumerate([257, 1, 1, 1])
    ]
    block = shard_range(4, group.world_size, group.rank)
    step.train_step(shards[block.start : block.stop], lambda m, s: (m(s.batch).float().sum(), len(s.batch)))
    return float(model.weight.grad)


def tokens(group: Group) -> float:
    """Counts 1 and 100: a mean of means would be wrong by tens of percent."""
    counts = [1, 100, 0, 30]
    model = net()
    make(group, model, mode="exact").train_step(mine(group, counts), squares)
    return error(model, reference(counts))


def scaler_overflow(group: Group) -> dict[str, Any]:
    return {mode: one_overflow(group, mode) for mode in ("fast", "exact")}


def one_overflow(group: Group, mode: str) -> dict[str, Any]:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = make(
        group, model, mode=mode, scaler=scaler, scheduler=clock, optimizer=optimizer,
        autocast=lambda: torch.autocast("cpu", torch.float16),
    )  # fmt: skip
    before = digest(model.parameters())

    def loss(m: nn.Module, shard: Shard, factor: float) -> tuple[Tensor, int]:
        x, y = shard.batch
        return (m(x) * (factor if shard.index == 3 else 1.0) - y).float().square().sum(), len(x)

    first = step.train_step(mine(group), lambda m, s: loss(m, s, 1e30))
    skipped = (
        first.applied,
        step.step,
        clock.last_epoch,
        digest(model.parameters()) == before,
        scaler.get_scale(),
    )
    second = step.train_step(mine(group), lambda m, s: loss(m, s, 1.0))
    return {
        "skipped": skipped,
        "then": (second.applied, step.step, clock.last_epoch, second.lr),
        "error": error(model, reference(COUNTS)),
        "digest": digest(model.parameters()),
    }


def nonfinite(group: Group) -> dict[str, Any]:
    found = {}
    for where in ("loss", "gradient"):

        def loss(m: nn.Module, shard: Shard, where: str = where) -> tuple[Tensor, int]:
            total, count = squares(m, shard)
            if shard.index == 2:
                total = (
                    total * float("nan") if where == "loss" else total + torch.sqrt((m.b.weight * 0).sum())
                )
            return total, count

        for choice in ("raise", "skip"):
            model = net()
            step = make(group, model, mode="exact", on_nonfinite=choice)
            before = state_digest(model, step.optimizer)
            kind, text = outcome(lambda s=step, f=loss: s.train_step(mine(group), f).applied)
            untouched = before == state_digest(model, step.optimizer) and step.step == 0
            found[f"{where} {choice}"] = (kind, text, untouched)
    return found


def unused(group: Group) -> dict[str, Any]:
    """`b` is used by shard 0 only, `c` nowhere."""

    def loss(m: nn.Module, shard: Shard) -> tuple[Tensor, int]:
        x = m.a(shard.batch[0])
        return (m.b(x) if shard.index == 0 else x).square().sum(), len(x)

    found = {}
    for mode in ("fast", "exact"):
        model = net()
        decaying = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        step = make(group, model, mode=mode, find_unused_parameters=True, optimizer=decaying)
        kept = model.c.weight.detach().clone()
        for _ in range(3):
            model.a.load_state_dict(net().a.state_dict())
            model.b.load_state_dict(net().b.state_dict())
            step.train_step(mine(group), loss)
        twin = net().double()
        total = sum(
            loss(twin, Shard(s.index, s.sample_ids, (s.batch[0].double(),)))[0] for s in all_shards(COUNTS)
        )
        (total / sum(COUNTS)).backward()
        wrong = max(
            float((p.grad.double() - t.grad).abs().max() / t.grad.abs().max())
            for p, t in zip([*model.a.parameters(), *model.b.parameters()], twin.parameters())
        )
        strict = make(group, net(), mode=mode)
        found[mode] = {
            "c has no gradient": model.c.weight.grad is None and torch.equal(model.c.weight, kept),
            "error": wrong,
            "strict": outcome(lambda s=strict: s.train_step(mine(group), loss)),
            "digest": digest(model.parameters()),
        }
    return found


class Tied(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, sparse=sparse)
        self.out = nn.Linear(4, 7, bias=False)
        if not sparse:
            self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embedding(ids))


def _words(model: nn.Module, shard: Shard) -> tuple[Tensor, int]:
    ids = torch.arange(len(shard.batch[0])) * 3 % 7
    return nn.functional.cross_entropy(model(ids), (ids + shard.index) % 7, reduction="sum"), len(ids)


def shared_and_sparse(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = {}
    counts = [6, 3, 0, 1]
    for sparse in (False, True):
        torch.manual_seed(0)
        model, twin = Tied(sparse), Tied(sparse).double()
        twin.load_state_dict(model.state_dict())
        step = make(group, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), clip_norm=1e6)
        for _ in range(2):
            result = step.train_step(mine(group, counts), _words)
        sum(_words(twin, s)[0] for s in all_shards(counts) if s.n_samples).div(sum(counts)).backward()
        pairs = [
            (p.grad.to_dense().double(), t.grad.to_dense())
            for p, t in zip(model.parameters(), twin.parameters())
        ]
        norm = torch.cat([t.reshape(-1) for _, t in pairs]).norm()
        found[f"sparse={sparse}"] = max(float((g - t).abs().max()) for g, t in pairs)
        found[f"sparse={sparse} norm"] = abs(result.grad_norm - float(norm))
    found["refused"] = outcome(lambda: make(group, Tied(sparse=True), mode="exact"))
    return found


def compiled(group: Group) -> tuple[str, int]:
    from torch._dynamo.utils import counters

    plain = net()
    model = torch.compile(plain, backend="aot_eager")
    step = make(group, model, mode="exact")
    counters.clear()
    for i in range(3):
        step.train_step(mine(group, [3, 3, 3, 3], i), squares)
    n_graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return state_digest(plain, step.optimizer), n_graphs


def further_sums(group: Group) -> Any:
    def loss(m: nn.Module, shard: Shard) -> Any:
        total, count = squares(m, shard)
        sums = {"samples": count, "zero": torch.zeros(())}
        return total, 2 * count, {**sums, "third": 1.0} if shard.index == 2 else sums

    step = make(group, net(), mode="exact")
    result = [step.train_step(mine(group), loss) for _ in range(2)][-1]
    return result.sums, result.count, result.mean("samples"), result.loss


def changed_model(group: Group) -> dict[str, Any]:
    def unfreeze(m: nn.Module) -> None:
        m.b.bias.requires_grad_(True)

    def replace(m: nn.Module) -> None:
        m.a.weight = nn.Parameter(m.a.weight.detach().clone())

    def swap(m: nn.Module) -> None:
        m.b = nn.Linear(4, 4)

    def add(m: nn.Module) -> None:
        m.extra = nn.Linear(1, 1)

    def fill(m: nn.Module) -> None:
        m.late = nn.Parameter(torch.zeros(1))

    def cast(m: nn.Module) -> None:
        m.c.double()

    def freeze(m: nn.Module) -> None:
        m.b.weight.requires_grad_(False)

    found = {}
    for change in (unfreeze, freeze, replace, swap, add, fill, cast):
        model = net()
        model.register_parameter("late", None)
        model.b.bias.requires_grad_(False)
        step = make(group, model)
        step.train_step(mine(group), squares)
        if group.rank == group.world_size - 1 or change is cast:  # on one worker only: all raise
            change(model)
        found[change.__name__] = outcome(lambda s=step: s.train_step(mine(group), squares))
    return found


def unlike_workers(group: Group) -> dict[str, Any]:
    last = group.rank == group.world_size - 1
    frozen = net()
    frozen.b.weight.requires_grad_(not last)
    wider = net()
    if last:
        wider.b = nn.Linear(4, 4, bias=False)
    return {
        "frozen": outcome(lambda: make(group, frozen)),
        "shape": outcome(lambda: make(group, wider)),
        "settings": outcome(lambda: make(group, net(), clip_norm=1.0 if last else 2.0)),
    }


def start_values(group: Group) -> bool:
    """As with torch's DDP, parameters and buffers of rank 0 count."""
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        model.weight.fill_(group.rank + 1.0)
        model.running_var.fill_(group.rank + 5.0)
    make(group, model)
    return float(model.weight[0]) == 1.0 and float(model.running_var[0]) == 5.0


class Generators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def _noise(model: nn.Module, shard: Shard) -> tuple[Tensor, int]:
    import random

    import numpy as np

    draw = torch.rand(3) + float(np.random.rand()) + random.random()
    return (model.weight * draw).sum() * shard.n_samples, shard.n_samples


def random_numbers(group: Group) -> dict[str, Any]:
    model = Generators()
    step = make(group, model, mode="exact", seed=5)
    before = generators_digest()
    first = [step.train_step(mine(group), _noise).loss for _ in range(2)]
    untouched = before == generators_digest()

    def reading() -> Any:
        torch.rand(1)  # a data source that uses the global generator
        yield from mine(group)

    step.train_step(reading(), _noise)
    torch.manual_seed(0)
    torch.rand(1)
    return {"losses": first, "untouched": untouched, "moved by reading": before != generators_digest()}


def talking(group: Group) -> dict[str, Any]:
    def loss(m: nn.Module, shard: Shard) -> tuple[Tensor, int]:
        total, count = squares(m, shard)
        if group.world_size > 1:
            dist.all_reduce(torch.ones(1))
        return total, count

    def declared(m: nn.Module, shard: Shard) -> tuple[Tensor, int]:
        return loss(m, shard)

    declared.collective = True  # type: ignore[attr-defined]
    n = group.world_size
    model = net()
    exact = outcome(lambda: make(group, model, shards=n, mode="exact").train_step(mine(group, [2] * n), loss))
    vouched = outcome(
        lambda: make(group, net(), shards=n, mode="exact").train_step(mine(group, [2] * n), declared).step
    )
    fast = outcome(lambda: make(group, net(), shards=n).train_step(mine(group, [2] * n), loss).step)
    return {"exact": exact, "declared": vouched, "fast": fast}


def failing(group: Group) -> dict[str, Any]:
    """A worker raises in its last shard, after the others ran theirs; all raise, and all go on as if it had not."""
    found: dict[str, Any] = {}
    for mode in ("fast", "exact"):
        runs = []
        for fails in (False, True):
            model = nn.Sequential(net(), nn.BatchNorm1d(3), nn.Dropout(0.3))
            step = make(group, model, mode=mode, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
            for i in range(3):
                if fails and i:
                    before = state_digest(model, step.optimizer), generators_digest()
                    found[mode] = outcome(
                        lambda s=step, i=i: s.train_step(mine(group, [4] * 4, i), _break_last)
                    )
                    after = state_digest(model, step.optimizer), generators_digest()
                    found[f"{mode} untouched"] = before == after and all(
                        p.grad is None for p in model.parameters()
                    )
                step.train_step(mine(group, [4] * 4, i), squares)
            runs.append(state_digest(model, step.optimizer))
        found[f"{mode} goes on"] = runs[0] == runs[1]
    return found


def _break_last(model: nn.Module, shard: Shard) -> tuple[Tensor, int]:
    found = squares(model, shard)
    if shard.index == 3:
        raise KeyError("this dataset has no such row")
    return found


def unreadable(group: Group) -> tuple[str, str]:
    def reading() -> Any:
        yield from mine(group)[:-1]
        if group.rank == group.world_size - 1:
            raise OSError("disk is gone")
        yield from mine(group)[-1:]

    return outcome(lambda: make(group, net()).train_step(reading(), squares))


def bad_losses(group: Group) -> dict[str, Any]:
    losses: dict[str, Any] = {
        "mean": lambda m, s: (squares(m, s)[0] / len(s.batch[0]), len(s.batch[0])),
        "vector": lambda m, s: ((m(s.batch[0]) - s.batch[1]).square().sum(1), len(s.batch[0])),
        "float": lambda m, s: (1.0, 3),
        "alone": lambda m, s: squares(m, s)[0],
        "negative": lambda m, s: (squares(m, s)[0], -1),
        "nan": lambda m, s: (squares(m, s)[0], float("nan")),
        "zero": lambda m, s: (squares(m, s)[0] * 0, 0),
        "loss without count": lambda m, s: (squares(m, s)[0], 0),
        "count with gradient": lambda m, s: (squares(m, s)[0], m.a.weight.sum()),
        "detached": lambda m, s: (squares(m, s)[0].detach(), 1),
        "sums": lambda m, s: (*squares(m, s), [1.0]),
        "sum": lambda m, s: (*squares(m, s), {"x": "y"}),
    }
    found = {}
    for name, loss in losses.items():
        counts = [4, 4, 4, 4]
        found[name] = outcome(lambda f=loss, c=counts: make(group, net()).train_step(mine(group, c), f))
    found["too few"] = outcome(lambda: make(group, net()).train_step(mine(group)[1:], squares))
    return found


def bad_settings(group: Group) -> dict[str, Any]:
    other = net(2)
    some = net()
    options: dict[str, Any] = {
        "mode": {"mode": "quick"},
        "no shards": {"mode": "exact", "shards": None},
        "few shards": {"shards": group.world_size - 1},
        "clip": {"clip_norm": 0.0},
        "micro": {"micro_batch_size": 0},
        "choice": {"on_nonfinite": "ignore"},
        "other model": {"optimizer": torch.optim.SGD([*some.parameters(), *other.parameters()], lr=0.1)},
        "part": {"optimizer": torch.optim.SGD(some.a.parameters(), lr=0.1)},
    }
    found = {name: outcome(lambda o=o: make(group, some, **o)) for name, o in options.items()}
    frozen = net().requires_grad_(False)
    found["frozen"] = outcome(lambda: make(group, frozen))
    meta = net()
    meta.b.weight = nn.Parameter(meta.b.weight.to("meta"))
    found["device"] = outcome(lambda: make(group, meta))
    return found


def any_number(group: Group) -> float:
    """Fast mode without a fixed number of shards: each worker brings what it has."""
    counts = [[1, 2], [3], [4, 1, 2], [2]][: group.world_size]
    start = sum(len(c) for c in counts[: group.rank])
    flat = [n for c in counts for n in c]
    shards = all_shards(flat)[start : start + len(counts[group.rank])]
    model = net()
    step = make(group, model, shards=None)
    for _ in range(2):
        model.load_state_dict(net().state_dict())
        step.train_step(shards, squares)
    return error(model, reference(flat))


def clipped(group: Group) -> tuple[float, float]:
    model = net()
    result = make(group, model, mode="exact", clip_norm=0.01).train_step(mine(group), squares)
    return result.grad_norm, float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm())


def released(group: Group) -> bool:
    """A TrainStep that is dropped leaves no hooks behind that hold its buckets."""
    model = net()
    step = make(group, model, mode="exact")
    step.train_step(mine(group), squares)
    gone = weakref.ref(step._gradients)
    del step
    gc.collect()
    make(group, model).train_step(mine(group), squares)
    return gone() is None


CASES = [
    exact_mean, low_precision, piecewise_bfloat16, tokens, scaler_overflow, nonfinite, unused, shared_and_sparse,
    compiled, further_sums, changed_model, unlike_workers, start_values, random_numbers, talking, failing,
    unreadable, bad_losses, bad_settings, any_number, clipped, released,
]  # fmt: skip


def run_cases(group: Group) -> dict[str, Any]:
    return each(group, *CASES)


RUNS: dict[int, list[dict[str, Any]]] = {}


@pytest.fixture(params=WORLD_SIZES)
def found(request):
    """What every worker found in every case, by rank."""
    n = request.param
    if n not in RUNS:
        RUNS[n] = launch.run(run_cases, n, timeout_seconds=170)
    return RUNS[n]


def same(found: list[dict[str, Any]], case: str) -> Any:
    """What all workers found alike."""
    for result in found[1:]:
        assert result[case] == found[0][case]
    return found[0][case]


def raised(found: Any, kind: str, *fragments: str) -> None:
    assert found[0] == kind, found
    for fragment in fragments:
        assert fragment in found[1]


def test_the_mean_is_exact(found):
    assert max(same(found, "exact_mean").values()) < 1e-6
    assert same(found, "tokens") < 1e-6
    assert same(found, "any_number") < 1e-6


def test_low_precision(found):
    errors = same(found, "low_precision")
    assert max(errors.values()) < 0.03
    assert same(found, "piecewise_bfloat16") == 1.0


def test_an_overflow_skips_on_all_workers_and_the_clock_stands(found):
    both = same(found, "scaler_overflow")
    for result in both.values():
        assert result["skipped"] == (False, 0, 0, True, 2.0**9)
        assert result["then"] == (True, 1, 1, (0.01,))
        assert result["error"] < 5e-3
    digest = both["exact"]["digest"]
    assert digest == RUNS.setdefault("overflow", digest)  # at every world size


def test_what_is_not_finite_is_named_or_skipped(found):
    n, result = len(found), same(found, "nonfinite")
    rank = next(r for r in range(n) if 2 in shard_range(4, n, r))
    raised(result["loss raise"], "SpecError", "loss of shard 2", *([f"rank {rank} of {n}"] if n > 1 else []))
    raised(
        result["gradient raise"], "SpecError", "gradient of `b.weight`", f"on shard 2 (rank {rank} of {n})"
    )
    assert result["loss skip"][:2] == result["gradient skip"][:2] == ("", "False")
    assert all(untouched for _, _, untouched in result.values())


def test_unused_parameters(found):
    for mode, result in same(found, "unused").items():
        assert result["c has no gradient"], mode
        assert result["error"] < 1e-6
        raised(result["strict"], "SpecError", "`c.weight`", "find_unused_parameters")


def test_shared_and_sparse_parameters(found):
    result = same(found, "shared_and_sparse")
    raised(result.pop("refused"), "SpecError", "sparse=True")
    assert max(result.values()) < 1e-6


def test_compiled_models_have_the_same_bits(found):
    digest, n_graphs = same(found, "compiled")
    assert n_graphs == 1  # for the shards' shape; none for the trial's halves, and not silently none
    assert digest == RUNS.setdefault("compiled", digest)


def test_further_sums(found):
    sums, count, mean, loss = same(found, "further_sums")
    assert (sums, count, mean) == ({"samples": 12.0, "zero": 0.0, "third": 1.0}, 24.0, 0.5)
    assert loss == RUNS.setdefault("loss", loss)


def test_a_changed_model_is_refused_on_all_workers(found):
    result = same(found, "changed_model")
    words = {
        "unfreeze": "`b.bias` was unfrozen",
        "freeze": "`b.weight` was frozen",
        "replace": "`a.weight` was replaced",
        "swap": "was added, removed or replaced",
        "add": "was added, removed or replaced",
        "fill": "`late` was added",
        "cast": "was moved",
    }
    for name, text in words.items():
        raised(result[name], "SpecError", text, "Make a new TrainStep")


def test_unlike_workers_are_refused(found):
    if len(found) == 1:
        return
    result = same(found, "unlike_workers")
    raised(result["frozen"], "SpecError", "b.weight", "trainable", "frozen")
    raised(result["shape"], "SpecError", "`b.bias`", f"rank {len(found) - 1} of {len(found)}")
    raised(result["settings"], "SpecError", "clip_norm=2.0", "clip_norm=1.0")


def test_rank_0_counts_at_the_start(found):
    assert same(found, "start_values")


def test_random_numbers_depend_on_the_shard_alone(found):
    result = same(found, "random_numbers")
    assert result["losses"] == RUNS.setdefault("noise", result["losses"])
    assert result["losses"][0] != result["losses"][1]
    assert result["untouched"]
    assert result["moved by reading"]


def test_a_loss_over_the_global_batch_must_be_declared(found):
    result = same(found, "talking")
    if len(found) > 1:
        raised(result["exact"], "SpecError", "talks to other workers", "loss_fn.collective")
    assert result["declared"] == result["fast"] == ("", "1")


def test_a_failing_worker_raises_on_all_and_leaves_nothing(found):
    n, result = len(found), same(found, "failing")
    for mode in ("fast", "exact"):
        where = [f"rank {n - 1} of {n}"] if n > 1 else []
        raised(result[mode], "AgreementError", "no such row", "_break_last", "Traceback", *where)
        assert result[f"{mode} untouched"]
        assert result[f"{mode} goes on"]


def test_an_error_while_reading_raises_on_all(found):
    raised(same(found, "unreadable"), "AgreementError", "disk is gone")


def test_bad_losses(found):
    result = same(found, "bad_losses")
    words = {
        "mean": "expected a sum", "vector": "scalar", "float": "scalar", "alone": "(loss_sum, count)",
        "negative": "count >= 0", "nan": "count >= 0", "zero": "count 0 on all",
        "loss without count": "with count 0", "count with gradient": "has a gradient",
        "detached": "does not depend", "sums": "dict", "sum": "`x`", "too few": "`shards`",
    }  # fmt: skip
    for name, text in words.items():
        raised(result[name], "SpecError", text)


def test_bad_settings(found):
    result = same(found, "bad_settings")
    words = {
        "mode": "'quick'", "no shards": "exact mode needs", "few shards": "world_size", "clip": "`clip_norm`",
        "micro": "`micro_batch_size`", "choice": "'ignore'", "other model": "not the model's", "part": "`b.weight`",
        "frozen": "trainable", "device": "meta",
    }  # fmt: skip
    for name, text in words.items():
        raised(result[name], "SpecError", text)


def test_clipping_uses_the_norm_of_the_mean(found):
    before, after = same(found, "clipped")
    right = torch.cat([r.reshape(-1) for r in reference(COUNTS)]).norm()
    assert before == pytest.approx(float(right), rel=1e-6)
    assert after == pytest.approx(0.01, rel=1e-6)


def test_a_dropped_step_is_released(found):
    assert same(found, "released")


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in the backward")


def explode(group: Group) -> None:
    def loss(m: nn.Module, shard: Shard) -> tuple[Tensor, int]:
        total, count = squares(m, shard)
        return (_Explode.apply(total) if shard.index == 3 else total), count

    make(group, net()).train_step(mine(group), loss)


def test_a_failing_last_backward_ends_the_job_with_its_traceback():
    since = time.monotonic()
    with pytest.raises(WorkerError, match="in the backward") as caught:
        launch.run(explode, 2, timeout_seconds=100)
    assert caught.value.rank == 1
    assert time.monotonic() - since < 60


def cast_alone(group: Group) -> None:
    model = net()
    step = make(group, model)
    step.train_step(mine(group), squares)
    if group.rank == 1:
        model.double()
    step.train_step(mine(group), squares)


def test_a_model_that_is_cast_on_one_worker_ends_the_job_and_says_so():
    """Its share of DDP's memory was cast with it, so it cannot even take part in the backward of the others."""
    since = time.monotonic()
    with pytest.raises((WorkerError, SpecError), match="was moved from torch"):
        launch.run(cast_alone, 2, timeout_seconds=100)
    assert time.monotonic() - since < 60


def test_errors_carry_the_step():
    group = Group.single()
    step = make(group, net())
    step.load_state_dict({"step": 7})
    with pytest.raises(AgreementError) as caught:
        step.train_step(mine(group), _break_last)
    assert caught.value.step == 7
    assert step.state_dict()["step"] == 7


def test_another_environment_is_named_before_the_first_step():
    group = Group.single()
    step = make(group, net(), mode="exact")
    state = json.loads(json.dumps(step.state_dict()))
    make(group, net(), mode="exact").load_state_dict(state)  # the same: no word
    state["environment"] |= {"threads": "7", "device": "another"}
    with pytest.warns(UserWarning, match="its bits may change") as caught:
        step.load_state_dict({**state, "step": 3})
    assert step.step == 3
    words = sorted(str(each.message).split(": ", 1)[1] for each in caught)
    assert words == [
        "device: another then, cpu now",
        f"intra-op threads: 7 then, {torch.get_num_threads()} now",
    ]


def test_fast_mode_goes_on_with_the_bits_of_a_run_that_was_not_stopped():
    """Counts change from step to step; what a step expects is part of the state."""
    group = Group.single()
    digests = []
    for stop in (None, 2):
        model = net()
        step = make(group, model)
        for i in range(4):
            if i == stop:
                state, weights = step.state_dict(), step.optimizer.state_dict()
                step = make(group, model)
                step.load_state_dict(state)
                step.optimizer.load_state_dict(weights)
            step.train_step(mine(group, [6, 3 + i, 2, 1], i), squares)
        digests.append(state_digest(model, step.optimizer))
    assert digests[0] == digests[1]


def test_a_loader_with_fewer_samples_than_shards_is_refused():
    with pytest.raises(SpecError):
        ShardLoader(list(range(10)), 3, 4, group=Group.single())
