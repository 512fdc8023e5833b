"""The elastic agent in this process: exit codes, and the name of the worker that failed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from samestep import agent
from samestep.errors import SpecError

START = """
import sys
from samestep import agent
from samestep.errors import SamestepError
try:
    sys.exit(agent.run_command(["-c", sys.argv[1]], 2))
except SamestepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def run(code, timeout=120):
    command = [sys.executable, "-c", START, code]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_workers_find_torchruns_variables():
    done = run(
        "import os; from samestep import agent; "
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], agent.is_worker(), flush=True)"
    )
    assert done.returncode == 0, done.stderr
    # Both write to one stream, so their lines may run into each other.
    assert sorted(re.findall(r"\d 2 (?:True|False)", done.stdout)) == ["0 2 True", "1 2 True"]
    assert not agent.is_worker()


@pytest.mark.parametrize(
    ("code", "exit_code", "fragment"),
    [
        ("import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9)", 3, "rank 1 of 2"),
        ("import os, sys; sys.exit(2 if os.environ['RANK'] == '1' else 3)", 2, ""),
        (
            "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '0' else time.sleep(600)",
            3,
            "exit code 7",
        ),
    ],
)
def test_how_workers_end_is_how_the_command_ends(code, exit_code, fragment):
    done = run(code)
    assert done.returncode == exit_code, done.stderr
    assert fragment in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 1


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=str(port)):
            agent.check_port(port)
    agent.check_port(0)


def test_ctrl_c_takes_the_workers_along(tmp_path):
    pids = tmp_path / "pids"
    code = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", START, code], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (not pids.exists() or len(pids.read_text().splitlines()) < 2):
        time.sleep(0.1)
    starter.send_signal(signal.SIGINT)
    starter.communicate(timeout=60)
    assert starter.returncode == 130
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
