"""The doctor: what it says of good and bad settings, and that a failing all-reduce is told apart from them."""

import json
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from samestep import doctor
from samestep.cli import app
from samestep.doctor import _machine, _variables, _workers

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def plain(monkeypatch):
    """An environment in which nothing of ours is set, and no workers are started."""
    for name in (*LAUNCHER, "TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return monkeypatch


@pytest.fixture
def alone(plain):
    plain.setattr("samestep.doctor._examine.all_reduce", lambda n_devices, seconds: [])
    return plain


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_a_good_environment_with_two_real_workers(plain, tmp_path):
    found = doctor.examine(tmp_path, timeout_seconds=120)
    assert doctor.exit_code(found) == 0, found
    names = ["versions", "torch build", "backends", "devices", "threads", "launcher", "port", "same bits"]
    assert set(names) <= by_name(found).keys()
    sums = by_name(found)["all-reduce"]
    assert "both have the right sums" in sums.text or sums.grade == "note"
    assert list(tmp_path.iterdir()) == []


def test_a_network_device_that_is_not_there_fails_the_workers_too(plain, tmp_path):
    plain.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    found = doctor.examine(tmp_path, timeout_seconds=60)
    assert doctor.exit_code(found) == 3
    assert "no network device nowhere7" in by_name(found)["network"].text
    assert by_name(found)["network"].exit_code == 2
    assert next(f for f in found if f.name == "all-reduce").exit_code == 3


def test_a_wrong_sum_and_a_worker_that_cannot_start_are_problems(plain):
    right = [float(3 * i) for i in range(1000)]
    plain.setattr(_workers.launch, "run", lambda *a, **k: [right, [*right[:-1], 0.0]])
    (found,) = _workers.all_reduce(0, 1.0)
    assert found.exit_code == 3
    assert "wrong sum on rank 1" in found.text

    def refuse(*arguments, **settings):
        raise OSError("no more processes")

    plain.setattr(_workers.launch, "run", refuse)
    (found,) = _workers.all_reduce(0, 1.0)
    assert found.exit_code == 3
    assert "no more processes" in found.text
    assert [f.grade for f in _workers.all_reduce(1, 1.0)] == ["problem", "note"]
    assert ["NCCL" in f.text for f in _workers.all_reduce(2, 1.0)] == [False, True]


@pytest.mark.parametrize(
    ("value", "cores", "workers", "grade"),
    [
        (None, 8, 2, "note"),
        ("1", 8, 2, "ok"),
        ("4", 8, 2, "ok"),
        ("5", 8, 2, "note"),
        ("9", 8, 2, "problem"),
        ("1", 2, 4, "ok"),
        ("2", 2, 4, "note"),
        ("4,2", 8, 2, "ok"),
        ("0", 8, 2, "problem"),
        ("many", 8, 2, "problem"),
        ("", 8, 2, "problem"),
    ],
)
def test_threads_against_cores(value, cores, workers, grade):
    found = _variables.threads({} if value is None else {"OMP_NUM_THREADS": value}, cores, workers)
    assert found.grade == grade
    assert bool(found.advice) == (grade != "ok")
    assert found.exit_code == (2 if grade == "problem" else 0)


@pytest.mark.parametrize(
    ("variables", "grade", "fragment"),
    [
        ({}, "ok", "one worker"),
        ({"RANK": "0"}, "problem", "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "problem", "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "problem", "does not fit"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "problem", "whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "problem", "MASTER_ADDR and MASTER_PORT not"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "note", "wait for 2 more"),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
                "TORCHELASTIC_RUN_ID": "x",
            },
            "ok",
            "torchrun",
        ),
    ],
)
def test_the_launchers_variables(plain, variables, grade, fragment):
    for name, value in variables.items():
        plain.setenv(name, value)
    found = _variables.launcher()
    assert found.grade == grade
    assert fragment in found.text


def test_a_port_in_use_is_a_problem_only_for_who_would_open_it():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        found = _variables.port({"MASTER_PORT": number})
        assert found.exit_code == 2
        assert "another program uses it" in found.text
        assert _variables.port({"MASTER_PORT": number, "RANK": "1"}).grade == "ok"
        assert _variables.port({"MASTER_PORT": number, "TORCHELASTIC_RUN_ID": "x"}).grade == "ok"
    assert _variables.port({"MASTER_PORT": number}).text == f"MASTER_PORT={number} is free"
    for bad in ("0", "65536", "http", "-1", ""):
        assert _variables.port({"MASTER_PORT": bad}).exit_code == 2


def test_network_devices_by_name_and_by_prefix():
    here = socket.if_nameindex()[0][1]
    assert _variables.network({"GLOO_SOCKET_IFNAME": here}, 0)[0].grade == "ok"
    assert _variables.network({"GLOO_SOCKET_IFNAME": here[:1] + "~"}, 0)[0].grade == "problem"
    for value, grade in [(here[:1], "ok"), (f"={here}", "ok"), ("^docker", "ok"), ("=nope", "problem")]:
        assert _variables.network({"NCCL_SOCKET_IFNAME": value}, 1)[0].grade == grade
    assert _variables.network({"NCCL_SOCKET_IFNAME": "nope"}, 0)[0].grade == "ok"  # NCCL has no part in it
    noted = _variables.network({"NCCL_ALGO": "Ring", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 1)
    assert [f.grade for f in noted] == ["note", "note"]


def test_other_variables_and_cublas():
    (found,) = _variables.others({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"})
    assert found.text.startswith("CUDA_LAUNCH_BLOCKING=1")
    assert _variables.others({"CUDA_LAUNCH_BLOCKING": "0"})[0].grade == "ok"
    grades = {
        value: _variables.cublas({"CUBLAS_WORKSPACE_CONFIG": value}).grade for value in (":4096:8", "1")
    }
    assert grades == {":4096:8": "ok", "1": "problem"}
    assert _variables.cublas({}).grade == "note"


def test_backends_that_are_missing(monkeypatch):
    assert _machine.backends(0).grade == "ok"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert _machine.backends(1).exit_code == 2
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert "gloo is missing" in _machine.backends(0).text
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    assert "one worker" in _machine.backends(0).text


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    assert _machine.folder_is_writable(tmp_path).grade == "ok"
    found = _machine.folder_is_writable(tmp_path / "gone")
    assert found.exit_code == 2
    assert "gone" in found.text

    def refuse():
        raise FileNotFoundError(2, "no usable one")

    monkeypatch.setattr(_machine.tempfile, "gettempdir", refuse)
    assert "TMPDIR" in _machine.folder_is_writable(tmp_path).advice


def test_the_command_in_words_and_as_json(alone):
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "no problems" in done.stdout
    alone.setenv("RANK", "0")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 2
    assert "-> Unset what a former run left" in done.stdout
    assert "1 problem," in done.stdout
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 2
    data = json.loads(done.stdout)
    assert data["exit_code"] == 2
    assert {row["name"]: row["grade"] for row in data["findings"]}["launcher"] == "problem"
    assert data["fingerprint"]["threads"]


@pytest.mark.parametrize("command", ["doctor", "audit"])
def test_help_does_not_load_torch(command):
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom samestep.cli import app\n"
        f"assert CliRunner().invoke(app, [{command!r}, '--help']).exit_code == 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
