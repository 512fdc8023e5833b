"""Checkpoints: the same bits on any number of workers, whole or not there, damage always found."""

import errno
import json
import logging
import math
import multiprocessing
import os
import pickletools
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from samestep import launch
from samestep.checkpoint import Checkpointer, _storage, _writing, to_safetensors
from samestep.checkpoint._codec import decode, encode
from samestep.checkpoint._folder import find
from samestep.errors import CheckpointError, SpecError
from samestep.group import Group
from samestep.scheduler import LRScheduler
from samestep.schedules import linear_warmup
from samestep.sharding import ShardLoader
from workers import state_digest

ALONE = Group.single()


class Net(nn.Module):
    """Tied weights, BatchNorm, bfloat16, an empty tensor, a buffer that is not saved, a state that is no tensor."""

    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4, bias=False)
        self.tied = nn.Linear(width, 4, bias=False)
        self.tied.weight = self.last.weight
        self.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0, 5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.started = False

    def forward(self, x):
        return (
            self.tied(self.norm(self.first(x)))
            + self.last(self.norm(self.first(x)))
            + self.bf16.float().sum()
        )

    def get_extra_state(self):
        return {"started": self.started}

    def set_extra_state(self, state):
        self.started = state["started"]


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length=40):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.full((4,), float(i))

    def fingerprint(self):
        return f"numbers {self.length}"


def build(group=ALONE, seed=0, width=6, batch=8, dataset=40):
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LRScheduler(optimizer, linear_warmup(4))
    loader = ShardLoader(Numbers(dataset), batch, 4, group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "scaler": scaler,
    }


def train(things, n_steps):
    """Take steps whose gradients do not depend on workers; good enough to move every state."""
    for _ in zip(range(n_steps), things["loader"]):
        torch.manual_seed(7)
        things["optimizer"].zero_grad()
        things["model"](torch.randn(5, 4)).square().sum().backward()
        things["optimizer"].step()
    things["model"].started = True


def facts(things):
    model, optimizer = things["model"], things["optimizer"]
    return {
        "bits": state_digest(model, optimizer),
        "started": model.started,
        "options": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "dtypes": [str(v.dtype) for state in optimizer.state.values() for v in state.values()],
        "rest": [things[name].state_dict() for name in ("scheduler", "loader", "scaler")],
    }


def saved(folder, step=3, **kwargs):
    things = build()
    train(things, step)
    Checkpointer(folder, group=ALONE, **kwargs).save(step, **things)
    return things


# -- the same bits, whoever saved and whoever loads ----------------------------------------------------------


