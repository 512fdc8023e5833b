"""`samestep compare` on the command line: exit codes, JSON, JUnit, and a script under torch's agent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from samestep.cli import app
from samestep.compare import Recorder

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from samestep.compare import record

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (world_size if "scaled" in sys.argv else 1))
record(0, ddp, optimizer)
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
for t in range(100):
    if "fails" in sys.argv and rank == 1 and t == 2:
        raise RuntimeError("planted")
    ids = torch.arange(8 * (t % 8), 8 * (t % 8) + 8).chunk(world_size)[rank]
    optimizer.zero_grad()
    loss = (ddp(x[ids]) - x[ids, :2]).square().mean()
    loss.backward()
    optimizer.step()
    record(t + 1, ddp, optimizer, loss=loss, samples=ids)
print("a word on standard output")
"""


def one_run(folder, rate, n_steps=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    recorder = Recorder(folder)
    recorder.record(0, model, optimizer)
    for t in range(n_steps):
        optimizer.zero_grad()
        loss = model(torch.eye(4) * (t + 1)).square().mean()
        loss.backward()
        optimizer.step()
        recorder.record(t + 1, model, optimizer, loss=loss)


@pytest.fixture
def traces(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.1), ("c", 0.2)):
        one_run(tmp_path / name, rate)
    return {name: str(tmp_path / name) for name in "abc"}


def invoke(*args):
    return CliRunner().invoke(app, ["compare", *args])


def test_two_traces_that_agree(traces, tmp_path):
    done = invoke(traces["a"], traces["b"], "--junit", str(tmp_path / "ci" / "junit.xml"))
    assert done.exit_code == 0, done.output
    assert "exact: the same bits at every step" in done.output
    root = ElementTree.parse(tmp_path / "ci" / "junit.xml").getroot()
    assert [suite.get("failures") for suite in root] == ["0"]
    assert {"gradients", "parameters", "proves something"} <= {
        case.get("name") for case in root.iter("testcase")
    }


def test_two_traces_that_differ(traces, tmp_path):
    done = invoke(traces["a"], traces["c"], "--json", "--junit", str(tmp_path / "junit.xml"))
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert (told["verdict"], told["exit_code"]) == ("different", 1)
    first = told["comparisons"][0]["first"]
    assert (first["step"], first["phase"], first["tensor"]) == (0, "options", "0.lr")
    failures = list(ElementTree.parse(tmp_path / "junit.xml").getroot().iter("failure"))
    assert any("0.lr" in (failure.text or "") for failure in failures)


def test_surroundings_that_differ_are_named_before_the_first_step(traces):
    log = Path(traces["b"]) / "rank-0.jsonl"
    header, *lines = log.read_text().splitlines()
    header = json.loads(header)
    header["environment"]["cpu_capability"] = "a newer one"
    log.write_text("\n".join([json.dumps(header), *lines]) + "\n")
    done = invoke(traces["a"], traces["b"])
    assert done.exit_code == 0
    told = next(line for line in done.output.splitlines() if "before the first step" in line)
    assert "instruction set of torch's CPU kernels" in told
    assert "a newer one in b" in told
    assert told.strip() in done.output.split("exact: the same bits")[0]


def test_a_comparison_that_proves_nothing_is_bad_usage(traces):
    done = invoke(traces["a"], traces["a"])
    assert done.exit_code == 2
    assert "proves nothing" in done.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["only-one"], "expected two traces"),
        (["--workers", "2", "--", "x.py"], "at least two different numbers"),
        (["--workers", "1,0", "--", "x.py"], "at least two different numbers"),
        (["--workers", "1,two", "--", "x.py"], "at least two different numbers"),
        (["--workers", "1,2", "--", "no-such-file.py"], "expected a file"),
        (["no-such-a", "no-such-b"], "expected a folder with rank-0.jsonl"),
        (["a", "b", "--steps", "5"], "--steps and --keep go with --workers"),
    ],
)
def test_bad_usage(args, words):
    done = invoke(*args)
    assert done.exit_code == 2
    assert words in done.output


def run(tmp_path, *args, workers="1,2"):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "samestep", "compare", "--workers", workers, "--steps", "5", "--json"]
    return subprocess.run(
        [*command, "--", str(script), *args],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )


def test_a_script_at_several_world_sizes(tmp_path):
    done = run(tmp_path, workers="1,4")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [c["world_sizes"] for c in told["comparisons"]] == [[1, 4]]
    assert [c["verdict"] for c in told["comparisons"]] == ["within"]
    assert max(cell["step"] for cell in told["comparisons"][0]["cells"]) == 5


@pytest.mark.slow
def test_a_worker_that_fails(tmp_path):
    done = run(tmp_path, "fails")
    assert done.returncode == 3
    assert "planted" in done.stderr
    assert done.stdout == ""


PLANT = """
# A fault in every process that starts with this folder on its path: the mean over N workers comes out N times.
import importlib.util
import sys

class Plant:
    def find_spec(self, name, path=None, target=None):
        if name != "samestep.gradients":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            right = module.GradientSum.settle
            module.GradientSum.settle = lambda self, total: right(self, total / self._group.world_size)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Plant())
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    np.save(folder / "items.npy", np.random.default_rng(0).standard_normal((96, 12)).astype(np.float32))
    settings = {
        "data": str(folder / "items.npy"), "n_centroids": "[8,8]", "latent_dim": "4", "hidden": "[16]",
        "steps": "6", "warmup_steps": "2", "global_batch_size": "32", "checkpoint_every": "5",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return folder, ["samestep", "train", "semantic-ids", *words]


def compare_recipe(recipe, *options, planted=False, settings=()):
    folder, train = recipe
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if planted:
        (folder / "plant").mkdir(exist_ok=True)
        (folder / "plant" / "sitecustomize.py").write_text(PLANT)
        env["PYTHONPATH"] = str(folder / "plant")
    command = [sys.executable, "-m", "samestep", "compare", "--workers", "1,2", "--steps", "3", *options]
    return subprocess.run(
        [*command, "--", *train, *(word for text in settings for word in ("--set", text))],
        capture_output=True, text=True, timeout=280, env=env, cwd=folder,
    )  # fmt: skip


@pytest.mark.slow
def test_a_recipe_with_a_planted_fault_is_explained(recipe):
    """Both numbers of workers of a real job; the update is then replayed in float64 on real workers."""
    folder, _ = recipe
    done = compare_recipe(recipe, "--keep", str(folder / "kept"), planted=True)
    assert done.returncode == 1, done.stderr
    assert "different: step 1, gradients" in done.stdout
    assert "the gradient is 2 x the reference" in done.stdout
    explained = next(line for line in done.stdout.splitlines() if "explained:" in line)
    assert "multiplied by the world size once too often" in explained
    kept = json.loads((folder / "kept" / "comparison.json").read_text())["comparisons"]
    assert kept[0]["explanation"] in explained
    assert kept[0]["explanation"] in (folder / "kept" / "report.html").read_text()


@pytest.mark.slow
def test_a_sound_recipe_has_nothing_to_explain_and_two_kept_runs_name_their_settings(recipe):
    folder, _ = recipe
    for place, settings in (("one", ["mode=exact"]), ("two", ["mode=exact", "lr=0.002"])):
        done = compare_recipe(recipe, "--keep", str(folder / place), "--exact", settings=settings)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "explained" not in done.stdout
        assert "before the first step" not in done.stdout
    done = invoke(str(folder / "one" / "1-worker"), str(folder / "two" / "2-workers"))
    assert done.exit_code == 1, done.output
    assert "before the first step: lr: " in done.output
    assert "0.002 in 2-workers" in done.output
