"""Random streams: keyed by every part, alike everywhere, and the caller's own left alone."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep import streams
from workers import generators_digest

WHOLE = st.integers(0, 2**40)


@given(a=st.lists(WHOLE, min_size=1, max_size=4), b=st.lists(WHOLE, min_size=1, max_size=4))
def test_keys_are_equal_only_for_equal_parts(a, b):
    assert (streams.key(*a) == streams.key(*b)) == (a == b)
    assert 0 <= streams.key(*a) < 2**63


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def test_the_same_parts_give_the_same_numbers_and_others_do_not():
    found = []
    for parts in ((1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 3, 2)):
        streams.seed_all(*parts)
        found.append(draw())
    assert found[0] == found[1]
    assert len({*found}) == 3
    assert len({*found[0]}) == 3  # NumPy's and Python's generators do not repeat each other


def test_the_callers_generators_are_left_alone_even_by_an_error():
    before = generators_digest()
    try:
        with streams.preserved(torch.device("cpu")):
            streams.seed_all(1)
            draw()
            raise KeyError
    except KeyError:
        pass
    assert generators_digest() == before


def test_blocks_may_be_nested():
    device = torch.device("cpu")
    before = generators_digest()
    with streams.preserved(device):
        streams.seed_all(1)
        here = generators_digest()
        with streams.preserved(device):
            streams.seed_all(2)
            draw()
        assert generators_digest() == here
    assert generators_digest() == before
