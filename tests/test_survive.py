"""Stopping together, and not hanging: signals to any worker at any moment, workers stuck in Python or in C."""

import os
import re
import signal
import time

import pytest
import torch

from samestep import launch
from samestep.errors import SpecError, WorkerError
from samestep.group import Group
from samestep.pooling import alone
from samestep.reduce import pool
from samestep.survive import Guard, Stopped


def stops(group, victim, number):
    with Guard(group) as guard:
        for step in range(10_000):
            if step == 3 and group.rank == victim:
                os.kill(os.getpid(), number)
            guard.ask()
            group.barrier()  # the step, with collectives of its own
            if guard.answer():
                return step, guard.stopping, guard.was_asked
    return None


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_all_stop_at_one_step_whoever_gets_the_signal(victim, number):
    found = launch.run(stops, 3, victim, number)
    assert len({step for step, _, _ in found}) == 1
    assert found[0][0] >= 3
    assert [(stopping, asked) for _, stopping, asked in found] == [
        (True, rank == victim) for rank in range(3)
    ]


def stops_in_a_pool(group):
    with Guard(group) as guard:
        guarded = guard.pool(pool(group))
        first = guarded(torch.ones(2)).tolist()
        assert guarded.is_main == group.is_main
        assert guarded.offset(2) == 2 * group.rank
        if group.rank == 1:
            guard.request_stop()
        try:
            while True:
                guarded(torch.ones(2), "max")
        except Stopped as error:
            return first, error.common, error.exit_code


def test_long_work_on_a_pool_stops_between_two_calls():
    assert launch.run(stops_in_a_pool, 2) == [([2.0, 2.0], True, 0)] * 2


def handlers():
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)


def test_a_single_process_and_what_it_finds_again():
    before = handlers()
    with Guard(Group.single()) as guard:
        assert handlers() != before
        assert not guard.answer()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not guard.answer() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert guard.stopping
        with pytest.raises(Stopped, match="--resume"):
            guard.pool(alone)(torch.ones(1))
        assert guard.was_asked
    assert handlers() == before


def asks_twice(group):
    with Guard(group) as guard:
        os.kill(os.getpid(), signal.SIGINT)
        while not guard.was_asked:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def test_the_second_ctrl_c_is_immediate():
    with pytest.raises(WorkerError, match="left with exit code 130"):
        launch.run(asks_twice, 1)


def finds_no_boundary(group, folder):
    with Guard(group, grace_seconds=0.2) as guard:
        guard.write_stacks_to(folder / f"stacks-rank{group.rank}.txt")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


def test_a_grace_period_that_is_over_ends_the_worker_with_its_stack(tmp_path):
    with pytest.raises(WorkerError, match="left with exit code 3"):
        launch.run(finds_no_boundary, 1, tmp_path)
    assert "in finds_no_boundary" in (tmp_path / "stacks-rank0.txt").read_text()


def one_hangs(group, folder):
    with Guard(group, timeout_seconds=0.5) as guard:
        guard.write_stacks_to(folder / f"stacks-rank{group.rank}.txt")
        for step in range(1000):
            guard.ask()
            if step == 2 and group.rank == 1:
                sleeps_for_ever()
            guard.answer()


def sleeps_for_ever():
    time.sleep(600)


def test_a_worker_that_hangs_shows_every_rank_where_it_is(tmp_path):
    (tmp_path / "stacks-rank1.txt").write_text("of an earlier start\n")
    with pytest.raises(WorkerError, match="left with exit code 3"):
        launch.run(one_hangs, 2, tmp_path)
    stack = (tmp_path / "stacks-rank1.txt").read_text()
    assert stack.startswith("of an earlier start")
    assert "in sleeps_for_ever" in stack
    assert "in answer" in (tmp_path / "stacks-rank0.txt").read_text()


def holds_the_interpreter(group, folder):
    with Guard(group, timeout_seconds=0.3) as guard:
        guard.write_stacks_to(folder / "stacks-rank0.txt")
        re.match(r"(a+)+$", "a" * 60 + "b")  # one call into C that takes longer than anybody waits


def test_a_worker_stuck_in_c_is_ended_by_an_alarm(tmp_path):
    with pytest.raises(WorkerError, match="was killed by SIGALRM"):
        launch.run(holds_the_interpreter, 1, tmp_path)
    assert "in holds_the_interpreter" in (tmp_path / "stacks-rank0.txt").read_text()


def test_a_beat_puts_the_time_out_off_and_no_empty_file_stays(tmp_path):
    with Guard(Group.single(), timeout_seconds=0.4) as guard:
        guard.write_stacks_to(tmp_path / "stacks-rank0.txt")
        for _ in range(8):
            time.sleep(0.1)
            guard.beat()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("times", [{"grace_seconds": 0}, {"timeout_seconds": -1.0}])
def test_times_are_positive(times):
    with pytest.raises(SpecError, match=next(iter(times))):
        Guard(Group.single(), **times)


def loses_a_peer(group):
    with Guard(group) as guard:
        if group.rank == 1:
            os._exit(9)
        guard.answer()


def test_a_dead_peer_is_an_error_and_no_hang():
    with pytest.raises(WorkerError, match="left with exit code 9"):
        launch.run(loses_a_peer, 2)
