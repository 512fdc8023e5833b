"""What saving and restoring costs beside ``torch.save`` and plain DCP: ``python benchmarks/checkpoint.py``.

One worker, a model with AdamW, digests included. Each way takes its turn (A B C A B C ...), so that a busy machine
slows all of them; the figures are medians. Ours and DCP wait until the disk has the bytes, torch.save alone does
not: it is timed both as it is and with an fsync behind it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from samestep.checkpoint import Checkpointer
from samestep.group import Group

WARM_UP = 2  # turns


def build(millions: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return blocks of 1024 x 1024 weights and an AdamW; the one of seed 0 has its state."""
    torch.manual_seed(seed)
    n_blocks = max(1, round(millions * 1e6 / (1024 * 1024 + 1024)))
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(n_blocks)))
    optimizer = torch.optim.AdamW(model.parameters())
    if seed == 0:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class Ways:
    """The ways to save and to restore the same state; each has a folder of its own."""

    def __init__(self, folder: Path, millions: float) -> None:
        self.folder = folder
        self.source = build(millions, 0)
        self.target = build(millions, 1)
        self.group = Group.single()
        self.step = 0
        self.ours = Checkpointer(folder / "ours", group=self.group, keep=1)
        self.behind = Checkpointer(folder / "behind", group=self.group, keep=1, asynchronous=True)

    def save_ours(self) -> None:
        self.step += 1
        model, optimizer = self.source
        self.ours.save(self.step, model=model, optimizer=optimizer)

    def save_behind(self) -> None:
        self.step += 1
        model, optimizer = self.source
        self.behind.save(self.step, model=model, optimizer=optimizer)

    def save_torch(self, sync: bool = False) -> None:
        model, optimizer = self.source
        path = self.folder / "torch.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if sync:
            fsync(path)

    def save_dcp(self) -> None:
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        model, optimizer = get_state_dict(*self.source)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder / "dcp", no_dist=True)

    def restore_ours(self) -> None:
        model, optimizer = self.target
        if self.ours.restore(model=model, optimizer=optimizer) != self.step_of_ours:
            raise SystemExit("restored another step than was saved")

    @property
    def step_of_ours(self) -> int:
        return int(next((self.folder / "ours").glob("step-*")).name.removeprefix("step-"))

    def restore_torch(self) -> None:
        model, optimizer = self.target
        state = torch.load(self.folder / "torch.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def restore_dcp(self) -> None:
        model, optimizer = get_state_dict(*self.target)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder / "dcp", no_dist=True)
        set_state_dict(*self.target, model_state_dict=model, optim_state_dict=optimizer)


def touch_memory(millions: float) -> None:
    """Use as much memory once as the largest job will: both states, what is read, and the files' pages.

    A virtual machine is given its memory by the host at the first touch, at several times the cost of a later one,
    and the first contender would pay for all.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch.zeros(min(int(72e6 * millions), free * 3 // 4), dtype=torch.uint8)


def medians(
    jobs: dict[str, Callable[[], object]], between: Callable[[str], object], repeats: int
) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(WARM_UP + repeats):
        # Forth and back, so that nobody always follows the same other one.
        for name in list(jobs) if turn % 2 else reversed(jobs):
            os.sync()  # nobody pays for the bytes of the one before
            start = time.perf_counter()
            jobs[name]()
            spent = time.perf_counter() - start
            between(name)
            if turn >= WARM_UP:
                seconds[name].append(spent)
    return {name: round(statistics.median(values), 3) for name, values in seconds.items()}


def measure(millions: float, repeats: int, where: str | None) -> dict[str, Any]:
    touch_memory(millions)
    with tempfile.TemporaryDirectory(dir=where) as folder:
        ways = Ways(Path(folder), millions)
        saving = medians(
            {
                "samestep": ways.save_ours,
                "samestep, loop blocked": ways.save_behind,
                "torch.save": ways.save_torch,
                "torch.save + fsync": lambda: ways.save_torch(sync=True),
                "dcp": ways.save_dcp,
            },
            lambda name: ways.behind.wait(),
            repeats,
        )
        ways.behind.close()
        shutil.rmtree(ways.behind.folder)  # its pages would push those of the others out of memory
        loading = medians(
            {"samestep": ways.restore_ours, "torch.load": ways.restore_torch, "dcp": ways.restore_dcp},
            lambda name: None,
            repeats,
        )
        check_equal(ways)
    durable = min(saving["torch.save + fsync"], saving["dcp"])
    fastest = min(saving["torch.save"], saving["dcp"])
    return {
        "million_parameters": millions,
        "save_seconds": saving,
        "restore_seconds": loading,
        "save_ratio_to_faster_on_disk": round(saving["samestep"] / durable, 2),
        "save_ratio_to_faster_in_cache": round(saving["samestep"] / fastest, 2),
        "restore_ratio_to_faster": round(loading["samestep"] / min(loading["torch.load"], loading["dcp"]), 2),
    }


def check_equal(ways: Ways) -> None:
    """See that what was timed last, ours again, brings back the bits."""
    ways.restore_ours()
    (model, optimizer), (mine, state) = ways.source, ways.target
    for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
        same = [torch.equal(ours, theirs)]
        same += [
            torch.equal(state.state[ours][key], optimizer.state[theirs][key])
            for key in ("exp_avg", "exp_avg_sq")
        ]
        if not all(same):
            raise SystemExit("restored other bits than were saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[25.0, 250.0], help="parameters")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to measure; the default is the temporary folder's")
    record.add_out(parser, "checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # DCP says that it is alone, every time
    rows = []
    for millions in args.millions:
        rows.append(measure(millions, args.repeats, args.folder))
        print(json.dumps(rows[-1]), flush=True)
    record.save(
        args.out, rows, lambda _, axes: plot(axes, rows), panels=2, threads=args.threads, bar_ratio=1.2
    )


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    for panel, what in zip(axes, ("save", "restore"), strict=True):
        for name in rows[0][f"{what}_seconds"]:
            panel.plot(
                [row["million_parameters"] for row in rows],
                [row[f"{what}_seconds"][name] for row in rows],
                marker="o",
                label=name,
            )
        panel.set(
            xlabel="million parameters, with AdamW", ylabel=f"seconds to {what}", xscale="log", yscale="log"
        )
        panel.legend()


if __name__ == "__main__":
    main()
