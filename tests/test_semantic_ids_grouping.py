"""Rows are grouped as a dictionary would group them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.recipes.semantic_ids import grouping


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2)), min_size=1, max_size=40))
def test_buckets_against_a_counter(rows: list[tuple[int, int]]) -> None:
    found = grouping.buckets(rows)
    counts = Counter(rows)
    assert [tuple(row) for row in found.codes.tolist()] == sorted(counts)
    assert found.sizes.tolist() == [counts[row] for row in sorted(counts)]
    assert [tuple(found.codes[member].tolist()) for member in found.members] == rows


def test_no_rows_give_no_buckets() -> None:
    found = grouping.buckets(np.empty((0, 3), dtype=np.int64))
    assert found.codes.shape == (0, 3)
    assert len(found.sizes) == len(found.members) == 0
    assert len(grouping.positions(found.members, np.empty(0, dtype=str))) == 0
