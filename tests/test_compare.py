"""Comparisons: clean runs agree, planted faults are found where they were planted, empty proofs are refused."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from samestep import compare, launch, step
from samestep.cli.compare import _judge as judge
from samestep.compare import Recorder, _bounds, _pair, _sketch
from samestep.compare._result import TWO_WORKERS
from samestep.errors import SpecError

N_STEPS = 4
FIRST = "0.weight"  # in registration order


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    return x, (x @ torch.randn(8, 3, generator=generator)).argmax(1)


def batch_ids(t, fault, group):
    """The samples of a step: 22 when they are to fall unevenly, 24 otherwise."""
    seed = 100 + t + (1000 if fault.startswith("order") and group.world_size > 1 else 0)
    ids = torch.randperm(256, generator=torch.Generator().manual_seed(seed))
    ids = ids[: 22 if fault == "mean of means" else 24]
    return ids if fault == "same batch" else ids.tensor_split(group.world_size)[group.rank]


def make_model(fault, group):
    torch.manual_seed(7 + (fault == "init" and group.rank == 1))
    if fault.startswith("transformer"):
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        return nn.Sequential(nn.Unflatten(1, (4, 2)), nn.Linear(2, 8), block, nn.Flatten(), nn.Linear(32, 3))
    norm = [nn.BatchNorm1d(16)] if fault == "batchnorm" else []
    return nn.Sequential(nn.Linear(8, 16), *norm, nn.Tanh(), nn.Linear(16, 3))


def reduce_by_hand(model, fault, world_size):
    for name, parameter in model.named_parameters():
        if fault == "not reduced" and name == "2.bias":
            continue
        if world_size > 1:
            dist.all_reduce(parameter.grad)
        if fault != "sum":
            parameter.grad /= world_size


def train(group, folder, fault, n_steps=N_STEPS, by_hand=("init", "not reduced", "sum")):
    model = make_model(fault, group)
    wrapped = group.world_size > 1 and fault not in by_hand
    ddp = DistributedDataParallel(model) if wrapped else model
    lr = 0.1 * (group.world_size if fault == "lr" else 1)
    if fault == "adamw" or fault.startswith("transformer"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    recorder = Recorder(folder, group=group)
    recorder.record(0, ddp, optimizer)
    x, y = data()
    for t in range(n_steps):
        ids = batch_ids(t, fault, group)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(x[ids]), y[ids])
        (loss * (0.0 if fault == "zero" else 1.0)).backward()
        if fault == "small" and group.world_size > 1 and t == 2:
            model[0].weight.grad *= 1 + 1e-3
        if fault == "transformer, vanished" and group.world_size > 1 and t == 2:
            model[2].linear1.bias.grad.zero_()
        if not wrapped:
            reduce_by_hand(model, fault, group.world_size)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        if fault == "update" and group.world_size > 1:
            with torch.no_grad():
                for p, old in zip(model.parameters(), before):
                    p.copy_(old + (p - old) * group.world_size)
        constant = {"constant": 1.0}.get(fault, loss)
        told = None if fault == "order, untold" else ids
        recorder.record(t + 1, ddp, optimizer, loss=constant, samples=told)


def train_exact(group, folder):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepper = step.TrainStep(model, optimizer, group=group, shards=4, mode="exact")
    recorder = Recorder(folder, group=group)
    recorder.record(0, model, optimizer)
    x, y = data()
    for t in range(N_STEPS):
        ids = torch.arange(24 * t, 24 * t + 24)
        mine = ids.view(4, 6).tensor_split(group.world_size)[group.rank]
        result = stepper.train_step([(x[i], y[i]) for i in mine], sums)
        recorder.record(t + 1, model, optimizer, loss=result.loss, samples=mine.reshape(-1))


def sums(model, shard):
    return cross_entropy(model(shard[0]), shard[1], reduction="sum"), len(shard[1])


FAULTS = (
    "none",
    "adamw",
    "transformer",
    "transformer, vanished",
    "mean of means",
    "lr",
    "update",
    "batchnorm",
    "init",
    "not reduced",
    "sum",
    "order",
    "order, untold",
    "small",
    "zero",
    "constant",
    "same batch",
)


def train_all(group, base):
    train_exact(group, base / f"exact-{group.world_size}")
    train(group, base / f"short-{group.world_size}", "none", n_steps=1)
    for fault in FAULTS:
        train(group, base / f"{fault}-{group.world_size}", fault)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = tmp_path_factory.mktemp("traces")
    for n in (1, 2, 4):
        launch.run(train_all, n, base, timeout_seconds=150)
    return base


@pytest.fixture
def traces(base):
    return lambda fault, n=4: compare.compare(base / f"{fault}-1", base / f"{fault}-{n}")


# Clean runs.


@pytest.mark.parametrize("n", [2, 4])
def test_exact_mode_is_exact(traces, n):
    found = traces("exact", n)
    assert found.verdict == "exact"
    assert found.proves
    assert found.exit_code == 0
    assert found.parted is None
    assert len([cell for cell in found.cells if cell.phase == "buffers"]) == N_STEPS + 1


@pytest.mark.parametrize("fault", ["none", "adamw", "transformer"])
@pytest.mark.parametrize("n", [2, 4])
def test_plain_ddp_is_within(traces, fault, n):
    found = traces(fault, n)
    assert found.verdict == "within", found.sentence()
    assert found.proves
    assert found.first is None
    assert found.parted is not None
    assert found.parted[:2] == (1, "gradients")
    assert all(cell.judged for cell in found.cells)
    assert not any("not judged" in text or "wider" in text for text in found.warnings)
    # Nothing that depends on rounding is known before the first update.
    assert {cell.verdict for cell in found.cells if cell.step == 0} == {"exact"}


def test_two_workers_only_is_a_warning(traces):
    assert any("2 workers only" in text for text in traces("none", 2).warnings)
    assert not any("2 workers only" in text for text in traces("none", 4).warnings)


def test_the_command_does_not_ask_for_4_workers_when_it_had_them(base):
    runs = [compare.read(base / f"none-{n}") for n in (1, 2, 4)]
    assert [one.warnings for one in judge(runs, explain=False)[0]] == [(), ()]
    assert [one.warnings for one in judge(runs[:2], explain=False)[0]] == [(TWO_WORKERS,)]


# Planted faults: (step, phase, tensor, kind).


@pytest.mark.parametrize(
    ("fault", "place", "words"),
    [
        ("mean of means", (1, "gradients", FIRST, "runs"), "weighted"),
        ("lr", (0, "options", "0.lr", "runs"), "the value is 4 x the reference"),
        ("update", (1, "parameters", FIRST, "runs"), "the update is 4 x the reference"),
        ("batchnorm", (1, "gradients", FIRST, "runs"), "BatchNorm"),
        ("init", (0, "parameters", FIRST, "replicas"), "did not begin with the same values"),
        ("not reduced", (1, "gradients", "2.bias", "replicas"), "not reduced"),
        ("sum", (1, "gradients", FIRST, "runs"), "the gradient is 4 x the reference"),
        ("order", (1, "samples", "samples", "runs"), "sampler"),
        ("order, untold", (1, "gradients", FIRST, "runs"), "mean over the global batch"),
    ],
)
def test_planted_faults_are_found_where_they_are(traces, fault, place, words):
    found = traces(fault)
    assert found.verdict == "different"
    assert found.exit_code == 1
    first = found.first
    assert (first.step, first.phase, first.tensor, first.kind) == place
    assert words in first.sentence
    assert found.phase_verdicts()[first.phase] == "different"


def test_the_ranks_that_differ_are_named(traces):
    assert traces("init").first.ranks == (1,)
    assert len(traces("not reduced").first.ranks) == 3
    assert traces("sum").first.ranks == (0, 1, 2, 3)
    assert traces("sum").first.relative == pytest.approx(3.0, rel=1e-3)  # 4 x, less the 1 that is right
    assert traces("sum").first.ulps > 2**23  # two doublings, each 2**23 numbers apart


def test_a_fault_of_a_thousandth_that_begins_late_is_not_passed_over(traces):
    found = traces("small")
    assert all(cell.verdict == "within" or cell.verdict == "exact" for cell in found.cells if cell.step < 3)
    # It is smaller than one sample's share, so that it could be the kink of a ReLU: said, and not judged.
    blind = [cell.step for cell in found.cells if cell.phase == "gradients" and not cell.judged]
    assert blind == [3, 4]
    assert any("step 3 and 1 other are not judged" in text for text in found.warnings)


def test_a_gradient_that_vanishes_in_a_transformer_is_not_passed_over(traces):
    found = traces("transformer, vanished")
    # One bias of many is less than a sample's share, so it is not called different; nor is it called judged.
    blind = [cell.step for cell in found.cells if cell.phase == "gradients" and not cell.judged]
    assert blind == [3, 4]
    assert any("step 3 and 1 other are not judged" in text for text in found.warnings)


# What proves nothing.


@pytest.mark.parametrize(
    ("fault", "n", "words"),
    [
        ("zero", 4, "every gradient is zero"),
        ("constant", 4, "the loss is 1 at every step"),
        ("same batch", 4, "have the same samples at every step"),
        ("short", 4, "1 common step with gradients"),
    ],
)
def test_empty_proofs_are_refused(traces, fault, n, words):
    found = traces(fault, n)
    assert any(words in text for text in found.refusals)
    assert found.exit_code == (1 if found.verdict == "different" else 2)


def one_run(folder, *, restore=None, n_steps=6, skip_start=False, dtype=torch.float32, nudge=0.0):
    """Train alone; `restore` is (step, state) to go on from. Returns the states after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = 0
    if restore is not None:
        start, (weights, history) = restore
        model.load_state_dict(weights)
        optimizer.load_state_dict(history)
    recorder = Recorder(folder)
    if not skip_start:
        recorder.record(start, model, optimizer)
    x, y = data()
    states = {}
    for t in range(start, n_steps):
        optimizer.zero_grad()
        ids = torch.arange(t * 16, t * 16 + 16)
        loss = cross_entropy(model(x[ids].to(dtype)), y[ids])
        loss.backward()
        model[0].weight.grad *= 1 + nudge
        optimizer.step()
        recorder.record(t + 1, model, optimizer, loss=loss, samples=ids)
        states[t + 1] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return states


