"""Lightning under torchrun and under its own launcher: means, schedules, resumes, audits, initial values, refusals.

The runs are in lightning_jobs.py; all fast ones share one launch of two workers, since Lightning takes seconds to
import. Right values are re-derived here: one process, float64, the same global batches, nothing of Lightning.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep import kmeans, schedules
from samestep.group import Group
from samestep.sharding import ShardLoader
from starting import by_hand, raised, torchrun

pytest.importorskip("lightning")

JOBS = Path(__file__).parent / "lightning_jobs.py"
EXAMPLES = Path(__file__).parents[1] / "examples"
SCHEDULE = schedules.linear_warmup(4, 0.1) * schedules.multistep([9], 0.5)
FAST = [
    "exact_mean",
    "clipped",
    "tokens",
    "manual",
    "resumed",
    "initialized",
    "planted",
    "bad_count",
    "raw_loader",
    "wrong_accumulation",
    "seed_zero",
    "seed_quarter",
    "seed_weighted",
    "seed_flags",
]
SLOW = [
    "without",
    "bf16",
    "planted_manual",
    "limited",
    "padded",
    "other_hook",
    "short_last",
    "no_sync_manual",
    "stopped_by_max_steps",
    "seed_unused",
    "seed_adam",
    "seed_rate",
    "seed_momentum",
    "seed_world_size",
    "seed_automatic",
]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return by_hand(JOBS, tmp_path_factory.mktemp("fast"), 2, FAST)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return torchrun(JOBS, tmp_path_factory.mktemp("slow"), 2, SLOW)


def right(*, clip: float | None = None, by_token: bool = False, shards: int = 4) -> Tensor:
    """One process, float64, no framework: the weights after three epochs of 13 samples an update."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 4, generator=generator)
    tokens = torch.randint(1, 9, (50, 1), generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(50, 1, generator=generator)
    dataset = torch.utils.data.TensorDataset(inputs, targets, tokens)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ShardLoader(dataset, 13, shards, group=Group.single(), seed=5)
    for step, parts in enumerate(loader.steps(12)):
        x, y, k = (torch.cat(columns).double() for columns in zip(*(part.batch for part in parts)))
        square = (model(x) - y) ** 2
        optimizer.zero_grad()
        ((square * k).sum() / k.sum() if by_token else square.mean()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = 0.1 * SCHEDULE(step)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def off(result: dict[str, Any], **options: Any) -> float:
    assert "weights" in result, result
    return float((torch.tensor(result["weights"], dtype=torch.float64) - right(**options)).abs().max())


# The mean, the schedule -------------------------------------------------------------------------------------

# 12 updates of float32 with rates of up to 0.1: a few hundred roundings of numbers of size 1.
ROUNDING = 5e-6


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("exact_mean", {}),
        ("clipped", {"clip": 0.5}),
        ("tokens", {"by_token": True}),
        ("manual", {"shards": 2}),
    ],
)
def test_two_workers_train_what_one_process_trains(fast, case, options):
    assert fast[0][case]["weights"] == fast[1][case]["weights"]
    assert off(fast[0][case], **options) < ROUNDING


def test_every_update_uses_the_rate_of_the_schedule(fast):
    for case in ("exact_mean", "clipped", "manual"):
        lrs = fast[0][case]["lrs"]
        assert lrs == pytest.approx([0.1 * SCHEDULE(step) for step in range(12)])


def test_lightning_takes_the_loader_as_it_is(fast):
    assert all(rank["exact_mean"]["same_loader"] and rank["exact_mean"]["steps"] == 12 for rank in fast)


@pytest.mark.slow
def test_without_the_exact_mean_the_model_is_another(slow):
    assert off(slow[0]["without"]) > 1e-2


@pytest.mark.slow
def test_bf16_mixed_stays_as_close_as_bf16_is(slow):
    assert off(slow[0]["bf16"]) < 5e-2  # 8 bits of mantissa, 12 updates


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [1, 4])
def test_other_numbers_of_workers(tmp_path, n_workers):
    found = torchrun(JOBS, tmp_path, n_workers, ["exact_mean", "clipped", "tokens", "resumed", "planted"])
    for case, options in (("exact_mean", {}), ("clipped", {"clip": 0.5}), ("tokens", {"by_token": True})):
        assert off(found[0][case], **options) < ROUNDING
    digests = {run["digest"] for run in found[0]["resumed"].values()}
    assert len(digests) == 1
    assert ("raised" in found[0]["planted"]) == (n_workers > 1)


# Resume, initial values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["rest", "from_middle", "from_epoch"])
def test_a_resume_goes_on_bit_for_bit(fast, run):
    for rank in fast:
        assert rank["resumed"][run]["digest"] == rank["resumed"]["whole"]["digest"]
        assert rank["resumed"][run]["steps"] == 12


def test_values_are_computed_from_all_rows_once_in_the_life_of_a_run(fast):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(50, 4, generator=generator)
    # Rank 0's rows, then rank 1's: the order in which the pool counts them.
    pooled = torch.cat([rows[0::2], rows[1::2]])
    for rank in fast:
        found = rank["initialized"]
        assert found["calls"] == [1, 1]
        assert found["same"]
        assert torch.equal(torch.tensor(found["centroids"]), kmeans.fit(pooled, 3).centroids)


# Audits, refusals: the same error on both workers -----------------------------------------------------------


def test_a_changed_bit_is_found_and_named(fast):
    error = raised(fast, "planted")
    assert (error["raised"], error["name"]) == ("ReplicaMismatchError", "net.3.bias")
    assert "step 2" in error["message"]


@pytest.mark.slow
def test_a_changed_bit_is_found_with_manual_optimization(slow):
    error = raised(slow, "planted_manual")
    assert (error["raised"], error["name"]) == ("ReplicaMismatchError", "net.3.bias")


