"""The elastic agent in this process: exit codes, and the name of the worker that failed."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import agent
from samestep.errors import SpecError

START = """
import sys
from samestep import agent
sys.exit(agent.run_command(["-c", sys.argv[1]], 2))
"""


def run(code, timeout=120):
    command = [sys.executable, "-c", START, code]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


TWO_ENDS = """
import os, sys, time
from pathlib import Path
from samestep import agent

rank, word = os.environ["RANK"], Path({word!r})
print(rank, os.environ["WORLD_SIZE"], agent.is_worker(), flush=True)
if rank == "1":
    word.touch()
    sys.exit(2)
while not word.exists():
    time.sleep(0.01)
time.sleep(0.5)
sys.exit(3)
"""


def test_workers_find_torchruns_variables_and_what_one_of_them_says_counts(tmp_path):
    done = run(TWO_ENDS.format(word=str(tmp_path / "word")))
    # The worker that ends with 3 has lost a peer, after that has ended with 2 and said why.
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 1
    # Both write to one stream, so their lines may run into each other.
    assert set(re.findall(r"\d 2 (?:True|False)", done.stdout)) <= {"0 2 True", "1 2 True"}
    assert "True" in done.stdout
    assert not agent.is_worker()


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=str(port)):
            agent.check_port(port)
    agent.check_port(0)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How the jobs of `agent_jobs` ended."""
    folder, temporary = tmp_path_factory.mktemp("jobs"), tmp_path_factory.mktemp("temporary")
    command = [sys.executable, str(Path(__file__).with_name("agent_jobs.py")), str(folder)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout) | {"files": [path.name for path in temporary.iterdir()]}


@pytest.mark.parametrize(
    ("job", "end"),
    [
        ("killed", r"rank 1 of 2 \(process \d+\) was killed by SIGKILL; the other workers were stopped."),
        ("left", r"rank 0 of 2 \(process \d+\) left with exit code 7; the other workers were stopped."),
    ],
)
def test_how_workers_end_is_how_the_command_ends(ended, job, end):
    assert re.fullmatch(end, str(ended[job]["end"]))


def test_workers_are_started_again_and_the_reason_is_said(ended):
    job = ended["restart"]
    assert (job["end"], job["starts"]) == (0, 4)
    assert re.fullmatch(r"restart 1 of 2: rank 1 of 2 \(process \d+\) was killed by SIGKILL", *job["said"])


def test_what_is_wrong_for_good_is_not_tried_again(ended):
    assert (ended["wrong"]["end"], ended["wrong"]["said"]) == (2, [])
    assert ended["wrong"]["starts"] == 2


@pytest.mark.parametrize(("job", "end"), [("stop", 0), ("unhandled", 143), ("twice", 130)])
def test_a_signal_goes_on_to_the_workers(ended, job, end):
    assert ended[job]["end"] == end
    assert ended[job]["seconds"] < 20  # the grace period is 30


def test_workers_that_do_not_end_in_time_are_killed_and_named(ended):
    assert "rank 0 of 2 did not end within 1 s after a signal and was killed" in ended["late"]["end"]


def test_nothing_is_left_behind(ended):
    assert ended["orphans"] == []
    assert ended["files"] == []
    assert all(ended[job]["left"] == [] for job in ended if isinstance(ended[job], dict))