def save_and_restore(group, folder, asynchronous):
    things = build(group)
    train(things, 3)
    with Checkpointer(folder, group=group, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(3, **things, extra={"a": (1, math.inf), 2: b"x"})
        kept = facts(things)
        if asynchronous:  # the loop goes on, and must not reach what is being written
            train(things, 1)
    other, extra = build(group, seed=1), {"old": 1}
    step = Checkpointer(folder, group=group).restore(**other, extra=extra)
    return step, kept == facts(other), extra == {"a": (1, math.inf), 2: b"x"}, facts(other)


def restore_only(group, folder):
    things = build(group, seed=2)
    return Checkpointer(folder, group=group).restore(**things), facts(things)


def cases(group, base):
    """Run all cases of one world size in one launch; `base` holds what one worker saved."""
    found = {
        "sync": save_and_restore(group, f"{base}/sync", False),
        "async": save_and_restore(group, f"{base}/async", True),
        "raise": full_disk(group, f"{base}/raise", "raise"),
        "continue": full_disk(group, f"{base}/continue", "continue"),
        "from one": restore_only(group, f"{base}/alone"),
    }
    if group.world_size > 1:
        found["damage"] = see_damage_on_rank_one(group, f"{base}/two")
        found["differs"] = differs(group, f"{base}/differs")
        found["misfit"] = misfit(group, f"{base}/alone")
    return found


@pytest.fixture(scope="module", params=[1, 2, 3])
def run(request, tmp_path_factory):
    """Return the folder and the results by rank of all cases at one world size."""
    base = tmp_path_factory.mktemp("run")
    saved(base / "alone")
    things = build()
    for step in (1, 2):
        train(things, 1)
        Checkpointer(base / "two", group=ALONE).save(step, **things)
    if request.param == 1:
        return base, [cases(ALONE, str(base))]
    return base, launch.run(cases, request.param, str(base), timeout_seconds=150)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_restores_the_bits_on_any_number_of_workers(run, how):
    base, results = run
    assert all(result[how][:3] == (3, True, True) for result in results)
    things = build(seed=3)
    assert Checkpointer(base / how, group=ALONE).restore(**things, allow=["extra"]) == 3
    reference = build()
    train(reference, 3)
    assert facts(things) == facts(reference) == results[0][how][3]
    assert [path.name for path in (base / how).iterdir()] == ["step-0000000003"]
    assert all(result["from one"] == (3, facts(reference)) for result in results)


def test_every_worker_writes_a_part_and_every_tensor_once(run):
    base, results = run
    n = len(results)
    folder = base / "sync" / "step-0000000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [f"tensors-{rank}-of-{n}.safetensors" for rank in range(n)]
    names = []
    for file in manifest["files"]:
        with safe_open(folder / file, "pt") as opened:
            names += list(opened.keys())
    assert sorted(names) == sorted(manifest["tensors"])
    assert manifest["aliases"] == {"model.tied.weight": "model.last.weight"}
    assert manifest["samples_consumed"] == 24
    assert manifest["world_size"] == n
    assert "optimizer.model.first.weight.exp_avg" in names
    assert not any("scratch" in name for name in names)


def test_no_checkpoint_is_none(tmp_path):
    assert Checkpointer(tmp_path / "new", group=ALONE).restore(**build()) is None
    assert Checkpointer(tmp_path / "new", group=ALONE).latest() is None


def test_a_fresh_optimizer_gets_its_moments_and_the_order_of_parameters_does_not_matter(tmp_path):
    a, b = nn.Linear(3, 2), nn.Linear(2, 2)
    model = nn.Sequential(a, b)
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    Checkpointer(tmp_path, group=ALONE).save(1, model=model, optimizer=optimizer)
    c, d = nn.Linear(3, 2), nn.Linear(2, 2)
    other = torch.optim.AdamW([*d.parameters(), *c.parameters()], lr=7.0)
    assert Checkpointer(tmp_path, group=ALONE).restore(model=nn.Sequential(c, d), optimizer=other) == 1
    for mine, theirs in [(c.weight, a.weight), (c.bias, a.bias), (d.weight, b.weight), (d.bias, b.bias)]:
        assert torch.equal(mine, theirs)
        assert other.state[mine].keys() == optimizer.state[theirs].keys()
        assert all(torch.equal(v, optimizer.state[theirs][k]) for k, v in other.state[mine].items())
    assert other.param_groups[0]["lr"] == 0.001


class WideMoments(torch.optim.Optimizer):
    """Keeps float32 moments of bfloat16 parameters; torch's own load_state_dict would round them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moment"] = p.grad.float() / 3


def test_moments_keep_their_own_dtype(tmp_path):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = WideMoments(model.parameters())
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    Checkpointer(tmp_path, group=ALONE).save(1, model=model, optimizer=optimizer)
    other = nn.Linear(2, 2, dtype=torch.bfloat16)
    fresh = WideMoments(other.parameters())
    Checkpointer(tmp_path, group=ALONE).restore(model=other, optimizer=fresh)
    assert torch.equal(fresh.state[other.weight]["moment"], optimizer.state[model.weight]["moment"])


class Compiled(nn.Module):
    """Holds its module the way torch.compile does; the real one costs seconds and warnings to import."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_wrappers_do_not_change_names(tmp_path):
    model = nn.Linear(2, 2)
    Checkpointer(tmp_path, group=ALONE).save(1, model=Compiled(model))
    other = nn.Linear(2, 2)
    assert Checkpointer(tmp_path, group=ALONE).restore(model=other) == 1
    assert torch.equal(other.weight, model.weight)


def test_torchs_own_schedulers_come_back(tmp_path):
    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "scheduler": scheduler, "plateau": plateau}

    things = make()
    for _ in range(3):
        things["optimizer"].step()
        things["scheduler"].step()
    Checkpointer(tmp_path, group=ALONE).save(3, **things)
    other = make()
    Checkpointer(tmp_path, group=ALONE).restore(**other)
    assert other["scheduler"].state_dict() == things["scheduler"].state_dict()
    assert isinstance(other["scheduler"].milestones, Counter)
    assert other["plateau"].state_dict() == things["plateau"].state_dict()
    assert other["optimizer"].param_groups[0]["lr"] == things["optimizer"].param_groups[0]["lr"]


