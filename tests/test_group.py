import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from samestep import launch
from samestep.errors import AgreementError, GroupError, SpecError
from samestep.group import Group


def test_one_process_is_the_same_code():
    with Group.from_env("cpu", threads=None) as group:
        assert (group.rank, group.world_size, group.is_main, group.process_group) == (0, 1, True, None)
        group.agree(True, "")
        group.barrier()
        assert group.gather_text("x") == ["x"]
        with pytest.raises(AgreementError, match="no") as caught:
            group.agree(False, "no")
        assert caught.value.common


def verdicts(group):
    found = []
    for bad in ([], [1], [0, 2], [0, 1, 2]):
        message = "same" if len(bad) == 3 else f"finding {group.rank}"
        try:
            group.agree(group.rank not in bad, message, SpecError)
            found.append("agreed")
        except SpecError as error:
            found.append((error.rank, str(error), error.common))
    return found, group.gather_text("é" * group.rank), str(group.device)


def test_a_finding_on_one_rank_is_raised_on_all():
    results = launch.run(verdicts, 3)
    found, texts, device = results[0]
    assert all(result == results[0] for result in results)
    assert found[0] == "agreed"
    assert found[1] == (1, "rank 1 of 3: finding 1", True)
    assert found[2] == (0, "rank 0 of 3: finding 0\nrank 2 of 3: finding 2", True)
    assert found[3] == (0, "same", True)
    assert texts == ["", "é", "éé"]
    assert device == "cpu"


@pytest.mark.parametrize(
    ("variables", "fragment"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "does not fit"),
    ],
)
def test_a_broken_environment_is_named(monkeypatch, variables, fragment):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GroupError, match=fragment):
        Group.from_env("cpu", threads=None)


def test_an_unknown_device_is_named():
    with pytest.raises(SpecError, match="tpu"):
        Group.single("tpu")


def test_a_port_in_use_is_an_error_and_not_a_hang(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(GroupError, match=port):
            Group.from_env("cpu", timeout_seconds=5, threads=None)


def adopt(group):
    with Group.from_env("cpu") as adopted:
        same = (adopted.rank, adopted.world_size) == (group.rank, group.world_size)
        adopted.agree(True, "")
    return same and dist.is_initialized()


def test_a_process_group_of_the_users_is_adopted_and_left_open():
    assert launch.run(adopt, 2) == [True, True]


def test_threads_are_set(monkeypatch):
    Group.from_env("cpu", threads=1)
    assert torch.get_num_threads() == 1


SCRIPT = """
from samestep.group import Group
with Group.from_env("cpu", timeout_seconds=60) as group:
    group.agree(True, "")
    print(f"rank {group.rank} of {group.world_size}", flush=True)
"""


def test_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    # Both write to one stream, so their lines may run into each other.
    assert sorted(re.findall(r"rank \d of \d", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"], done.stderr
