"""The command line as people use it: the whole job on real workers, and one clear message for each mistake."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import samestep
from samestep.cli import app

SMALL = ["--set", "n_centroids=[8,8]", "--set", "latent_dim=4", "--set", "hidden=[16]", "--set", "steps=12"]
SMALL += ["--set", "warmup_steps=2", "--set", "global_batch_size=32", "--set", "checkpoint_every=5"]


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(12, 6))
    rows = (centers[rng.integers(12, size=200)] + 0.2 * rng.normal(size=(200, 6))).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "items.npz"
    np.savez(path, ids=np.array([f"item-{i}" for i in range(200)]), embeddings=rows)
    return path


def in_process(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def command(*arguments, launcher=()):
    return [sys.executable, "-m", *launcher, "samestep", *(str(argument) for argument in arguments)]


def in_shell(*arguments, launcher=()):
    return subprocess.run(
        command(*arguments, launcher=launcher), capture_output=True, text=True, timeout=150, check=False
    )


def test_the_job_on_one_and_two_workers_and_under_torchrun_gives_the_same_bits(embeddings, tmp_path):
    arguments = ["train", "semantic-ids", "--set", f"data={embeddings}", *SMALL, "--set", "mode=exact"]
    assert in_process(*arguments, "--out", tmp_path / "one").exit_code == 0
    two = in_shell(*arguments, "--out", tmp_path / "two", "--workers", 2)
    assert two.returncode == 0, two.stderr
    assert "2 workers agree bit for bit" in two.stderr
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    third = in_shell(*arguments, "--out", tmp_path / "torchrun", launcher=torchrun)
    assert third.returncode == 0, third.stderr
    names = ["semantic_ids.parquet", "codebooks.safetensors", "model.safetensors", "quality.json"]
    for name in names:
        contents = {(tmp_path / run / name).read_bytes() for run in ("one", "two", "torchrun")}
        assert len(contents) == 1, name
    folder = tmp_path / "two"
    assert json.loads((folder / "manifest.json").read_text())["workers"] == 2
    assert {"config.yaml", "metrics.jsonl", "audit.jsonl", "report.html"} <= {
        p.name for p in folder.iterdir()
    }
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 12


def test_kmeans_encode_and_report(embeddings, tmp_path):
    run, out = tmp_path / "run", tmp_path / "new.parquet"
    settings = ["--set", f"data={embeddings}", "--set", "kind=rkmeans", "--set", "n_centroids=[8,8]"]
    settings += ["--set", "also_write=[npy,lcrec]"]
    assert in_process("train", "semantic-ids", *settings, "--out", run).exit_code == 0
    assert np.load(run / "semantic_ids.npy").shape == (200, 3)
    tokens = json.loads((run / "semantic_ids.lcrec.json").read_text())
    assert len(tokens) == 200
    assert all(word[0] == "<" for word in tokens["item-0"])
    rows = np.load(embeddings)["embeddings"]
    table = {"item_id": ["item-3", "new"], "embedding": [rows[3].tolist(), rows[4].tolist()]}
    pq.write_table(pa.table(table), tmp_path / "new_items.parquet")
    done = in_process("encode", run, tmp_path / "new_items.parquet", "--out", out)
    assert done.exit_code == 0, done.output
    assert "2 items, 1 of them known" in done.output
    old = dict(
        zip(*[pq.read_table(run / "semantic_ids.parquet").to_pydict()[key] for key in ("item_id", "codes")])
    )
    new = pq.read_table(out).to_pydict()
    assert new["codes"] == [old["item-3"], old["item-4"]]
    assert in_process("report", run).output.strip() == str(run / "report.html")


def test_resume_goes_on_to_the_same_bits(embeddings, tmp_path):
    arguments = ["train", "semantic-ids", "--set", f"data={embeddings}", *SMALL]
    assert in_process(*arguments, "--out", tmp_path / "whole").exit_code == 0
    run = tmp_path / "cut"
    assert in_process(*arguments, "--out", run).exit_code == 0
    # As after a kill between steps 10 and 12: the last checkpoint and the manifest were not written yet.
    (run / "manifest.json").unlink()
    for name in sorted(p for p in (run / "checkpoints").iterdir() if "12" in p.name):
        subprocess.run(["rm", "-r", str(name)], check=True)
    done = in_process("train", "semantic-ids", "--out", run, "--resume")
    assert done.exit_code == 0, done.output
    assert "10 of 12 done before" in done.stderr
    for name in ("semantic_ids.parquet", "codebooks.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 13))
    again = in_process("train", "semantic-ids", "--out", run, "--resume", "--set", "seed=9")
    assert again.exit_code == 2
    assert "`seed`: this run began with 0, got 9" in again.stderr


BAD = {
    "a missing file": (["data=/nowhere/items.npy"], "/nowhere/items.npy"),
    "an unknown key": (["data=x.npy", "stepz=3"], "Did you mean `steps`?"),
    "a value of the wrong kind": (["data=x.npy", "steps=many"], "`steps`"),
    "a text without =": (["steps"], "KEY=VALUE"),
    "no data": ([], "`data`"),
    "fewer items than codes": (["data={few}"], "expected at most 5, the number of items"),
    "a NaN row": (["data={nan}"], "3"),
    "a cube": (["data={cube}"], "cube.npy"),
    "ids that are not unique": (["data={twice}"], "'b'"),
    "an unknown column": (["data={table}", "embedding_column=embeding"], "embedding"),
    "a batch smaller than its shards": (
        ["data=x.npy", "shards=8", "global_batch_size=4"],
        "global_batch_size",
    ),
    "a warm-up longer than the run": (["data={few}", "steps=5", "warmup_steps=9"], "warmup_steps"),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    rows = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    np.save(folder / "few.npy", rows[:5])
    np.save(folder / "cube.npy", rows.reshape(10, 30, 4))
    spoiled = rows.copy()
    spoiled[3, 1] = np.nan
    np.save(folder / "nan.npy", spoiled)
    np.savez(folder / "twice.npz", ids=np.array(["a", "b", "c", "b"]), embeddings=rows[:4])
    pq.write_table(pa.table({"item_id": [1, 2], "embedding": rows[:2].tolist()}), folder / "table.parquet")
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_one_message_and_nothing_is_written(mistake, bad_files, tmp_path):
    settings, fragment = BAD[mistake]
    run = tmp_path / "run"
    words = [word for text in settings for word in ("--set", text.format(**bad_files))]
    done = in_process("train", "semantic-ids", *words, "--out", run)
    assert done.exit_code == 2, done.output
    assert fragment in done.stderr
    assert done.stderr.count("samestep:") == 1
    assert "Traceback" not in done.stderr
    assert not run.exists()


def test_a_mistake_that_one_worker_finds_is_said_once(bad_files, tmp_path):
    settings = ["--set", f"data={bad_files['nan']}", "--set", "n_centroids=[4]"]
    done = in_shell("train", "semantic-ids", *settings, "--out", tmp_path / "run", "--workers", 2)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("samestep:") == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_named_and_nothing_is_written(embeddings, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = tmp_path / "run"
        arguments = [
            "train",
            "semantic-ids",
            "--set",
            f"data={embeddings}",
            "--workers",
            2,
            "--port",
            port,
            "--out",
            run,
        ]
        done = in_process(*arguments)
    assert done.exit_code == 2, done.output
    assert str(port) in done.stderr
    assert done.stderr.count("samestep:") == 1
    assert not run.exists()


def test_folders_workers_and_recipes(embeddings, tmp_path):
    data = ["--set", f"data={embeddings}"]
    used = tmp_path / "used"
    used.mkdir()
    (used / "config.yaml").write_text("recipe: semantic-ids\n")
    cases = [
        (["train", "semantic-ids", *data, "--out", used], "--resume"),
        (["train", "semantic-ids", *data, "--out", tmp_path / "new", "--resume"], "no config.yaml"),
        (
            ["train", "semantic-ids", *data, "--out", tmp_path / "new", "--workers", 3],
            "expected at most shards=2",
        ),
        (["train", "semantic-idz", *data], "semantic-ids"),
        (["train", "semantic-ids", *data, "--config", tmp_path / "none.yaml"], "none.yaml"),
        (["encode", tmp_path, embeddings, "--out", tmp_path / "x.parquet"], "no manifest.json"),
        (["report", tmp_path / "nothing"], "nothing"),
    ]
    for arguments, fragment in cases:
        done = in_process(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert fragment in done.stderr, (arguments, done.stderr)
        assert done.stderr.count("samestep:") == 1


@pytest.fixture
def started():
    """Runs that a test started; none outlives it."""
    runs = []
    yield runs
    for run in runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def start_long_run(embeddings, run, started):
    settings = [
        "--set",
        f"data={embeddings}",
        *SMALL,
        "--set",
        "steps=1000000",
        "--set",
        "checkpoint_every=0",
    ]
    arguments = command("train", "semantic-ids", *settings, "--out", run, "--workers", 2)
    running = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    started.append(running)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (run / "metrics.jsonl").exists():
        time.sleep(0.2)
    listed = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=True)
    return running, [int(pid) for pid in listed.stdout.split()]


def is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_worker_is_named(embeddings, tmp_path, started):
    running, workers = start_long_run(embeddings, tmp_path / "run", started)
    victim = workers[-1]
    os.kill(victim, signal.SIGKILL)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 3, said
    assert f"(process {victim}) was killed by SIGKILL" in said
    assert all(is_gone(pid) for pid in workers)


def test_ctrl_c_saves_and_ends_well(embeddings, tmp_path, started):
    running, workers = start_long_run(embeddings, tmp_path / "run", started)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert "of 1000000 steps; go on with --resume" in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "Traceback" not in said
    assert all(is_gone(pid) for pid in workers)


def test_the_version_is_said_without_torch():
    code = "import sys; from samestep.cli import app; app(['--version'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"samestep {samestep.__version__}, torch {torch.__version__.split('+')[0]}")
