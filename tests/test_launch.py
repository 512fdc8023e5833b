"""The harness itself: whatever a worker does, `run` ends with an error that names it, in bounded time."""

import os
import signal
import time

import pytest
import torch

from samestep import launch
from samestep.errors import AgreementError, SpecError, WorkerError


def place(group, add):
    return group.rank + add, torch.ones(2), os.environ.get("SAMESTEP_TEST"), torch.get_num_threads()


def test_results_come_back_by_rank(monkeypatch):
    monkeypatch.setenv("SAMESTEP_TEST", "seen")
    results = launch.run(place, 3, 10)
    assert [result[0] for result in results] == [10, 11, 12]
    assert all(torch.equal(result[1], torch.ones(2)) for result in results)
    assert {result[2:] for result in results} == {("seen", 1)}


def overwrites(group, tensor):
    if group.rank == 0:
        tensor.fill_(7.0)
    group.barrier()
    return tensor


def test_tensors_are_given_to_each_worker_as_its_own():
    given = torch.zeros(2)
    first, second = launch.run(overwrites, 2, given)
    assert first.tolist() == [7.0, 7.0]
    assert second.tolist() == given.tolist() == [0.0, 0.0]


def raises(group):
    if group.rank == 1:
        raise ValueError("boom")
    group.barrier()


def leaves(group):
    if group.rank == 1:
        os._exit(7)
    group.barrier()


def is_killed(group):
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def returns_what_cannot_travel(group):
    return (lambda: None) if group.rank == 1 else None


@pytest.mark.parametrize(
    ("fn", "rank", "fragment"),
    [
        (raises, 1, "ValueError: boom"),
        (leaves, 1, "left with exit code 7"),
        (is_killed, 0, "was killed by SIGKILL"),
        (returns_what_cannot_travel, 1, "pickle"),
    ],
)
def test_a_worker_that_fails_is_named(fn, rank, fragment):
    with pytest.raises(WorkerError, match=fragment) as caught:
        launch.run(fn, 3, timeout_seconds=60)
    assert caught.value.rank == rank
    assert str(caught.value).startswith(f"rank {rank} of 3")


def test_the_workers_own_exception_is_the_cause():
    with pytest.raises(WorkerError) as caught:
        launch.run(raises, 2)
    assert isinstance(caught.value.__cause__, ValueError)


def hangs(group):
    if group.rank == 1:
        time.sleep(600)
    group.barrier()


def test_a_worker_that_hangs_is_shown_where(monkeypatch):
    start = time.monotonic()
    with pytest.raises(WorkerError, match="in hangs") as caught:
        launch.run(hangs, 2, timeout_seconds=5)
    assert "did not end within 5 seconds" in str(caught.value)
    assert time.monotonic() - start < 60


def disagree(group):
    group.agree(group.rank != 1, "I am not well")


def test_an_error_that_all_raised_is_raised_itself():
    with pytest.raises(AgreementError, match="rank 1 of 2: I am not well"):
        launch.run(disagree, 2)


def refuse(group):
    raise SpecError("wrong", name="x")


def test_fields_come_home():
    with pytest.raises(SpecError) as caught:
        launch.run(refuse, 1)
    assert caught.value.name == "x"


def pids(group):
    return os.getpid()


def test_no_worker_is_left_behind():
    for pid in launch.run(pids, 2):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_world_without_workers_is_refused():
    with pytest.raises(ValueError, match="world_size"):
        launch.run(place, 0)
