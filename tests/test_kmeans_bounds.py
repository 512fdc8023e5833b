"""The bound of a fast guess holds at every scale: rows and centroids of any size, squares that vanish."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.kmeans import _native
from samestep.kmeans._search import Nearest, exact_scores

FOUND = _native.kernels()
WAYS = ["torch", *(["scan"] if FOUND else []), *(["tiles"] if FOUND and FOUND.has_tiles else [])]


def nearest(rows, table):
    """The nearest centroid of each row by float64 scores of all pairs."""
    half = 0.5 * table.double().square().sum(1)
    pairs = [
        exact_scores(rows, centroid.expand_as(rows), size.expand(len(rows)))
        for centroid, size in zip(table, half)
    ]
    return torch.stack(pairs, 1).argmin(1).numpy()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exponent", [-146, -130, -110, -90, -84, -80, -77, -70, -60, 20])
def test_centroids_far_smaller_than_rows(way, exponent):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(500, 96, generator=draw)
    table = torch.randn(40, 96, generator=draw) * 2.0**exponent
    assert (Nearest(table, 1, way).codes(rows) == nearest(rows, table)).all()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(-100, 30),
    st.integers(-100, 30),
)
def test_any_sizes_of_rows_and_centroids(way, seed, dim, k, row_exponent, table_exponent):
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randint(-8, 9, (dim,), generator=draw).double().exp2().float()
    rows = torch.randn(60, dim, generator=draw) * spread * 2.0**row_exponent
    table = torch.randn(k, dim, generator=draw) * spread * 2.0**table_exponent
    assert (Nearest(table, 1, way).codes(rows) == nearest(rows, table)).all()