@pytest.mark.parametrize(
    "value",
    [None, True, 2**80, 0.1, "ü", math.inf, -math.inf, b"\x00", {"a": {"b": []}}, {}, [], "", torch.float16],
)
def test_plain_values_survive_json(value):
    check_survives(value)


@pytest.mark.parametrize(
    "value", [(1, (2,)), {1: 2, (1, 2): [None]}, {"$tensor": 1}, Counter({3: 2}), {None: 1, True: 2}]
)
def test_further_values_survive_json(value):
    check_survives(value)


def check_survives(value):
    data = json.loads(json.dumps(encode(value, "v", lambda name, t: name)))
    found = decode(data, lambda name: None)
    assert found == value
    assert type(found) is type(value)


def test_a_value_that_json_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"`extra\.a\.0`: expected .* got object"):
        Checkpointer(tmp_path, group=ALONE).save(1, extra={"a": [object()]})
    assert not list(tmp_path.iterdir())


# -- readable by others, and nothing in it is run ------------------------------------------------------------


def test_others_read_it(tmp_path):
    things = saved(tmp_path)
    folder = Checkpointer(tmp_path, group=ALONE).latest()
    out = to_safetensors(folder, tmp_path / "model.safetensors", thing="model")
    other = Net()
    tensors = load_file(out)
    other.load_state_dict({**tensors, "_extra_state": {"started": True}})
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), things["model"].parameters()))
    everything = load_file(to_safetensors(folder, tmp_path / "all.safetensors"))
    assert torch.equal(everything["model.tied.weight"], things["model"].tied.weight)
    with pytest.raises(SpecError, match="nothing"):
        to_safetensors(folder, tmp_path / "none", thing="nothing")


