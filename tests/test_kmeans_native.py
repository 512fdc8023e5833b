"""The ways to search and to sum: all come to the same bits, which are those of float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import kmeans
from samestep.kmeans import _native
from samestep.kmeans._search import Nearest, exact_scores
from samestep.kmeans._update import ExactSums

FOUND = _native.kernels()
WAYS = ["torch", *(["scan"] if FOUND else []), *(["tiles"] if FOUND and FOUND.has_tiles else [])]


def by_float64(rows, table):
    """The slow obvious twin: scores of all pairs, in the stated order of additions, the first of equals."""
    half = 0.5 * table.double().square().sum(1)
    scores = torch.stack([
        exact_scores(rows, table[k].expand_as(rows), half[k].expand(len(rows))) for k in range(len(table))
    ], 1)  # fmt: skip
    return scores.argmin(1).numpy()


@pytest.fixture(autouse=True)
def _ways_exist():
    assert WAYS[0] == "torch"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("n", "dim", "k"), [(1, 1, 1), (300, 7, 5), (257, 33, 40), (1100, 64, 515), (90, 200, 31)]
)
def test_every_way_finds_what_float64_finds(way, n, dim, k):
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(n))
    table = torch.randn(k, dim, generator=torch.Generator().manual_seed(k)) * 0.7
    assert (Nearest(table, 1, way).codes(rows) == by_float64(rows, table)).all()


@pytest.mark.parametrize("way", WAYS)
def test_near_ties_are_settled_alike(way):
    """Rows half way between centroids, up to a last bit or two, where a guess in bfloat16 knows nothing."""
    draw = torch.Generator().manual_seed(2)
    table = torch.randn(12, 16, generator=draw)
    pairs = torch.randint(12, (400, 2), generator=draw)
    rows = (table[pairs[:, 0]] + table[pairs[:, 1]]) / 2
    rows += torch.randint(-1, 2, rows.shape, generator=draw) * 1e-7
    assert (Nearest(table, 1, way).codes(rows) == by_float64(rows, table)).all()


@pytest.mark.parametrize("way", WAYS)
def test_ties_and_copies_go_to_the_lowest_index(way):
    table = torch.tensor([[2.0], [1.0], [2.0], [-1.0], [-1.0]])
    rows = torch.tensor([[1.5], [0.0], [5.0], [-9.0]])
    assert Nearest(table, 1, way).codes(rows).tolist() == [0, 1, 0, 3]
    assert Nearest(torch.zeros(600, 3), 1, way).codes(torch.ones(5, 3)).tolist() == [0] * 5


@pytest.mark.parametrize("way", WAYS)
def test_so_many_candidates_that_all_centroids_are_tried(way):
    table = 1.0 + torch.arange(64.0).unsqueeze(1) * 2.0**-22
    rows = table.flip(0).clone()
    assert Nearest(table, 1, way).codes(rows).tolist() == list(range(63, -1, -1))


@settings(max_examples=25)
@given(
    st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.sampled_from([2.0**-25, 1.0, 2.0**25]),
    st.integers(0, 9),
)  # fmt: skip
def test_all_ways_agree(n, dim, k, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, dim, generator=draw).round(decimals=1) * scale
    table = torch.randn(k, dim, generator=draw).round(decimals=1) * scale
    codes = [Nearest(table, 1, way).codes(rows).tolist() for way in WAYS]
    assert all(found == codes[0] for found in codes)


@pytest.mark.skipif(FOUND is None, reason="needs a C compiler")
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_are_the_same_with_and_without_kernels(weighted, monkeypatch):
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.standard_normal((500, 9), dtype=np.float32))
    weights = torch.from_numpy(draw.integers(0, 9, 500) / 8.0) if weighted else None
    old, new = draw.integers(-1, 6, (2, 500), dtype=np.int32)
    new = np.abs(new)
    totals = []
    for native in ("1", "0"):
        monkeypatch.setenv("SAMESTEP_NATIVE", native)
        sums = ExactSums(6, 9, 50.0, 1000, 1)
        n_moved = sums.move(rows, old, new, weights, 0)
        totals.append((n_moved, sums._tables[0].tolist()))
    assert totals[0] == totals[1]
    assert totals[0][0] == int((old != new).sum())


def test_a_fit_has_the_same_bits_without_the_kernels(monkeypatch):
    rows = torch.randn(3000, 20, generator=torch.Generator().manual_seed(1))
    fits = []
    for native in ("1", "0"):
        monkeypatch.setenv("SAMESTEP_NATIVE", native)
        fits.append(kmeans.fit(rows, 30, max_iterations=6))
    assert torch.equal(fits[0].centroids, fits[1].centroids)
    assert fits[0].inertia == fits[1].inertia