def test_a_count_that_fails_on_one_worker_is_raised_on_both(fast):
    error = raised(fast, "bad_count")
    assert error["rank"] == 1
    assert "KeyError: 'labels'" in error["message"]


@pytest.mark.parametrize(
    ("case", "fragment"),
    [("raw_loader", "ShardDataLoader"), ("wrong_accumulation", "expected 2, the shards per worker, got 1")],
)
def test_refusals(fast, case, fragment):
    error = raised(fast, case)
    assert error["raised"] == "SpecError"
    assert fragment in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fragment"),
    [
        ("limited", "expected whole epochs of 8 batches, got 4"),
        ("padded", "51 samples that Lightning's DistributedSampler pads to 52"),
        ("other_hook", "fp16_compress_hook"),
        ("short_last", "3 samples for 4 shards"),
        ("no_sync_manual", "under no_sync"),
        ("stopped_by_max_steps", "max_steps stopped as finished"),
    ],
)
def test_further_refusals(slow, case, fragment):
    error = raised(slow, case)
    assert error["raised"] == "SpecError"
    assert fragment in error["message"]


# The first seed's function ----------------------------------------------------------------------------------


def seed_targets() -> Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(11))


def test_the_seed_function_lands_from_zero_bit_for_bit(fast):
    for rank in fast:
        assert rank["seed_zero"]["exact"]


def test_the_seed_function_lands_from_anywhere(fast):
    # The original gives t - (W - 1) p there: off by 0.25 everywhere. One rounding of p - (p - t) is left.
    for rank in fast:
        landed = torch.tensor(rank["seed_quarter"]["landed"])
        assert torch.allclose(landed, seed_targets(), rtol=0, atol=2e-7)


def test_the_seed_function_steps_the_schedule_and_counts_as_the_original(fast):
    # Four batches: one sets the values, three are updates; StepLR(1, 0.5) from 0.1, read after its step.
    for rank in fast:
        assert rank["seed_zero"]["lrs"] == pytest.approx([0.05, 0.025, 0.0125])
        assert rank["seed_zero"]["steps"] == 3
        # What has no target stays; 1 - 2 lr, at the rates 0.1, 0.05 and 0.025 of the three updates.
        assert rank["seed_zero"]["other"] == pytest.approx([0.8 * 0.9 * 0.95] * 3)


def test_the_seed_function_refuses_a_weighted_loss_and_workers_that_differ(fast):
    assert "0.5 x that of such a sum" in raised(fast, "seed_weighted")["message"]
    assert raised(fast, "seed_flags")["raised"] == "AgreementError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fragment"),
    [
        ("seed_adam", "Adam, which does not move by lr x gradient"),
        ("seed_rate", "expected lr=0.5, got 0.1"),
        ("seed_momentum", "expected momentum=0, got 0.9"),
        ("seed_world_size", "expected the 2 workers of this trainer, got 3"),
        ("seed_automatic", "automatic_optimization"),
    ],
)
def test_the_seed_function_refuses_what_breaks_it(slow, case, fragment):
    error = raised(slow, case)
    assert error["raised"] == "SpecError"
    assert fragment in error["message"]


@pytest.mark.slow
def test_the_seed_function_needs_no_search_for_unused_parameters(slow):
    assert slow[0]["seed_unused"]["exact"]


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [1, 3])
def test_the_seed_function_is_exact_for_every_number_of_workers(tmp_path, n_workers):
    # The original is one bit off in a third of the elements at 3 workers, by the rounding of W x and / W.
    found = torchrun(JOBS, tmp_path, n_workers, ["seed_zero", "seed_quarter"])
    assert all(rank["seed_zero"]["exact"] for rank in found)
    assert found[0]["seed_quarter"]["landed"] == found[-1]["seed_quarter"]["landed"]


def test_the_seed_function_has_the_originals_signature():
    # Read from the source, since importing Lightning here would take seconds.
    source = (Path(kmeans.__file__).parents[1] / "lightning" / "_seed.py").read_text()
    name = "scale_loss_by_world_size_for_initialization_training_loop"
    found = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name)
    assert [argument.arg for argument in found.args.args] == [
        "model",
        "loss",
        "world_size",
        "is_initialized",
        "initalization_optimizer_lr",
        "initalization_optimizer",
    ]
    assert [ast.unparse(default) for default in found.args.defaults] == ["True", "0.5", "torch.optim.SGD"]


# Long, and as users launch it -------------------------------------------------------------------------------


def example(name: str, *arguments: str) -> str:
    """Run an example as its first lines say: Lightning starts the second process."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_resumes_exactly_and_is_the_same_on_one_worker():
    one, two = (example("lightning_exact.py", "--workers", n) for n in ("1", "2"))
    assert "resumed run equal: True" in one
    assert "resumed run equal: True" in two
    numbers = [ast.literal_eval(out.split("weights ")[1].splitlines()[0]) for out in (one, two)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4)


@pytest.mark.slow
def test_the_new_way_beats_the_old_where_workers_hold_other_items():
    out = example("grid_residual_quantization.py", "--workers", "2", "--rows", "3000")
    found = {
        way: float(re.search(rf"{way}: relative error ([\d.]+)", out)[1]) for way in ("old way", "new way")
    }
    assert found["new way"] < found["old way"]


@pytest.mark.slow
def test_hundreds_of_good_steps_raise_no_alarm(tmp_path):
    found = torchrun(JOBS, tmp_path, 2, ["long"])
    assert [rank["long"]["steps"] for rank in found] == [400, 400]
    assert found[0]["long"]["digest"] == found[1]["long"]["digest"]