def test_torchs_distributed_checkpoint_reads_it(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    things = saved(tmp_path)
    target = {"model.first.weight": torch.zeros(6, 4), "model.bf16": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(
            target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step-0000000003")), no_dist=True
        )
    assert torch.equal(target["model.first.weight"], things["model"].first.weight)
    assert torch.equal(target["model.bf16"], things["model"].bf16)


def test_nothing_is_pickled(tmp_path, monkeypatch):
    saved(tmp_path)

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("pickle.Unpickler", refuse)
    monkeypatch.setattr("torch.load", refuse)
    assert Checkpointer(tmp_path, group=ALONE).restore(**build(seed=1)) == 3
    for file in (tmp_path / "step-0000000003").iterdir():
        with pytest.raises((ValueError, KeyError, UnicodeDecodeError)):
            list(pickletools.genops(file.read_bytes()))


# -- damage --------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    Checkpointer(tmp_path, group=ALONE).save(1, model=model, extra={"note": "x"})
    folder = tmp_path / "step-0000000001"
    checkpointer = Checkpointer(tmp_path, group=ALONE)
    tried = 0
    for file in folder.iterdir():
        whole = file.read_bytes()
        for at in range(len(whole)):
            broken = bytearray(whole)
            broken[at] ^= 1 << (at % 8)
            file.write_bytes(broken)
            assert checkpointer.latest() is None, (file.name, at)
            tried += 1
        file.write_bytes(whole)
    assert tried > 1000
    assert checkpointer.latest() == folder


def test_every_truncation_is_found_and_restore_falls_back(tmp_path):
    things = build()
    checkpointer = Checkpointer(tmp_path, group=ALONE)
    for step in (1, 2):
        train(things, 1)
        checkpointer.save(step, **things)
        if step == 1:
            first = facts(things)
    for file in (tmp_path / "step-0000000002").iterdir():
        whole = file.read_bytes()
        for content in [b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole + b"\x00", None]:
            if content is None:
                file.unlink()
            else:
                file.write_bytes(content)
            other = build(seed=1)
            assert checkpointer.restore(**other) == 1
            assert facts(other) == first
            assert [found.step for found in checkpointer.skipped] == [2]
            assert file.name in checkpointer.skipped[0].problem
        file.write_bytes(whole)
    assert checkpointer.restore(**build()) == 2


def test_a_damaged_one_is_told_of(tmp_path, caplog):
    saved(tmp_path)
    file = tmp_path / "step-0000000003" / "tensors-0-of-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checkpointer = Checkpointer(tmp_path, group=ALONE)
    with caplog.at_level(logging.WARNING):
        assert checkpointer.latest() is None
    assert "the values of `" in caplog.text
    assert "the values of `" in checkpointer.skipped[0].problem
    with pytest.raises(CheckpointError, match=r"expected a usable checkpoint, got 1 damaged.*the values of"):
        checkpointer.restore(**build())


def see_damage_on_rank_one(group, folder):
    things = build(group)
    checkpointer = Checkpointer(folder, group=group)
    read = _storage._read

    def flipped(file, into, path):
        data = read(file, into, path)
        if len(data) > 50 and "0000000002" in str(path):
            memoryview(into)[-1] ^= 1
        return data

    if group.rank == 1:
        _storage._read = flipped
    step = checkpointer.restore(**things)
    _storage._read = read
    return step, checkpointer.skipped[0].problem


def test_damage_that_one_worker_sees_sends_all_to_the_older_one(run):
    results = [result["damage"] for result in run[1] if len(run[1]) > 1]
    assert len(set(results)) <= 1
    for step, problem in results:
        assert step == 1
        assert "rank 1" in problem


# -- crashes and full disks ----------------------------------------------------------------------------------


def crash(folder, point):
    """Save once well, then die at the given call of the given kind; runs in a process of its own."""
    things = build()
    train(things, 1)
    checkpointer = Checkpointer(folder, group=ALONE, keep=1)
    checkpointer.save(1, **things)
    train(things, 1)
    name, left = point
    real = getattr(os, name)

    def dying(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0:
            if name == "write":
                real(args[0], memoryview(args[1])[: len(args[1]) // 2])
            os._exit(9)
        return real(*args, **kwargs)

    setattr(os, name, dying)
    checkpointer.save(2, **things)
    os._exit(0)


def in_child(target, *args):
    child = multiprocessing.get_context("fork").Process(target=target, args=args)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_crash_at_any_call_leaves_a_usable_checkpoint(tmp_path):
    reference = build()
    expected = []
    for _ in range(2):
        train(reference, 1)
        expected.append(facts(reference))
    seen = set()
    for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        for count in range(1, 60):
            folder = tmp_path / f"{name}-{count}"
            code = in_child(crash, str(folder), (name, count))
            things = build(seed=1)
            checkpointer = Checkpointer(folder, group=ALONE)
            step = checkpointer.restore(**things)
            assert step in (1, 2), (name, count)
            assert not checkpointer.skipped, (name, count)  # whole, or not there
            assert facts(things) == expected[step - 1]
            train(things, 1)
            checkpointer.save(step + 1, **things)
            assert not list(folder.glob(".saving-*"))  # what the crash has left is cleared away
            seen.add((name, step, code))
            shutil.rmtree(folder)
            if code == 0:
                break
        assert count > 1 or name in ("mkdir", "unlink", "rmdir"), name
    assert {("write", 1, 9), ("fsync", 1, 9), ("rename", 1, 9), ("rename", 2, 9)} <= seen


def killed(folder):
    things = build()
    things["extra"] = {"pad": "x" * 2_000_000}
    checkpointer = Checkpointer(folder, group=ALONE, keep=2)
    for step in range(1, 10_000):
        checkpointer.save(step, **things)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_a_random_moment_leaves_a_usable_checkpoint(tmp_path):
    for i in range(6):
        folder = tmp_path / str(i)
        child = multiprocessing.get_context("fork").Process(target=killed, args=(str(folder),))
        child.start()
        until = time.monotonic() + 60
        while not list(folder.glob("step-*")) and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(0.013 * i)
        child.kill()
        child.join()
        checkpointer = Checkpointer(folder, group=ALONE)
        assert checkpointer.restore(**build(), extra={}) >= 1
        assert not checkpointer.skipped


def full_disk(group, folder, on_error):
    """Fill the disk on the last rank alone: what it writes is refused half-way."""
    things = build(group)
    train(things, 1)
    checkpointer = Checkpointer(folder, group=group, on_error=on_error)
    checkpointer.save(1, **things)
    before = facts(things)
    train(things, 1)
    real = os.write
    if group.rank == group.world_size - 1:

        def refuse(file, data):
            if len(data) > 64:
                real(file, data[:10])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(file, data)

        os.write = refuse
    try:
        found = checkpointer.save(2, **things)
        text = ""
    except CheckpointError as error:
        found, text = error.step, error.message
    os.write = real
    return found, text, checkpointer.restore(**things), facts(things) == before


def test_a_full_disk_is_one_error_on_all_workers(run):
    base, results = run
    n = len(results)
    assert len({result["raise"] for result in results}) == 1
    step, text, restored, same = results[0]["raise"]
    assert step == 2
    assert "No space left on device" in text
    assert "earlier ones are untouched" in text
    assert n == 1 or f"rank {n - 1} of {n}" in text
    assert (restored, same) == (1, True)
    assert [path.name for path in (base / "raise").iterdir()] == ["step-0000000001"]
    assert [result["continue"] for result in results] == [(None, "", 1, True)] * n


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file.*(Not a directory|File exists)"):
        Checkpointer(tmp_path / "file" / "in", group=ALONE).save(1, **build())

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        Checkpointer(tmp_path / "closed", group=ALONE).save(1, **build())
    assert isinstance(caught.value.__cause__, PermissionError)
    checkpointer = Checkpointer(tmp_path / "closed", group=ALONE, asynchronous=True)
    checkpointer.save(1, **build())
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpointer.close()


# -- keeping and naming --------------------------------------------------------------------------------------


def test_keep_counts_usable_ones_only(tmp_path):
    things = build()
    checkpointer = Checkpointer(tmp_path, group=ALONE, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, **things)
    assert [found.step for found in find(tmp_path)] == [3, 2]
    (tmp_path / "step-0000000003" / "manifest.json").unlink()
    checkpointer.save(4, **things)
    assert [found.step for found in find(tmp_path) if not found.problem] == [4, 2]
    checkpointer.save(5, **things)
    assert [found.step for found in find(tmp_path)] == [5, 4]


def test_the_last_good_one_is_not_removed_for_one_that_fails(tmp_path, monkeypatch):
    things = build()
    checkpointer = Checkpointer(tmp_path, group=ALONE, keep=1, on_error="continue")
    checkpointer.save(1, **things)

    def refuse(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_writing, "publish", refuse)
    assert checkpointer.save(2, **things) is None
    assert checkpointer.restore(**things) == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    things = build()
    checkpointer = Checkpointer(tmp_path, group=ALONE)
    checkpointer.save(1, **things)
    train(things, 1)
    path = checkpointer.save(1, **things)
    assert [found.path for found in find(tmp_path)] == [path]
    other = build(seed=1)
    checkpointer.restore(**other)
    assert facts(other) == facts(things)


def test_a_later_step_is_not_hidden_behind(tmp_path):
    things = saved(tmp_path, step=3)
    with pytest.raises(CheckpointError, match=r"`step`: got 2, but .*step-0000000003"):
        Checkpointer(tmp_path, group=ALONE).save(2, **things)
    file = tmp_path / "step-0000000003" / "tensors-0-of-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checkpointer = Checkpointer(tmp_path, group=ALONE)
    assert checkpointer.latest() is None
    assert checkpointer.save(2, **things) is not None  # it is known to be damaged


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"keep": True}, {"on_error": "ignore"}])
def test_wrong_arguments(tmp_path, arguments):
    with pytest.raises(SpecError, match=next(iter(arguments))):
        Checkpointer(tmp_path, group=ALONE, **arguments)


# -- what does not fit ---------------------------------------------------------------------------------------


def refused(folder, things, allow=()):
    before = {name: facts(things) for name in things} if set(build()) <= set(things) else None
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(folder, group=ALONE).restore(**things, allow=allow)
    if before is not None:
        assert before == {name: facts(things) for name in things}, "a refused restore has changed something"
    return caught.value


def test_another_shape_dtype_or_name(tmp_path):
    saved(tmp_path)
    error = refused(tmp_path, build(width=7))
    assert "shape (6, 4) of torch.float32" in error.message
    assert "(7, 4)" in error.message
    things = build()
    things["model"].to(torch.float64)
    assert "torch.float64" in refused(tmp_path, things).message
    things = build()
    things["model"].extra = nn.Linear(1, 1, bias=False)
    assert refused(tmp_path, things).name == "model.extra.weight"
    assert Checkpointer(tmp_path, group=ALONE).restore(**things, allow=["model.extra.*"]) == 3
    things = build()
    del things["model"].norm.bias
    things["model"].norm.bias = None
    error = refused(
        tmp_path, {"model": things["model"]}, allow=["optimizer", "scheduler", "loader", "scaler"]
    )
    assert error.name == "model.norm.bias"
    assert "allow=['model.norm.bias']" in error.message


def test_another_loader_scheduler_or_optimizer(tmp_path):
    saved(tmp_path)
    error = refused(tmp_path, build(batch=12))
    assert "global_batch_size is 12 here and 8" in error.message
    assert (
        Checkpointer(tmp_path, group=ALONE).restore(**build(batch=12), allow=["loader.global_batch_size"])
        == 3
    )
    assert "numbers 44" in refused(tmp_path, build(dataset=44)).message
    things = build()
    del things["scheduler"]
    optimizer = torch.optim.SGD(things["model"].parameters(), lr=0.1)
    things["scheduler"], things["optimizer"] = LRScheduler(optimizer, linear_warmup(9)), optimizer
    assert "has a AdamW, this run a SGD" in refused(tmp_path, things).message
    things = build()
    things["optimizer"] = torch.optim.AdamW(things["model"].parameters(), lr=0.01)
    things["scheduler"] = LRScheduler(things["optimizer"], linear_warmup(9))
    assert "scheduler" in str(refused(tmp_path, things).name) or "recipe" in refused(tmp_path, things).message
    things = build()
    first, *rest = things["model"].parameters()
    things["optimizer"] = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    assert "1 param groups, this run 2" in refused(tmp_path, things).message


def test_things_that_are_missing_on_either_side(tmp_path):
    things = saved(tmp_path)
    del things["scaler"]
    assert refused(tmp_path, things).name == "scaler"
    assert Checkpointer(tmp_path, group=ALONE).restore(**things, scaler=None, allow=["scaler"]) == 3
    error = refused(tmp_path, {**build(), "extra": {}})
    assert "`extra`: asked for, not in the checkpoint" in error.message
    extra = {"kept": 1}
    assert Checkpointer(tmp_path, group=ALONE).restore(**build(), extra=extra, allow=["extra"]) == 3
    assert extra == {"kept": 1}
    with pytest.raises(CheckpointError, match="`extra`: expected state_dict"):
        Checkpointer(tmp_path, group=ALONE).restore(extra=3)


def test_untied_weights_that_differ_do_not_go_into_tied_ones(tmp_path):
    class Two(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            if tied:
                self.b = self.a

    Checkpointer(tmp_path, group=ALONE).save(1, model=Two(tied=False))
    assert "shares its memory" in refused(tmp_path, {"model": Two(tied=True)}).message


def test_another_format_version_is_not_passed_over(tmp_path, monkeypatch):
    things = saved(tmp_path)
    monkeypatch.setattr("samestep.checkpoint._manifest.FORMAT_VERSION", 0)
    train(things, 1)
    Checkpointer(tmp_path, group=ALONE).save(4, **things)
    monkeypatch.undo()
    error = refused(tmp_path, things)
    assert "expected format_version 1, got 0" in error.message
    assert Checkpointer(tmp_path, group=ALONE, keep=1).save(5, **things) is not None
    assert (tmp_path / "step-0000000004").is_dir()


def differs(group, folder):
    things = build(group)
    if group.rank == 1:
        things["optimizer"].param_groups[0]["weight_decay"] = 0.5
    try:
        Checkpointer(folder, group=group).save(1, **things)
    except CheckpointError as error:
        return error.name, error.rank, list(Path(folder).glob("*"))
    return None


def test_workers_that_differ_are_refused(run):
    results = [result["differs"] for result in run[1] if len(run[1]) > 1]
    assert results == [("optimizer", 1, [])] * len(results)


def misfit(group, folder):
    things = build(group, width=7 if group.rank == 1 else 6)
    try:
        Checkpointer(folder, group=group).restore(**things)
    except CheckpointError as error:
        return error.message, facts(things) == facts(build(group, width=7 if group.rank == 1 else 6))
    return None


def test_what_does_not_fit_on_one_worker_is_refused_on_all(run):
    results = [result["misfit"] for result in run[1] if len(run[1]) > 1]
    assert len(set(results)) <= 1
    for text, untouched in results:
        assert text.startswith(f"rank 1 of {len(results)}: `model.first.weight`")
        assert untouched
