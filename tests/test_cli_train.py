"""A run that is stopped, restarted or short of disk: what it says and leaves, and that its bits are the same."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.recipes.folder import RunFolder
from samestep.recipes.semantic_ids import job

SMALL = [
    "n_centroids=[8,8]",
    "latent_dim=4",
    "hidden=[16]",
    "steps=12",
    "warmup_steps=2",
    "global_batch_size=32",
]


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(12, 6))
    rows = (centers[generator.integers(12, size=200)] + 0.2 * generator.normal(size=(200, 6))).astype(
        np.float32
    )
    path = tmp_path_factory.mktemp("data") / "items.npy"
    np.save(path, rows)
    return path


def train(items, run, *words, settings=()):
    changes = [f"data={items}", *SMALL, "mode=exact", "checkpoint_every=5", *settings]
    options = [word for change in changes for word in ("--set", change)]
    return CliRunner().invoke(app, ["train", "semantic-ids", *options, "--out", str(run), *map(str, words)])


@pytest.fixture(scope="module")
def whole(items, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(items, run).exit_code == 0
    return run


def rows(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "samples_per_second"} for line in lines]


def assert_same(run, whole):
    for name in ("model.safetensors", "codebooks.safetensors", "semantic_ids.parquet", "quality.json"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert rows(run) == rows(whole)


def when(condition, do):
    """Do something from a thread as soon as a condition holds."""

    def watch():
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        do()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def n_steps(run):
    return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0


def test_sigterm_saves_at_a_step_and_ends_well(items, tmp_path):
    run, long = tmp_path / "run", ["steps=5000", "checkpoint_every=0"]
    thread = when(lambda: n_steps(run) >= 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    done = train(items, run, settings=long)
    thread.join()
    assert done.exit_code == 0, done.output
    step = int(re.search(r"stopped after (\d+) of 5000 steps; go on with --resume", done.stderr)[1])
    assert 3 <= step < 5000
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{step:010d}"]
    assert not (run / "manifest.json").exists()
    assert not list(run.glob("stacks-*"))


def test_a_stop_inside_the_initialization_keeps_what_is_initialized(items, whole, tmp_path, monkeypatch):
    run, axes, calls = tmp_path / "run", job.compute_axes, []

    def stopped_meanwhile(*arguments):
        calls.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # until the guard has seen it
        plain = [*arguments[:2], arguments[2]._pool]  # the axes themselves are still set
        return axes(*plain)

    monkeypatch.setattr(job, "compute_axes", stopped_meanwhile)
    done = train(items, run)
    assert done.exit_code == 0, done.output
    assert "before a step. Go on with --resume" in done.stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-0000000000"]
    assert train(items, run, "--resume").exit_code == 0
    assert calls == [1]  # not computed again
    assert_same(run, whole)


def elastic(monkeypatch, restarts, job_id="none"):
    monkeypatch.setattr("samestep.agent.die_with_agent", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")


def test_a_restarted_worker_goes_on_by_itself(items, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    elastic(monkeypatch, 0)
    assert train(items, run, "--stop-after", 7).exit_code == 0
    assert train(items, run).exit_code == 2  # another job may not take the folder over
    elastic(monkeypatch, 1)
    done = train(items, run)
    assert done.exit_code == 0, done.output
    assert "7 of 12 done before" in done.stderr
    assert_same(run, whole)


def test_a_restart_before_the_first_checkpoint_begins_anew(items, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    elastic(monkeypatch, 1)
    run.mkdir()
    (run / ".config.yaml.123.tmp").write_text("half a")  # a start that was cut off
    (run / "job.json").write_text("{}")
    assert train(items, run).exit_code == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 9}\n{"step": 2, "lo')  # and one that was cut off at its first steps
    for path in (run / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    assert train(items, run).exit_code == 2  # all checkpoints are damaged: that is no fresh start
    for path in (run / "checkpoints").iterdir():
        path.joinpath("tensors-0-of-1.safetensors").unlink()
        path.rmdir()
    assert train(items, run).exit_code == 0
    assert_same(run, whole)


def test_whose_folder_it_is(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    elastic(monkeypatch, 2, "job-7")
    assert not folder.is_ours  # nothing was begun
    (tmp_path / "config.yaml").write_text("")
    assert folder.is_ours
    elastic(monkeypatch, 0, "job-7")  # a node came or went: torchrun counts that as no restart
    assert not folder.is_ours
    (tmp_path / "job.json").write_text('{"id": "job-7"}')
    assert folder.is_ours
    elastic(monkeypatch, 0, "job-8")
    assert not folder.is_ours
    (tmp_path / "job.json").write_text('{"id": "none"}')
    elastic(monkeypatch, 0, "none")
    assert not folder.is_ours


def test_restarts_need_a_folder_with_a_name(monkeypatch):
    elastic(monkeypatch, 0)
    done = CliRunner().invoke(app, ["train", "semantic-ids", "--set", "data=x.npy"])
    assert done.exit_code == 2
    assert "--out" in done.stderr


@contextlib.contextmanager
def files_of_at_most(n_bytes):
    """The disk takes no more of a file than this, which is how a full one looks from inside."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("choice", ["raise", "continue"])
def test_a_disk_that_takes_no_checkpoint(items, whole, tmp_path, choice):
    run = tmp_path / "run"
    assert train(items, run, "--stop-after", 3).exit_code == 0
    files = {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file() and "checkpoints" in path.parts
    }
    with files_of_at_most(3000):
        done = train(items, run, "--resume", settings=[f"on_disk_error={choice}", "audit_every=1"])
    # In the end the results do not fit either; until then the choice holds.
    assert done.exit_code == 2
    assert done.stderr.count("samestep: ") == 1
    assert "File too large" in done.stderr
    assert ("12/12" in done.stderr) == (choice == "continue")
    assert ("lines are held back" in done.stderr) == (choice == "continue")  # audits are longer than that
    assert all(path.read_bytes() == content for path, content in files.items())
    assert not (run / "manifest.json").exists()
    done = train(items, run, "--resume")
    assert done.exit_code == 0, done.output
    assert "3 of 12 done before" in done.stderr
    assert_same(run, whole)


def test_lines_that_the_disk_does_not_take_come_later(tmp_path):
    folder = RunFolder(tmp_path)
    with files_of_at_most(100):
        for step in range(10):
            folder.append("metrics.jsonl", {"step": step, "loss": 0.5})
        assert "lines are held back" in folder.flush()
        kept = (tmp_path / "metrics.jsonl").read_text()
        assert kept.endswith("\n")
        assert 0 < len(kept) <= 100
    assert folder.flush() == ""
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10))


FAULTS = Path(__file__).parents[1] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--runs", "5"], ["--matrix"]], ids=["five runs", "every a to every b"])
def test_faults_and_moves_change_no_bit(words, tmp_path):
    command = [sys.executable, str(FAULTS), *words, "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=175, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("identical") == (5 if words[0] == "--runs" else 16)
