"""The Hugging Face Trainer with two real workers; the trainers: accelerate_trainer_jobs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep import schedules
from starting import Results, raised, torchrun

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # two processes that import transformers take some fifteen seconds of CPU

JOBS = Path(__file__).parent / "accelerate_trainer_jobs.py"
N, STEPS, ACCUMULATE = 29, 6, 2
SCHEDULE = schedules.cosine(STEPS) * schedules.linear_warmup(3, 0.2)
CASES = ["exact_mean", "without", "resumed", "planted", "bad_count", "own_mean", "long"]
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return torchrun(JOBS, tmp_path_factory.mktemp("trainer"), 2, CASES)


def right(seen: list[list[list[int]]]) -> Tensor:
    """One process, float64, no framework, on the rows that the workers saw.

    Args:
        seen: row numbers by worker and micro-batch; an epoch has five micro-batches, the last a window of its own.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(N, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(N, 1, generator=generator)
    tokens = torch.randint(1, 9, (N, 1), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    windows = [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)]
    for step, (first, last) in enumerate(windows):
        ids = [row for worker in seen for micro in worker[first:last] for row in micro]
        square = (model(inputs[ids].double()) - targets[ids].double()) ** 2
        optimizer.zero_grad()
        ((square * tokens[ids]).sum() / tokens[ids].sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.1 * SCHEDULE(step)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def off(results: Results, case: str) -> float:
    first: dict[str, Any] = results[0][case]
    assert "weights" in first, first
    weights = torch.tensor(first["weights"], dtype=torch.float64)
    return float((weights - right([rank[case]["seen"] for rank in results])).abs().max())


def test_two_workers_train_what_one_process_trains(found):
    assert found[0]["exact_mean"]["weights"] == found[1]["exact_mean"]["weights"]
    assert off(found, "exact_mean") < ROUNDING


def test_without_it_the_model_is_another(found):
    assert off(found, "without") > 1e-4


def test_a_single_process_trains_the_same(tmp_path):
    assert off(torchrun(JOBS, tmp_path, 1, ["exact_mean"]), "exact_mean") < ROUNDING


def test_every_update_uses_the_rate_of_the_schedule(found):
    assert found[0]["exact_mean"]["lrs"] == pytest.approx([0.1 * SCHEDULE(step) for step in range(STEPS)])


def test_the_trainers_own_checkpoint_carries_the_clock(found):
    for rank in found:
        assert rank["resumed"]["lrs"] == pytest.approx([0.1 * SCHEDULE(4), 0.1 * SCHEDULE(5)])
        assert rank["resumed"]["again"] == rank["resumed"]["whole"]


def test_a_changed_bit_is_found_and_named(found):
    error = raised(found, "planted")
    assert (error["raised"], error["name"]) == ("ReplicaMismatchError", "net.0.weight")


def test_a_bad_count_on_one_worker_is_raised_on_both(found):
    assert raised(found, "bad_count")["rank"] == 1


def test_a_model_whose_mean_the_trainer_owns_is_refused(found):
    assert "num_items_in_batch" in raised(found, "own_mean")["message"]


def test_the_example_runs():
    script = Path(__file__).parents[1] / "examples" / "hf_trainer_exact_mean.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert "updates 12, rate 0.0000" in done.stdout


def test_hundreds_of_good_steps_raise_no_alarm(found):
    assert found[0]["long"]["digest"] == found[1]["long"]["digest"]
