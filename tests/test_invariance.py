"""The same bits at any number of workers: parameters, buffers, optimizer state and all logged figures.

A few steps of each kind of job here; 300 steps of each in ``benchmarks/invariance.py``.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from samestep import launch
from samestep.group import Group
from workloads import JOBS, Job, train

STEPS = 7  # five fill an epoch, with a last batch of 3 samples for 8 shards
SHORT = [
    job for i, job in enumerate(JOBS) if (i + i // 4) % 2 == 0
]  # each model with both optimizers or dtypes
RUNS: dict[Any, dict[str, Any]] = {}


def run_jobs(group: Group, jobs: list[Job], steps: int) -> dict[str, Any]:
    found = {}
    for job in jobs:
        result = train(group, job, steps)
        found[str(job)] = (result["digest"], result["losses"])
    return found


def at(world_size: int) -> dict[str, Any]:
    if world_size not in RUNS:
        jobs = SHORT if world_size < 8 else SHORT[::2]  # each model once
        results = launch.run(run_jobs, world_size, jobs, STEPS, timeout_seconds=170)
        assert all(result == results[0] for result in results)
        RUNS[world_size] = results[0]
    return RUNS[world_size]


@pytest.mark.parametrize("world_size", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_job_has_the_bits_of_one_worker(world_size):
    found = at(world_size)
    assert found == {name: at(1)[name] for name in found}


def test_the_jobs_are_alive():
    """Equal digests of runs that do nothing would prove nothing."""
    found = at(1)
    assert len({digest for digest, _ in found.values()}) == len(SHORT)
    assert all(first != last and last > 0 for _, (first, last) in found.values())


def one_more_layout(group: Group) -> str:
    return train(group, SHORT[0], STEPS)["digest"]


def test_five_workers_that_do_not_divide_the_shards():
    assert set(launch.run(one_more_layout, 5, timeout_seconds=170)) == {at(1)[str(SHORT[0])][0]}


def other_loading(group: Group, job: Job) -> set[str]:
    return {
        train(group, job, STEPS, num_workers=num_workers, bucket_cap_mb=cap)["digest"]
        for num_workers, cap in ((0, 0.0005), (0, 0.01), (2, None))
    }


@pytest.mark.slow
def test_loader_processes_and_bucket_sizes_change_nothing():
    job = SHORT[4]
    assert launch.run(other_loading, 4, job, timeout_seconds=170) == [{at(1)[str(job)][0]}] * 4


def continued(group: Group, jobs: list[Job], steps: int, saved: bytes) -> list[dict[str, Any]]:
    return [train(group, job, steps, state) for job, state in zip(jobs, pickle.loads(saved))]


def test_a_run_may_change_its_number_of_workers():
    jobs = [SHORT[2], SHORT[5]]
    states: list[Any] = [None, None]
    for world_size, steps in ((4, 2), (1, 1), (3, 3), (2, 1)):
        # As bytes, like a file: tensors as arguments would lie in memory that all workers share.
        results = launch.run(continued, world_size, jobs, steps, pickle.dumps(states), timeout_seconds=170)[0]
        states = [result["state"] for result in results]
    assert [result["digest"] for result in results] == [at(1)[str(job)][0] for job in jobs]


def fast(group: Group) -> str:
    return train(group, Job("mlp", mode="fast"), STEPS)["digest"]


def test_the_digest_would_show_another_order_of_additions():
    """Fast mode is right to rounding only: at 4 workers its bits are others."""
    assert launch.run(fast, 4, timeout_seconds=170)[0] != launch.run(fast, 1, timeout_seconds=170)[0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_job_over_many_steps(world_size):
    results = launch.run(run_jobs, world_size, JOBS, 40, timeout_seconds=900)
    if "long" not in RUNS:
        RUNS["long"] = launch.run(run_jobs, 1, JOBS, 40, timeout_seconds=900)[0]
    assert results == [RUNS["long"]] * world_size
