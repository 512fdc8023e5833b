"""Residual codebooks: errors reach the bars, codes decode, and no split of the rows changes a bit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from samestep import codebooks, launch, reduce
from samestep.errors import SpecError

ESCO = Path(__file__).parents[2] / "shared" / "data" / "esco_skills_minilm.npz"


def rows(n: int = 2000, dim: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    centres = 4 * torch.randn(20, dim, generator=generator)
    return (
        centres[torch.randint(20, (n,), generator=generator)] + torch.randn(n, dim, generator=generator) + 2
    )


def set_a() -> Tensor:
    """40 x 25 nested Gaussian groups with uneven weights, 12,101 rows in 128 dimensions."""
    draw = np.random.default_rng(0)
    outer = draw.normal(size=(40, 128))
    inner = outer[:, None] + 0.5 * draw.normal(size=(40, 25, 128))
    share = draw.dirichlet(np.ones(1000))
    points = inner.reshape(1000, 128)[draw.choice(1000, 12101, p=share)] + 0.25 * draw.normal(
        size=(12101, 128)
    )
    return torch.from_numpy(points).float()


def error(points: Tensor, books: codebooks.Codebooks, n_levels: int) -> float:
    """The obvious way, in float64."""
    decoded = codebooks.decode(codebooks.encode(points, books)[:, :n_levels], books).double()
    exact = points.double()
    return float((exact - decoded).square().sum() / (exact - exact.mean(0)).square().sum())


def state(books: codebooks.Codebooks) -> tuple[object, ...]:
    levels = [level.numpy().tobytes() for level in books.levels]
    fits = [(found.inertia, found.counts.tolist(), found.n_iterations) for found in books.fits]
    return (levels, books.offset.numpy().tobytes(), fits, books.relative_errors, books.n_sampled)


CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "normalized": {"normalize_residuals": True},
    "sampled": {"sample_size": 700, "seeding": "random"},
    "raw": {"center": False},
    "weights": {},
}


def case(name: str, mine: slice, **more: object) -> tuple[object, ...]:
    options: dict[str, object] = {"max_iterations": 4, **CASES[name], **more}
    if name == "weights":
        options["weights"] = (torch.arange(2000) % 5).float()[mine]
    return state(codebooks.fit(rows()[mine], [16, 8], **options))  # type: ignore[arg-type]


def split_worker(group: object, bounds: list[int]) -> dict[str, tuple[object, ...]]:
    rank = group.rank  # type: ignore[attr-defined]
    pool = reduce.pool(group)  # type: ignore[arg-type]
    return {name: case(name, slice(bounds[rank], bounds[rank + 1]), pool=pool) for name in CASES}


@pytest.mark.parametrize("bounds", [[0, 700, 2000], [0, 1500, 1500, 2000]])
def test_any_split_over_workers_gives_the_same_bits(bounds: list[int]) -> None:
    expected = {name: case(name, slice(0, 2000)) for name in CASES}
    for result in launch.run(split_worker, len(bounds) - 1, bounds, timeout_seconds=120):
        assert result == expected


@pytest.mark.parametrize("name", list(CASES))
def test_threads_and_missing_memory_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case(name, slice(0, 2000))
    monkeypatch.setattr("samestep.kmeans._residual.CACHE_BYTES", 0)
    assert case(name, slice(0, 2000), n_threads=2) == expected


@pytest.mark.parametrize("center", [True, False])
def test_errors_are_those_of_decoding(center: bool) -> None:
    books = codebooks.fit(rows(), [16, 8, 8], center=center, max_iterations=5)
    for level in range(3):
        assert books.relative_errors[level] == pytest.approx(error(rows(), books, level + 1), rel=1e-5)
    assert list(books.relative_errors) == sorted(books.relative_errors, reverse=True)
    assert (books.offset.abs().sum() > 0) == center


def test_chunks_and_half_precision() -> None:
    points = rows().half()
    whole = codebooks.fit(points, [16, 8])
    assert state(codebooks.fit(list(points.split(333)), [16, 8])) == state(whole)
    assert torch.equal(codebooks.encode(list(points.split(99)), whole), codebooks.encode(points, whole))


def test_an_offset_does_no_harm() -> None:
    plain, moved = codebooks.fit(rows().double(), [16, 8]), codebooks.fit(rows().double() + 1e4, [16, 8])
    assert moved.relative_errors == pytest.approx(plain.relative_errors, rel=1e-3)
    decoded = codebooks.decode(codebooks.encode(rows().double() + 1e4, moved), moved)
    assert float((decoded.double() - 1e4 - rows()).abs().max()) < 5


def test_encode_goes_down_the_levels() -> None:
    tables = [torch.tensor([[0.0, 0.0], [10.0, 0.0]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])]
    codes = codebooks.encode(torch.tensor([[9.0, 0.0], [0.0, 1.0], [11.0, 0.0]]), tables)
    assert codes.tolist() == [[1, 0], [0, 2], [1, 1]]
    assert codes.dtype is torch.int64
    assert codebooks.decode(codes, tables).tolist() == [[9.0, 0.0], [0.0, 1.0], [11.0, 0.0]]
    assert codebooks.encode(torch.zeros(0, 2), tables).shape == (0, 2)


def test_codes_do_not_depend_on_the_other_rows() -> None:
    books = codebooks.fit(rows(), [16, 8])
    codes = codebooks.encode(rows(), books)
    assert torch.equal(codebooks.encode(rows()[1234:1235], books), codes[1234:1235])
    assert torch.equal(codebooks.encode(rows().flip(0), books), codes.flip(0))


def test_normalized_residuals() -> None:
    books = codebooks.fit(rows(), [16, 8], normalize_residuals=True, max_iterations=5)
    left = rows() - books.offset
    for level, code in enumerate(codebooks.encode(rows(), books).unbind(1)):
        unit = torch.nn.functional.normalize(left.double())
        left = unit.float() - books.levels[level][code]
        share = float(left.double().square().sum() / unit.square().sum())
        assert books.relative_errors[level] == pytest.approx(share, rel=1e-5)
    with pytest.raises(ValueError, match="normalized"):
        codebooks.decode(torch.zeros(1, 2, dtype=torch.int64), books)


def test_a_sample_is_measured_on_all_rows() -> None:
    books = codebooks.fit(rows(), [8, 8], sample_size=100)
    assert books.n_sampled == 100
    assert int(books.fits[0].counts.sum()) == 100
    assert books.relative_errors[1] == pytest.approx(error(rows(), books, 2), rel=1e-5)
    assert codebooks.fit(rows(), [8], sample_size=10**6).n_sampled == 2000


def test_constant_points_are_lossless() -> None:
    books = codebooks.fit(torch.full((20, 3), 2.5), [4, 4])
    assert books.relative_errors == (0.0, 0.0)
    assert [found.n_used for found in books.fits] == [1, 1]
    assert codebooks.decode(codebooks.encode(torch.full((1, 3), 2.5), books), books).tolist() == [[2.5] * 3]


def test_progress_names_the_level() -> None:
    seen: list[tuple[int, int]] = []
    codebooks.fit(
        rows(), [8, 4], max_iterations=2, progress=lambda level, step, _: seen.append((level, step))
    )
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_nested_groups_reach_the_bar() -> None:
    books = codebooks.fit(set_a(), [256, 256, 256])
    assert [found.n_used for found in books.fits] == [256, 256, 256]
    assert books.relative_errors[2] <= 0.16


def test_real_embeddings_do_as_well_as_faiss() -> None:
    if not ESCO.exists():
        pytest.skip("the ESCO embeddings are not beside the checkout")
    points = np.load(ESCO)["embeddings"]
    books = codebooks.fit(points, [256, 256, 256], max_iterations=25)
    # faiss residual k-means, 25 iterations on all centred rows, after each level.
    for ours, theirs in zip(books.relative_errors, (0.689, 0.570, 0.513)):
        assert ours <= theirs * 1.005
    assert [found.n_used for found in books.fits] == [256, 256, 256]


@pytest.mark.parametrize(
    ("options", "expected", "fragment"),
    [
        ({"n_centroids": []}, ValueError, "n_centroids"),
        ({"n_centroids": [4, 0]}, ValueError, "n_centroids"),
        ({"n_centroids": [4, 3000]}, SpecError, "3000"),
        ({"sample_size": 3}, ValueError, "sample_size"),
        ({"seeding": torch.zeros(4, 12)}, TypeError, "seeding"),
        ({"points": torch.full((9, 2), math.nan)}, SpecError, "row 0"),
    ],
)
def test_fit_refuses(options: dict[str, object], expected: type[Exception], fragment: str) -> None:
    with pytest.raises(expected, match=fragment):
        codebooks.fit(**{"points": rows(), "n_centroids": [4, 4], **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "codes",
    [torch.tensor([[2]]), torch.tensor([[-1]]), torch.tensor([[0, 0]]), torch.tensor([0]), torch.zeros(1, 1)],
)
def test_decode_refuses(codes: Tensor) -> None:
    with pytest.raises(ValueError, match="codes"):
        codebooks.decode(codes, [torch.zeros(2, 3)])


def test_encode_refuses() -> None:
    for tables in ([], [torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(3)]):
        with pytest.raises(ValueError, match="codebooks"):
            codebooks.encode(torch.zeros(1, 3), tables)
    with pytest.raises(ValueError, match="row 1"):
        codebooks.encode(torch.tensor([[0.0], [math.nan]]), [torch.zeros(2, 1)])
    with pytest.raises(ValueError, match="dim"):
        codebooks.encode(torch.zeros(1, 3), [torch.zeros(2, 2)])
