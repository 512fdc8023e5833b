"""A name for each start: whatever the dead have left in the store, the living agree on a new one."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from samestep.errors import GroupError
from samestep.handshake import apart, name_of_start


def start(store, world_size, late=()):
    names = {}

    def join(rank):
        time.sleep(0.05 if rank in late else 0.0)
        names[rank] = name_of_start(store, rank, world_size, 20.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names.values())) == 1
    return names[0]


def test_every_start_has_a_name_of_its_own_at_any_number_of_workers():
    store = dist.HashStore()
    names = [start(store, n, late) for n, late in ((3, ()), (3, (0,)), (2, (1,)), (4, (2, 3)), (1, ()))]
    assert len(set(names)) == 5


def test_a_start_that_was_cut_off_is_no_hindrance():
    store = dist.HashStore()
    for rank in (1, 2, 3):  # said hello and died
        store.set(f"samestep/start/hello/{rank}", f"dead-{rank}")
    with pytest.raises(GroupError, match="rank 1 of 3"):  # this worker 0 died waiting for them
        name_of_start(store, 0, 3, 0.05)
    assert start(store, 3, late=(1, 2)) != start(store, 3, late=(0,))


def test_a_worker_that_nobody_answers_gives_up():
    with pytest.raises(dist.DistStoreError):
        name_of_start(dist.HashStore(), 1, 2, 0.05)


def test_keys_of_one_start_are_not_seen_by_the_next(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    first, second = apart(store, 0, 1, 5.0), apart(store, 0, 1, 5.0)
    first.set("address", "of the dead")
    assert not second.check(["address"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert apart(store, 1, 2, 5.0).check(["address"]) is False
    assert "TORCHELASTIC_USE_AGENT_STORE" in os.environ