def test_a_resumed_run_against_the_continuous_one(tmp_path):
    states = one_run(tmp_path / "whole")
    one_run(tmp_path / "resumed", restore=(3, states[3]))
    found = compare.compare(tmp_path / "whole", tmp_path / "resumed")
    assert found.verdict == "exact"
    assert found.proves
    assert min(cell.step for cell in found.cells) == 3
    # Moments that are dropped on resume, which the loss does not show.
    weights, history = states[3]
    one_run(tmp_path / "forgot", restore=(3, (weights, {**history, "state": {}})))
    found = compare.compare(tmp_path / "whole", tmp_path / "forgot")
    assert (found.first.step, found.first.phase) == (3, "optimizer")
    assert found.first.tensor == "0.weight.momentum_buffer"


def test_without_the_start_nothing_is_proven(tmp_path):
    one_run(tmp_path / "a", skip_start=True)
    one_run(tmp_path / "b", skip_start=True)
    found = compare.compare(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 2
    assert "call record(0, model, optimizer)" in found.sentence()


def test_a_trace_against_itself_proves_nothing(tmp_path):
    one_run(tmp_path / "a")
    assert "compared with itself" in compare.compare(tmp_path / "a", tmp_path / "a").sentence()


def test_a_bound_wider_than_the_smallest_fault_is_refused(tmp_path):
    # bfloat16 has 8 bits, so that 1 sample of 16 cannot be told from rounding.
    for name, nudge in (("a", 0.0), ("b", 2.0**-7)):
        one_run(tmp_path / name, dtype=torch.bfloat16, nudge=nudge)
    found = compare.compare(tmp_path / "a", tmp_path / "b")
    assert found.exit_code == 2
    assert "wider than 0.062 of the gradient" in found.sentence()


# Files.


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("SAMESTEP_TRACE", raising=False)
    compare.record(0, nn.Linear(2, 2))
    monkeypatch.setenv("SAMESTEP_TRACE", str(tmp_path / "t"))
    monkeypatch.setenv("SAMESTEP_TRACE_STEPS", "1")
    model = nn.Linear(2, 2)
    compare.record(0, model)
    with pytest.raises(SystemExit) as left:
        compare.record(1, model)
    assert left.value.code == 0
    assert list(compare.read(tmp_path / "t").ranks[0]) == [0, 1]


def test_steps_go_up_and_folders_are_new(tmp_path):
    recorder = Recorder(tmp_path)
    model = nn.Linear(2, 2)
    recorder.record(0, model)
    with pytest.raises(SpecError, match="expected more than 0"):
        recorder.record(0, model)
    with pytest.raises(SpecError, match="holds a trace"):
        Recorder(tmp_path).record(0, model)


def test_damaged_traces(tmp_path):
    one_run(tmp_path / "a", n_steps=3)
    file = tmp_path / "a" / "rank-0.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-40])  # as after a kill
    trace = compare.read(tmp_path / "a")
    assert list(trace.ranks[0]) == [0, 1, 2]
    assert any("cut" in note for note in trace.notes)
    lines = whole.splitlines()
    file.write_text("\n".join([lines[0], lines[1][:50], *lines[2:]]) + "\n")
    with pytest.raises(SpecError, match="line 2 is damaged"):
        compare.read(tmp_path / "a")
    file.write_text(lines[0].replace('"world_size": 1', '"world_size": 2') + "\n")
    with pytest.raises(SpecError, match=r"rank-1\.jsonl"):
        compare.read(tmp_path / "a")
    with pytest.raises(SpecError, match=r"rank-0\.jsonl"):
        compare.read(tmp_path / "nothing")


def test_whole_tensors_are_kept_at_powers_of_two(tmp_path):
    one_run(tmp_path / "a", n_steps=6)
    steps = sorted(int(file.stem.rsplit("-", 1)[1]) for file in tmp_path.glob("a/*.safetensors"))
    assert steps == [0, 1, 2, 4]
    entry = compare.read(tmp_path / "a").ranks[0][4]
    assert entry.norm("parameters", "0.weight") == pytest.approx(
        entry.tensors["parameters/0.weight"].double().norm().item(), rel=1e-12
    )


# Laws of the parts.


@given(n=st.integers(1, 200_000), seed=st.integers(0, 1000), size=st.sampled_from([1e-7, 1.0, 1e6]))
def test_sketches_tell_distances(n, seed, size):
    generator = torch.Generator().manual_seed(seed)
    a, d = torch.randn(2, n, generator=generator, dtype=torch.float64)
    rows = _sketch.sketches([a, a + size * d])
    true = (size * d).norm().item()
    # 16 sums: about a third off, and three times that is rare.
    assert 0.3 * true < _sketch.distance(rows[0], rows[1]) < 2.2 * true
    assert rows[0][_sketch.WIDTH] == pytest.approx(a.norm().item(), rel=1e-12)
    assert (_sketch.decode(_sketch.encode(rows[0])) == rows[0]).all()


def test_a_constant_shift_of_a_large_tensor_is_not_lost():
    # The signs of later chunks must not repeat those of the first alike.
    a = torch.zeros(1_000_000)
    rows = _sketch.sketches([a, a + 1])
    assert 500 < _sketch.distance(rows[0], rows[1]) < 1800  # 1000, give or take


def test_ulps():
    one = torch.tensor([1.0, -0.0])
    assert _pair.ulps_between(one, torch.tensor([1.0, 0.0])) == 0
    assert _pair.ulps_between(one, torch.nextafter(one, torch.tensor([2.0, 1.0]))) == 1
    tiny = torch.finfo(torch.float32).smallest_normal * 2**-23
    assert _pair.ulps_between(torch.tensor([-tiny]), torch.tensor([tiny])) == 2
    assert _pair.ulps_between(torch.tensor([math.nan]), torch.tensor([1.0])) is None


@given(n=st.integers(2, 2000), seed=st.integers(0, 10_000))
def test_orders_of_a_sum_differ_by_less_than_the_bound(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    forward, backward = torch.zeros(()), torch.zeros(())
    for value in x:
        forward += value
    for value in x.flip(0):
        backward += value
    relative = _bounds.confidence(1) * _bounds.unit_roundoff(torch.float32) * math.sqrt(n)
    assert abs(float(forward) - float(backward)) <= relative * float(x.abs().sum())
