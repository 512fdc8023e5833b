"""`samestep audit RUN`: agreement, the first difference, damage; on logs that real workers wrote."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from samestep import launch
from samestep.audit import Audit
from samestep.checkpoint import Checkpointer
from samestep.cli import app
from samestep.fingerprint import hexdigest
from samestep.group import Group


def invoke(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def as_data(run):
    done = invoke(run, "--json")
    data = json.loads(done.stdout)
    assert data["exit_code"] == done.exit_code
    return data


def write_log(group, path, planted):
    """Three audits; `planted` changes one weight of rank 1 before the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    audit = Audit(group, every=0, on_disagreement="log", log=path).watch(model)
    for step in (0, 10, 20):
        if planted and step == 10 and group.rank == 1:
            with torch.no_grad():
                model[1].weight[0, 1] += 1.0
        audit.check(step, "after the step" if step else "at start")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    launch.run(write_log, 2, folder / "good.jsonl", False, timeout_seconds=120)
    launch.run(write_log, 3, folder / "bad.jsonl", True, timeout_seconds=120)
    return {name: (folder / f"{name}.jsonl").read_text() for name in ("good", "bad")}


@pytest.fixture
def run(tmp_path, logs):
    """A finished run of two workers whose audits agree, with two checkpoints."""
    (tmp_path / "audit.jsonl").write_text(logs["good"])
    (tmp_path / "manifest.json").write_text(json.dumps({"workers": 2}))
    model = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path / "checkpoints", group=Group.single()) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, model=model)
    return tmp_path


def last_tensors(run):
    return next((run / "checkpoints" / "step-0000000020").glob("*.safetensors"))


def test_agreement(run):
    done = invoke(run)
    assert done.exit_code == 0, done.output
    assert "3 audits, steps 0 to 20: replicas agree bit for bit" in done.stdout
    assert "checkpoint step-0000000020: every byte is as it was written" in done.stdout
    data = as_data(run)
    assert (data["verdict"], data["audits"], data["workers"]) == ("agree", 3, 2)
    assert data["first_difference"] is None


def test_the_first_difference_with_step_phase_tensor_ranks_and_causes(run, logs):
    (run / "audit.jsonl").write_text(logs["bad"])
    done = invoke(run)
    assert done.exit_code == 1, done.output
    for fragment in (
        "3 audits, steps 0 to 20: 2 found replicas that differ",
        "first difference: step 10, parameters after the step, `1.weight`",
        "ranks 0, 2: ",
        "rank 1: ",
        "likely cause: ",
    ):
        assert fragment in done.stdout
    data = as_data(run)
    assert (data["verdict"], data["differing"]) == ("differ", 2)
    assert data["first_difference"]["ranks"] == [[0, 2], [1]]


def test_a_damaged_line_is_named_and_a_difference_stays_one(run, logs):
    lines = logs["good"].splitlines()
    (run / "audit.jsonl").write_text("\n".join([lines[0], '{"step": 10}', lines[2]]) + "\n")
    done = invoke(run)
    assert done.exit_code == 2
    assert "something else in line 2. The file was changed" in done.stdout
    (run / "audit.jsonl").write_text(logs["good"] + lines[0][:30])
    done = invoke(run)
    assert done.exit_code == 2
    assert "line 4. It was cut off in the middle" in done.stdout
    (run / "audit.jsonl").write_text(logs["bad"] + lines[0][:30])
    assert invoke(run).exit_code == 1


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "maybe"},
        {"step": "10"},
        {"step": -1},
        {"step": True},
        {"phase": None},
        {"left_out": ["x"]},
        {"verdict": "differ"},
        {"verdict": "differ", "tensor": "w", "ranks": [[0]], "values": [], "causes": [], "differing": {}},
    ],
)
def test_what_is_not_an_audit_is_damage(run, logs, change):
    lines = logs["good"].splitlines()
    record = json.loads(lines[1]) | change
    (run / "audit.jsonl").write_text("\n".join([lines[0], json.dumps(record), lines[2]]) + "\n")
    assert "something else in line 2" in as_data(run)["problems"][0]


def test_a_changed_byte_of_the_last_checkpoint_is_found(run):
    path = last_tensors(run)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    done = invoke(run)
    assert done.exit_code == 2, done.output
    assert "problem: checkpoint step-0000000020: damaged: " in done.stdout
    assert "the values of `model." in done.stdout
    assert "checkpoint step-0000000010: every byte is as it was written" in done.stdout
    assert done.stderr == ""


def test_an_unfinished_run_and_one_of_one_worker_are_noted(run):
    (run / "manifest.json").write_text(json.dumps({"workers": 1}))
    done = invoke(run)
    assert done.exit_code == 0
    assert "had nothing to compare" in done.stdout
    (run / "manifest.json").unlink()
    done = invoke(run)
    assert done.exit_code == 0
    assert "did not come to its end" in done.stdout
    for text in ("{", "[]", "{}", '{"workers": 0}', '{"workers": "2"}'):
        (run / "manifest.json").write_text(text)
        done = invoke(run)
        assert done.exit_code == 2, text
        assert "did not come to its end" not in done.stdout


def test_nothing_audited_is_not_agreement(run):
    for text in ("", "\n"):
        (run / "audit.jsonl").write_text(text)
        assert "Nothing was proven" in as_data(run)["problems"][0]
    (run / "audit.jsonl").unlink()
    assert as_data(run)["verdict"] == "unproven"


def test_what_is_no_run_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    for what, fragment in [("none", "got nothing"), ("file", "got a file"), ("", "got none of these")]:
        done = invoke(tmp_path / what)
        assert done.exit_code == 2
        assert done.stderr.count("samestep:") == 1
        assert fragment in done.stderr


def test_results_are_held_against_the_manifest(run):
    levels = [torch.arange(6.0).view(3, 2), torch.ones(3, 2)]
    tensors = {"b": torch.zeros(3), "a": torch.arange(4)}
    save_file({f"level_{k}": level for k, level in enumerate(levels)}, run / "codebooks.safetensors")
    save_file(tensors, run / "model.safetensors")
    whole = json.dumps({name: hexdigest(t) for name, t in tensors.items()}, sort_keys=True)
    manifest = json.loads((run / "manifest.json").read_text()) if (run / "manifest.json").exists() else {}
    manifest |= {
        "workers": 2,
        "codebooks": [hexdigest(level) for level in levels],
        "digest": hashlib.sha256(whole.encode()).hexdigest(),
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    found = as_data(run)
    assert found["results"] == ["codebooks.safetensors", "model.safetensors"]
    assert found["exit_code"] == 0
    levels[1][2, 1] = 1 + 2**-23  # one bit
    save_file({f"level_{k}": level for k, level in enumerate(levels)}, run / "codebooks.safetensors")
    (run / "model.safetensors").unlink()
    found = as_data(run)
    assert found["exit_code"] == 2
    assert [text.split(":")[0] for text in found["problems"]] == [
        "codebooks.safetensors",
        "model.safetensors",
    ]
    assert "not those of the manifest" in found["problems"][0]
    assert "is missing" in found["problems"][1]
