"""Jobs for the elastic agent, each in forked workers: ``python agent_jobs.py FOLDER`` prints how they ended."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from samestep import agent
from samestep.errors import SamestepError

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def note(name):
    """Leave a file per worker, so that the other side knows that it is up."""
    (FOLDER / f"{name}-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(
        str(os.getpid())
    )


def fails_once(name):
    note(name)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else time.sleep(600)


def is_wrong(name):
    note(name)
    sys.exit(2)


def is_killed(name):
    note(name)
    pids(name)
    os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else time.sleep(600)


def leaves(name):
    note(name)
    pids(name)
    sys.exit(7) if os.environ["RANK"] == "0" else time.sleep(600)


def ends_well_when_asked(name):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    note(name)
    time.sleep(600)


def knows_no_signal(name):
    note(name)
    time.sleep(600)


def ignores_signals(name):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    note(name)
    time.sleep(600)


def stays_with_its_agent(name):
    agent.die_with_agent()
    ignores_signals(name)


def pids(name, count=0):
    deadline = time.monotonic() + 60
    files = [FOLDER / f"{name}-{rank}-{count}" for rank in range(2)]
    while time.monotonic() < deadline and not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def run(job, numbers=(), **options):
    """Run a job on two workers, send signals to this process once they are up, and say how it ended."""
    name, said = job.__name__ + "-" + "-".join(map(str, numbers)), []

    def send():
        pids(name)
        for number in numbers:
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    start, before = time.monotonic(), (signal.getsignal(signal.SIGTERM), dict(os.environ))
    try:
        end = agent.run_command([name], 2, entrypoint=job, tell=said.append, **options)
    except SamestepError as error:
        end = str(error)
    thread.join()
    assert (signal.getsignal(signal.SIGTERM), dict(os.environ)) == before
    starts = len(list(FOLDER.glob(f"{name}-*")))
    left = [pid for pid in pids(name) if Path(f"/proc/{pid}").exists()]
    return {"end": end, "said": said, "starts": starts, "left": left, "seconds": time.monotonic() - start}


def kill_the_agent():
    child = os.fork()
    if child == 0:
        agent.run_command(["kill"], 2, entrypoint=stays_with_its_agent)
        os._exit(0)
    workers = pids("kill")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(is_alive, workers)):
        time.sleep(0.02)
    return [pid for pid in workers if is_alive(pid)]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    found = {
        "restart": run(fails_once, max_restarts=2),
        "wrong": run(is_wrong, max_restarts=2, final_codes=(2,)),
        "killed": run(is_killed),
        "left": run(leaves),
        "stop": run(ends_well_when_asked, [signal.SIGTERM]),
        "unhandled": run(knows_no_signal, [signal.SIGTERM]),
        "twice": run(ignores_signals, [signal.SIGINT, signal.SIGINT]),
        "late": run(ignores_signals, [signal.SIGTERM], grace_seconds=1.0),
        "orphans": kill_the_agent(),
    }
    print(json.dumps(found))
