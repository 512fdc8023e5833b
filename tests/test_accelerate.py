"""Loops on Accelerate with two real workers: means, schedules, audits, refusals. The loops: accelerate_jobs.py."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep import launch, schedules
from samestep.group import Group
from starting import Results, raised, run, torchrun

pytest.importorskip("accelerate")

JOBS = Path(__file__).parent / "accelerate_jobs.py"
STEPS = 8
SCHEDULE = schedules.cosine(STEPS) * schedules.linear_warmup(3, 0.2)
SIZES = [[[5, 1], [2, 3]], [[4, 4], [4, 2]], [[1, 6], [3, 0]]]
CASES = ["exact_mean", "clipped", "without", "resumed", "planted", "bad_weight", "stepped_twice"]
# 8 updates of float32 with rates below 0.1: a hundred roundings of numbers of size 1.
ROUNDING = 2e-6


def work(group: Group, out: Path) -> dict[str, Any]:
    """Adopt the process group of `launch`, as Accelerate does with one that it finds."""
    rank, size = str(group.rank), str(group.world_size)
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1"
    )
    import accelerate_jobs

    return accelerate_jobs.find(accelerate_jobs.CASES, CASES, out)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch.run(work, 2, tmp_path_factory.mktemp("accelerate"), timeout_seconds=120)


def rows(step: int, worker: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + micro)
    inputs = torch.randn(size, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + worker + torch.randn(size, 1, generator=generator)


def right(clip: float | None = None, steps: int = STEPS) -> Tensor:
    """One process, float64, no framework."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        sizes = SIZES[step % 3]
        parts = [rows(step, worker, micro, sizes[worker][micro]) for worker in (0, 1) for micro in (0, 1)]
        inputs, targets = (torch.cat(columns).double() for columns in zip(*parts))
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = 0.1 * SCHEDULE(step)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def off(result: dict[str, Any], **options: Any) -> float:
    assert "weights" in result, result
    return float((torch.tensor(result["weights"], dtype=torch.float64) - right(**options)).abs().max())


@pytest.mark.parametrize(("case", "options"), [("exact_mean", {}), ("clipped", {"clip": 0.5})])
def test_two_workers_train_what_one_process_trains(found, case, options):
    assert found[0][case]["weights"] == found[1][case]["weights"]
    assert off(found[0][case], **options) < ROUNDING


def test_without_it_the_model_is_another(found):
    assert off(found[0]["without"], steps=2) > 1e-4


@pytest.mark.parametrize("case", ["exact_mean", "clipped"])
def test_the_schedule_steps_once_per_update(found, case):
    # Prepared in the first case, and stepped by hand in each micro-batch in both.
    assert found[0][case]["lrs"] == pytest.approx([0.1 * SCHEDULE(step) for step in range(STEPS)])


def test_accelerates_own_state_carries_the_clock(found):
    for rank in found:
        assert rank["resumed"]["lr"] == pytest.approx(0.1 * SCHEDULE(4))
        assert rank["resumed"]["again"] == rank["resumed"]["whole"]


def test_a_changed_bit_is_found_and_named(found):
    error = raised(found, "planted")
    assert (error["raised"], error["name"]) == ("ReplicaMismatchError", "0.weight")


def test_a_bad_weight_on_one_worker_is_raised_on_both(found):
    assert raised(found, "bad_weight")["rank"] == 1


def test_a_schedule_that_would_run_twice_as_fast_is_refused(found):
    assert "StepLR that Accelerate steps 2 times" in raised(found, "stepped_twice")["message"]


@pytest.mark.slow
def test_a_single_process_trains_the_same(tmp_path):
    alone = torchrun(JOBS, tmp_path, 1, ["exact_mean", "clipped", "resumed"])[0]
    assert off(alone["exact_mean"]) < ROUNDING
    assert off(alone["clipped"], clip=0.5) < ROUNDING
    assert alone["resumed"]["again"] == alone["resumed"]["whole"]


@pytest.mark.slow
def test_the_example_gives_the_weights_of_one_worker(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "accelerate_exact_mean.py"
    weights = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        command = [sys.executable, *launcher, str(script)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=170, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "rate at half time 0.050" in done.stdout
        weights.append(ast.literal_eval(done.stdout.split("weight ")[1]))
    assert weights[1] == pytest.approx(weights[0], rel=1e-5)


@pytest.mark.slow
def test_hundreds_of_good_steps_under_accelerate_launch_raise_no_alarm(tmp_path):
    # On a machine without GPUs, several processes are what accelerate calls multi_gpu, with cpu=True in the script.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    found = run([*command, "--main_process_port", "0"], JOBS, tmp_path, 2, ["long", "exact_mean", "planted"])
    assert found[0]["long"]["digest"] == found[1]["long"]["digest"]
    assert off(found[0]["exact_mean"]) < ROUNDING
    assert raised(found, "planted")["name"] == "0.weight"
