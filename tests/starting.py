"""Start scripts of jobs with several workers, the ways that users do, and read what each rank found.

A script takes a folder and names of cases, and writes ``rank{r}.json`` there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

Results = list[dict[str, Any]]
SECONDS = 170


def torchrun(script: Path, out: Path, n_workers: int, cases: list[str]) -> Results:
    """Run cases under torchrun; a single worker without it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_workers)]
    return run([sys.executable, *(launcher if n_workers > 1 else [])], script, out, n_workers, cases)


def run(launcher: list[str], script: Path, out: Path, n_workers: int, cases: list[str]) -> Results:
    """Run cases under any launcher."""
    done = subprocess.run(
        [*launcher, str(script), str(out), *cases],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return results(out, n_workers)


def by_hand(script: Path, out: Path, n_workers: int, cases: list[str]) -> Results:
    """Run cases in processes started one by one: torchrun's variables without the seconds of its own start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    workers = []
    for rank in map(str, range(n_workers)):
        own = {"LOCAL_RANK": rank, "RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": str(n_workers)}
        workers.append(
            subprocess.Popen(
                [sys.executable, str(script), str(out), *cases],
                env={**os.environ, **place, **own, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [worker.communicate(timeout=SECONDS)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), told
    return results(out, n_workers)


def results(out: Path, n_workers: int) -> Results:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(n_workers)]


def raised(found: Results, case: str) -> dict[str, Any]:
    """Return the error of a case, after seeing that all ranks raised the same."""
    first = found[0][case]
    assert "raised" in first, first
    assert all(rank[case] == first for rank in found)
    return first
