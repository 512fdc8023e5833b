"""The LR series is the same list in a plain loop, in Lightning on two workers and in Accelerate with accumulation.

The frameworks are started as their users start them, as scripts of two processes in torchrun's environment. Each
calls the scheduler in its own way (Lightning once per batch, Accelerate once per process and update), and each
worker writes down the LR that every applied update used.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from samestep import schedules as S
from samestep.scheduler import LRScheduler

N_UPDATES, BASE = 12, 0.5
SCHEDULE = "multistep([6, 9], 0.1) * linear_warmup(4, 0.1)"
# Written out by hand: 0.5 x (0.1 + 0.9 k/4), then 0.5, then a tenth from 6 on, a hundredth from 9 on.
BY_HAND = [0.05, 0.1625, 0.275, 0.3875, 0.5, 0.5, 0.05, 0.05, 0.05, 0.005, 0.005, 0.005]

COMMON = f"""
import json, os, sys, torch
from samestep import schedules
from samestep.scheduler import LRScheduler

torch.set_num_threads(1)
SCHEDULE, N_UPDATES, BASE = schedules.parse({SCHEDULE!r}), {N_UPDATES}, {BASE}


def watch(optimizer, used):
    # A hook of torch's: it sees every update that is really applied, whoever makes it.
    def before(optimizer, args, kwargs):
        used.append(float(optimizer.param_groups[0]["lr"]))
    optimizer.register_step_pre_hook(before)
    return optimizer


def write(*runs):
    with open(f"{{sys.argv[1]}}.{{os.environ['RANK']}}", "w") as file:
        found = [{{"used": used, "applied": scheduler.applied_steps}} for used, scheduler in runs]
        json.dump({{"world": os.environ["WORLD_SIZE"], "runs": found}}, file)
"""

LIGHTNING = """
import lightning
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        self.used = []
        optimizer = watch(torch.optim.SGD(self.parameters(), lr=BASE, momentum=0.9), self.used)
        self.ours = LRScheduler(optimizer, SCHEDULE)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.ours, "interval": "step"}}

model = Model()
# Four epochs of three batches per worker: the epochs' ends must not show either.
data = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=N_UPDATES, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=os.path.dirname(sys.argv[1]),
)
trainer.fit(model, data)
write((model.used, model.ours))
"""

ACCELERATE = """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
assert accelerator.num_processes == 2


def run(wrapped):
    used, model = [], torch.nn.Linear(4, 1)
    optimizer = watch(torch.optim.SGD(model.parameters(), lr=BASE, momentum=0.9), used)
    scheduler = ours = LRScheduler(optimizer, SCHEDULE)
    data = DataLoader(TensorDataset(torch.randn(2 * 4 * N_UPDATES, 4)), batch_size=1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if wrapped:
        scheduler = accelerator.prepare(scheduler)
    for (rows,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return used, ours


write(run(wrapped=False), run(wrapped=True))
accelerator.end_training()
"""


def test_the_plain_loop_uses_the_series_by_hand():
    assert plain_loop() == pytest.approx(BY_HAND, rel=1e-12)


@pytest.mark.slow
def test_lightning_with_two_workers_uses_the_same_list(tmp_path):
    needs("lightning")
    check_same(run_as_users_do(LIGHTNING, tmp_path), n_runs=1)


def test_accelerate_with_two_workers_and_accumulation_uses_the_same_list(tmp_path):
    needs("accelerate")
    check_same(run_as_users_do(ACCELERATE, tmp_path), n_runs=2)


def needs(package):
    # Not importorskip: Lightning sets environment variables when it is imported.
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def check_same(workers, n_runs):
    plain = plain_loop()
    for worker in workers:
        assert worker == {"world": "2", "runs": [{"used": plain, "applied": N_UPDATES}] * n_runs}


def plain_loop():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=BASE, momentum=0.9)
    scheduler = LRScheduler(optimizer, S.parse(SCHEDULE))
    used = []
    for _ in range(N_UPDATES):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def run_as_users_do(body, tmp_path):
    """Run a script in two processes with torchrun's variables set; return what each worker wrote."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(body))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        # Neither framework may go out to look for anything.
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    workers = []
    try:
        for rank in range(2):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(script), str(out)]
            log = (tmp_path / f"log.{rank}").open("w")
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path))
            log.close()
        codes = [worker.wait(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    logs = "\n".join((tmp_path / f"log.{rank}").read_text() for rank in range(2))
    assert codes == [0, 0], logs
    return [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]
