"""Two nodes under torchrun: one comes late, one is killed, and the job goes on to the bits of an undisturbed run.

Each node is a network namespace of its own where this user may make some, else all share the loopback device.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import faults

STEPS = 600
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def places():
    """For each of two nodes: a prefix for its commands, its address and the name of its network device."""
    names = [f"samestep{os.getpid() % 10000}{end}" for end in "ab"]
    made = shutil.which("ip") is not None and all(ip("netns", "add", name) for name in names)
    made = made and ip("link", "add", names[0][-8:], "type", "veth", "peer", "name", names[1][-8:])
    for name, address in zip(names, ADDRESSES):
        made = made and ip("link", "set", name[-8:], "netns", name)
        inside = ["-n", name]
        made = made and ip(*inside, "addr", "add", f"{address}/24", "dev", name[-8:])
        made = made and ip(*inside, "link", "set", name[-8:], "up") and ip(*inside, "link", "set", "lo", "up")
    if made:
        yield [(["ip", "netns", "exec", name], address, name[-8:]) for name, address in zip(names, ADDRESSES)]
    else:
        yield [([], "127.0.0.1", "lo")] * 2
    for name in names:
        ip("netns", "delete", name)


class Nodes:
    """torchrun agents, one worker each."""

    def __init__(self, folder, places):
        self.folder, self.places, self.agents = folder, places, {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, number, arguments):
        prefix, address, device = self.places[number]
        quick = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={number == 0}"
        command = [
            *prefix,
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            "1",
        ]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.places[0][1]}:{self.port}"]
        command += [
            "--rdzv-id",
            "job-7",
            "--rdzv-conf",
            quick,
            "--local-addr",
            address,
            "--max-restarts",
            "3",
        ]
        # torch's store that outlives a round leaves a late node waiting for an address that nobody writes any more.
        fresh = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"node-{number}.log").open("w") as log:
            self.agents[number] = subprocess.Popen(
                [*command, "-m", "samestep", *arguments], stdout=log, stderr=log, env={**os.environ, **fresh}
            )

    def said(self, number):
        return (self.folder / f"node-{number}.log").read_text()

    def workers(self, number):
        agent = self.agents[number].pid  # `ip netns exec` becomes the command that it is given
        return [int(p) for p in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]

    def stop(self):
        for agent in self.agents.values():
            agent.kill()
            agent.wait()


def wait(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def arguments_of(folder, run):
    words = faults.arguments_of(folder, run, "exact", False)
    return [f"steps={STEPS}" if word.startswith("steps=") else word for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_comes_late_and_one_that_leaves_change_no_bit(tmp_path, places, number):
    faults.make_items(tmp_path / "items.npy")
    whole, run, nodes = tmp_path / "whole", tmp_path / "run", Nodes(tmp_path, places)
    subprocess.run([sys.executable, "-m", "samestep", *arguments_of(tmp_path, whole)], check=True)
    try:
        nodes.start(0, arguments_of(tmp_path, run))
        wait(lambda: faults.steps_logged(run) >= 5)
        held = nodes.workers(0)
        for pid in held:
            os.kill(pid, signal.SIGSTOP)  # so that the other node does not come too late
        nodes.start(1, arguments_of(tmp_path, run))
        time.sleep(8.0)
        for pid in held:
            os.kill(pid, signal.SIGCONT)
        wait(lambda: "2 workers" in nodes.said(0) + nodes.said(1))
        alone = faults.steps_logged(run)
        wait(lambda: faults.steps_logged(run) >= alone + 8)
        left = nodes.workers(1)
        nodes.agents[1].send_signal(number)
        assert nodes.agents[0].wait(timeout=90) == 0, nodes.said(0)
    finally:
        nodes.stop()
    said = nodes.said(0)
    assert "stopped after" in said  # in order, when the second node came
    assert ("another node was told to stop" in said) == (number == signal.SIGTERM)
    assert said.count("done before") + nodes.said(1).count("done before") >= 2
    assert not [pid for pid in left if faults.alive(pid)]
    assert faults.compare(run, whole, True) == []
