"""k-means: the same bits on any split of the rows, right answers, and one error for all workers."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from samestep import kmeans, launch, reduce
from samestep.errors import SpecError
from samestep.kmeans._assign import row_distances
from samestep.kmeans._search import Nearest


def rows(n: int = 3000, dim: int = 20, groups: int = 30, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(groups, dim, generator=generator)
    return centres[torch.randint(groups, (n,), generator=generator)] + torch.randn(
        n, dim, generator=generator
    )


def bits(found: kmeans.KMeans) -> tuple[object, ...]:
    return (
        found.centroids.numpy().tobytes(),
        tuple(found.counts.tolist()),
        found.inertia,
        found.n_iterations,
    )


def true_inertia(points: Tensor, centroids: Tensor) -> float:
    """The obvious way: all differences, in float64."""
    gaps = points.double()[:, None, :] - centroids.double()[None, :, :]
    return float(gaps.square().sum(2).amin(1).sum())


# --- splits of the rows over workers, threads and chunks


CASES: dict[str, dict[str, object]] = {
    "k-means++": {},
    "random": {"seeding": "random"},
    "k-means||": {"seeding": "k-means||"},
    "overrelaxed": {"acceleration": "overrelaxed", "seeding": "random"},
    "spherical": {"spherical": True},
    "balanced": {"balanced": True, "max_iterations": 1},
    "keep": {"empty": "keep", "seeding": "random"},
    "few values": {"seeding": "random"},
    "weights": {},
    "half": {},
    "offset": {},
}


def case_rows(name: str) -> Tensor:
    points = rows()
    if name == "few values":
        # Duplicates leave centroids empty, so that refilling is exercised.
        points = points[:40].repeat(75, 1)[:3000]
    if name == "half":
        return points.half()
    return points + 1e3 if name == "offset" else points


def case_fit(name: str, mine: slice, **more: object) -> tuple[object, ...]:
    options = dict(CASES[name])
    if name == "weights":
        options["weights"] = (torch.arange(3000) % 7).float()[mine] / 3
    options.setdefault("max_iterations", 6)
    k = 64 if name == "few values" else 32
    return bits(kmeans.fit(case_rows(name)[mine], k, **options, **more))  # type: ignore[arg-type]


def split_worker(group: object, bounds: list[int]) -> dict[str, tuple[object, ...]]:
    rank = group.rank  # type: ignore[attr-defined]
    mine = slice(bounds[rank], bounds[rank + 1])
    return {name: case_fit(name, mine, pool=reduce.pool(group)) for name in CASES}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone_results() -> dict[str, tuple[object, ...]]:
    return {name: case_fit(name, slice(0, 3000)) for name in CASES}


@pytest.mark.parametrize(
    "bounds", [[0, 3000], [0, 1000, 3000], [0, 1, 1700, 3000], [0, 1024, 1024, 2990, 3000]]
)
def test_any_split_over_workers_gives_the_same_bits(
    bounds: list[int], alone_results: dict[str, tuple[object, ...]]
) -> None:
    for result in launch.run(split_worker, len(bounds) - 1, bounds, timeout_seconds=120):
        for name in CASES:
            assert result[name] == alone_results[name], name


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("n_threads", [2, 3])
def test_threads_change_no_bit(
    name: str, n_threads: int, alone_results: dict[str, tuple[object, ...]]
) -> None:
    assert case_fit(name, slice(0, 3000), n_threads=n_threads) == alone_results[name]


class Chunks:
    """Chunks that can be read again, of odd sizes."""

    def __init__(self, points: Tensor, sizes: list[int]) -> None:
        self.points, self.sizes = points, sizes

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.points.split(self.sizes))


def test_tensor_array_memmap_and_chunks_give_the_same_bits(tmp_path: Path) -> None:
    points = rows(2500)
    expected = bits(kmeans.fit(points, 16))
    np.save(tmp_path / "points.npy", points.numpy())
    np.save(tmp_path / "big.npy", points.numpy().astype(">f4"))
    sources = [
        points.numpy(),
        points.t().contiguous().t(),
        np.load(tmp_path / "points.npy", mmap_mode="r"),
        np.load(tmp_path / "big.npy", mmap_mode="r"),
        Chunks(points, [1, 1030, 0, 1400, 69]),
        list(points.split(311)),
        points.clone().requires_grad_(),
    ]
    for source in sources:
        assert bits(kmeans.fit(source, 16)) == expected


def test_rows_do_not_depend_on_their_place_in_a_block() -> None:
    for dim in (3, 32, 100):
        points, table = rows(2100, dim), rows(600, dim, seed=1)
        codes, gaps = kmeans.assign(points, table)
        for shift in (1, 500, 1023):
            moved_codes, moved_gaps = kmeans.assign(points[shift:], table)
            assert torch.equal(moved_codes, codes[shift:])
            assert torch.equal(moved_gaps, gaps[shift:])


def test_rows_without_a_copy_and_prepared_again_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: case_fit(name, slice(0, 3000)) for name in ("half", "offset", "spherical")}
    monkeypatch.setattr("samestep.kmeans._residual.CACHE_BYTES", 0)
    for name, result in expected.items():
        assert case_fit(name, slice(0, 3000)) == result


# --- right values


def test_inertia_and_counts_belong_to_the_centroids() -> None:
    points = rows()
    found = kmeans.fit(points, 32)
    codes, gaps = kmeans.assign(points, found.centroids)
    assert found.inertia == pytest.approx(true_inertia(points, found.centroids), rel=1e-6)
    assert torch.equal(torch.bincount(codes, minlength=32), found.counts)
    assert float(gaps.double().sum()) == pytest.approx(found.inertia, rel=1e-6)
    assert found.n_used == 32


def test_lloyd_from_given_seeds_equals_a_float64_twin() -> None:
    points = rows(800, 8, 12)
    seeds = points[:12].clone()
    table = seeds.double()
    for _ in range(6):
        codes = (points.double()[:, None] - table[None]).square().sum(2).argmin(1)
        table = torch.stack([points.double()[codes == k].mean(0) for k in range(12)])
    found = kmeans.fit(points, 12, seeding=seeds, max_iterations=6, tolerance=0.0)
    torch.testing.assert_close(found.centroids.double(), table, rtol=1e-5, atol=1e-5)


def test_agrees_with_scikit_learn_from_the_same_seeds() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    points = rows(2000, 16, 25)
    peer = cluster.KMeans(16, init=points[:16].numpy(), n_init=1, max_iter=8, tol=0).fit(points.numpy())
    found = kmeans.fit(points, 16, seeding=points[:16], max_iterations=8, tolerance=0.0)
    assert found.inertia == pytest.approx(float(peer.inertia_), rel=1e-4)


@settings(max_examples=25, deadline=None)
@example(n=17, k=2, dim=3, seed=0, acceleration="overrelaxed")
@given(
    n=st.integers(5, 60),
    k=st.integers(1, 5),
    dim=st.integers(1, 4),
    seed=st.integers(0, 9),
    acceleration=st.sampled_from(["none", "overrelaxed"]),
)
def test_inertia_never_rises(n: int, k: int, dim: int, seed: int, acceleration: str) -> None:
    points = rows(n, dim, 4, seed)
    seen: list[float] = []
    kmeans.fit(
        points, k, seeding="random", empty="keep", tolerance=0.0, seed=seed, acceleration=acceleration,  # type: ignore[arg-type]
        progress=lambda _, inertia: seen.append(inertia),
    )  # fmt: skip
    assert all(later <= earlier * (1 + 1e-6) + 1e-9 for earlier, later in itertools.pairwise(seen))


def test_weights_count_rows_as_often() -> None:
    points = rows(300, 5, 6)
    times = torch.arange(300) % 4
    seeds = points[:6]
    weighted = kmeans.fit(points, 6, seeding=seeds, weights=times.double(), tolerance=0.0)
    repeated = kmeans.fit(points.repeat_interleave(times, 0), 6, seeding=seeds, tolerance=0.0)
    torch.testing.assert_close(weighted.centroids, repeated.centroids, rtol=1e-5, atol=1e-5)
    assert weighted.inertia == pytest.approx(repeated.inertia, rel=1e-5)


def test_spherical_groups_by_direction() -> None:
    points = torch.tensor([[1.0, 0.1], [9.0, 0.0], [0.0, 5.0], [0.01, 0.1]])
    found = kmeans.fit(points, 2, spherical=True)
    torch.testing.assert_close(found.centroids.norm(dim=1), torch.ones(2))
    codes, _ = kmeans.assign(points, found.centroids)
    assert codes[0] == codes[1] != codes[2] == codes[3]
    units = points / points.norm(dim=1, keepdim=True)
    assert found.inertia == pytest.approx(true_inertia(units, found.centroids), rel=1e-5)


def test_balanced_cells_are_equal_and_stable() -> None:
    points = rows(205, 3, 4)
    found = kmeans.fit(points, 10, balanced=True, max_iterations=1, seeding=points[:10])
    assert found.counts.tolist() == [21] * 5 + [20] * 5
    even = kmeans.fit(torch.tensor([[0.0], [0.1], [0.2], [9.0]]), 2, balanced=True)
    assert even.counts.tolist() == [2, 2]


def test_over_relaxation_does_at_least_as_well_in_as_many_passes() -> None:
    points = rows(4000, 16, 200)
    plain = kmeans.fit(points, 64, seeding="random", max_iterations=8, tolerance=0.0)
    fast = kmeans.fit(
        points, 64, seeding="random", max_iterations=8, tolerance=0.0, acceleration="overrelaxed"
    )
    assert fast.inertia <= plain.inertia


# --- edge cases


def test_as_many_points_as_centroids() -> None:
    points = rows(40, 6)
    for seeding in ("k-means++", "random", "k-means||"):
        found = kmeans.fit(points, 40, seeding=seeding)  # type: ignore[arg-type]
        assert (found.inertia, found.n_used, found.counts.tolist()) == (0.0, 40, [1] * 40)


@pytest.mark.parametrize("seeding", ["k-means++", "random", "k-means||"])
def test_fewer_distinct_rows_than_centroids(seeding: str) -> None:
    points = rows(5, 4).repeat(20, 1)
    found = kmeans.fit(points, 16, seeding=seeding)  # type: ignore[arg-type]
    assert found.inertia == pytest.approx(0.0, abs=1e-9)
    assert found.n_used == 5
    real = {tuple(row) for row in points.tolist()}
    for row in found.centroids.tolist():
        assert min(math.dist(row, other) for other in real) < 1e-5


def test_repeated_rows_still_use_all_centroids() -> None:
    found = kmeans.fit(rows(300, 8).repeat(10, 1), 256, seeding="random")
    assert found.n_used == 256


@pytest.mark.parametrize("value", [0.0, 7.25, 1e-24, 1e20])
def test_all_points_equal(value: float) -> None:
    found = kmeans.fit(torch.full((50, 3), value), 4)
    assert found.inertia == 0.0
    assert found.n_used == 1
    assert torch.equal(found.centroids, torch.full((4, 3), value))


def test_one_centroid_is_the_mean() -> None:
    points = rows(5000, 7)
    found = kmeans.fit(points, 1)
    torch.testing.assert_close(found.centroids[0].double(), points.double().mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_an_offset_does_no_harm(offset: float) -> None:
    points = rows(2000, 16, 64)
    plain, moved = kmeans.fit(points, 64), kmeans.fit(points + offset, 64)
    assert moved.inertia == pytest.approx(plain.inertia, rel=0.02)
    assert moved.n_used == 64
    exact = kmeans.fit(points.double() + offset, 64)
    assert exact.inertia == pytest.approx(plain.inertia, rel=0.02)


@pytest.mark.parametrize("exponent", [-80, 66])
def test_powers_of_two_change_nothing_but_the_scale(exponent: int) -> None:
    points = rows(1000, 8, 8)
    plain, scaled = kmeans.fit(points, 8), kmeans.fit(points * 2.0**exponent, 8)
    assert torch.equal(plain.centroids * 2.0**exponent, scaled.centroids)
    assert scaled.inertia == pytest.approx(plain.inertia * 2.0 ** (2 * exponent), rel=1e-12)


def test_a_far_outlier_gets_its_own_cell() -> None:
    points = torch.cat([rows(500, 4, 3), torch.full((1, 4), 1e6)])
    found = kmeans.fit(points, 4)
    assert 1 in found.counts.tolist()
    assert found.inertia == pytest.approx(true_inertia(points, found.centroids), rel=1e-5)
    plain = kmeans.fit(points[:500], 3)
    assert found.inertia == pytest.approx(plain.inertia, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_computed_in_float32(dtype: torch.dtype) -> None:
    points = rows(1000, 8, 8).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = kmeans.fit(points, 8)
    torch.testing.assert_close(found.centroids, kmeans.fit(points.float(), 8).centroids)


def test_half_precision_beyond_its_range() -> None:
    points = (32 * torch.ones(10, 64)).half()
    points[5:] = 60000
    found = kmeans.fit(points, 2)
    assert sorted(found.centroids[:, 0].tolist()) == [32.0, 60000.0]
    assert found.inertia == 0.0


def test_empty_cells_never_become_nan() -> None:
    points = torch.tensor([[1.0, 1.0]] * 4)
    for empty in ("farthest", "keep"):
        assert bool(kmeans.fit(points, 2, empty=empty).centroids.isfinite().all())  # type: ignore[arg-type]


def test_empty_keep_and_farthest() -> None:
    points = torch.tensor([[0.0], [1.0], [10.0]])
    seeds = torch.tensor([[0.0], [100.0]])
    kept = kmeans.fit(points, 2, seeding=seeds, empty="keep")
    assert kept.centroids[1].item() == 100.0
    assert kept.n_used == 1
    moved = kmeans.fit(points, 2, seeding=seeds)
    assert sorted(moved.centroids[:, 0].tolist()) == [0.5, 10.0]


# --- assign


def test_ties_go_to_the_lowest_index() -> None:
    table = torch.tensor([[5.0], [1.0], [3.0], [1.0]])
    codes, gaps = kmeans.assign(torch.tensor([[2.0], [1.0], [4.0]]), table)
    assert codes.tolist() == [1, 1, 0]
    assert gaps.tolist() == [1.0, 0.0, 1.0]
    many = torch.cat([rows(700, 24)] * 2)
    assert kmeans.assign(rows(700, 24), many)[0].tolist() == list(range(700))


def test_a_common_offset_does_not_change_codes() -> None:
    points = (100 + 0.01 * torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))).float()
    codes, gaps = kmeans.assign(points, points[:256])
    direct = torch.cat(
        [(part[:, None].double() - points[:256].double()).square().sum(2) for part in points.split(250)]
    )
    assert (codes != direct.argmin(1)).sum() == 0
    torch.testing.assert_close(gaps, direct.amin(1).float(), rtol=1e-4, atol=1e-9)


def test_distances_that_cancel() -> None:
    _, gaps = kmeans.assign(torch.tensor([[512695.0]]), torch.tensor([[512804.0]]))
    assert gaps.tolist() == [109.0**2]


def test_a_row_far_from_all_centroids() -> None:
    codes, gaps = kmeans.assign(
        torch.tensor([[1e30, 0.0], [-1e30, 1.0]]), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    )
    assert codes.tolist() == [1, 0]
    assert gaps.tolist() == [math.inf, math.inf]


def test_assign_nothing() -> None:
    codes, gaps = kmeans.assign(torch.zeros(0, 3), torch.zeros(2, 3))
    assert (codes.shape, codes.dtype, gaps.shape) == ((0,), torch.int64, (0,))


def test_row_distances_are_direct() -> None:
    points = rows(1500, 5)
    table = points[:700].clone()
    codes = Nearest(table, 1).codes(points)
    assert codes[:700].tolist() == list(range(700))
    assert float(row_distances(points, table, codes)[:700].amax()) == 0.0


@pytest.mark.parametrize(
    ("points", "table", "fragment"),
    [
        (torch.zeros(3, 2), torch.zeros(2, 3), "dim 3"),
        (torch.tensor([[0.0], [math.nan]]), torch.zeros(1, 1), "row 1"),
        (torch.tensor([[0.0], [math.inf]]), torch.zeros(1, 1), "row 1"),
        (torch.zeros(3, 2), torch.tensor([[0.0, math.nan]]), "centroids"),
        (torch.zeros(3, 2), torch.zeros(0, 2), "centroids"),
        (torch.zeros(3), torch.zeros(1, 2), "points"),
    ],
)
def test_assign_refuses(points: Tensor, table: Tensor, fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        kmeans.assign(points, table)


# --- refusals of fit


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_named(value: float) -> None:
    points = rows(3000)
    points[2071, 3] = value
    points[2500, 3] = value
    with pytest.raises(SpecError, match="row 2071"):
        kmeans.fit(points, 8)


def test_fewer_points_than_centroids() -> None:
    with pytest.raises(SpecError, match=r"n_centroids=128 .* got 71"):
        kmeans.fit(rows(71), 128)


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"n_centroids": 0}, ValueError, "n_centroids"),
        ({"max_iterations": 0}, ValueError, "max_iterations"),
        ({"tolerance": -1.0}, ValueError, "tolerance"),
        ({"seeding": "farthest"}, ValueError, "seeding"),
        ({"seeding": torch.zeros(3, 2)}, SpecError, "seeding"),
        ({"empty": "split"}, ValueError, "empty"),
        ({"acceleration": "hamerly"}, ValueError, "acceleration"),
        ({"n_threads": 0}, ValueError, "n_threads"),
        ({"weights": torch.ones(3)}, SpecError, "weights"),
        ({"weights": -torch.ones(30)}, SpecError, "weights"),
        ({"weights": torch.zeros(30)}, SpecError, "weights"),
        ({"weights": torch.ones(30), "balanced": True}, ValueError, "balanced"),
        ({"points": iter([torch.zeros(30, 4)])}, TypeError, "read again"),
        ({"points": torch.zeros(30, 4, dtype=torch.int64)}, SpecError, "float"),
        ({"points": "points.npy"}, SpecError, "points"),
        ({"points": torch.zeros(30, 4), "spherical": True}, SpecError, "row 0"),
        ({"points": torch.zeros(30, 0)}, SpecError, "dim"),
        ({"points": [torch.zeros(30, 4), torch.zeros(30, 5)]}, SpecError, "chunks alike"),
    ],
)
def test_fit_refuses(options: dict[str, object], error: type[Exception], fragment: str) -> None:
    arguments = {"points": rows(30, 4), "n_centroids": 2, **options}
    with pytest.raises(error, match=fragment):
        kmeans.fit(**arguments)  # type: ignore[arg-type]


def refusal_worker(group: object) -> list[str]:
    rank, pool = group.rank, reduce.pool(group)  # type: ignore[attr-defined, arg-type]
    broken = rows(50, 4)
    broken[7, 1] = math.nan
    seeds = [(rows(50, 4), {"seeding": torch.full((4, 4), float(rank))})]
    tries = [
        (broken if rank == 1 else rows(50, 4), {}),
        (rows(50, 4 + (rank == 1)), {}),
        (rows(50, 4).half() if rank else rows(50, 4), {}),
        (rows(1, 4), {}),
        (rows(50, 4), {"weights": torch.ones(50)} if rank else {}),
        ([rows(50, 4), "no rows"] if rank else rows(50, 4), {}),
        *seeds,
    ]
    found = []
    for points, options in tries:
        try:
            kmeans.fit(points, 4, pool=pool, **options)  # type: ignore[arg-type]
            found.append("no error")
        except SpecError as error:
            found.append(str(error))
    return found


def test_all_workers_raise_the_same_error() -> None:
    results = launch.run(refusal_worker, 2, timeout_seconds=120)
    assert results[0] == results[1]
    for message, fragment in zip(
        results[0], ["row 57", "dim 5|, 5\\)", "float16", "got 2", "weights", "float|rows", "seeding"]
    ):
        assert re.search(fragment, message), (message, fragment)


def pooled_worker(group: object) -> tuple[list[float], int]:
    rank, pool = group.rank, reduce.pool(group)  # type: ignore[attr-defined, arg-type]
    mine = [[0.0, 0.0, 1.0, 1.0], [10.0, 10.0, 11.0, 11.0]][rank]
    found = kmeans.fit(torch.tensor(mine)[:, None], 2, pool=pool)
    few = kmeans.fit(rows(100 if rank == 0 else 500, 4, seed=rank), 256, pool=pool)
    return sorted(found.centroids[:, 0].tolist()), few.n_used


def test_rows_of_all_workers_count() -> None:
    assert launch.run(pooled_worker, 2, timeout_seconds=120) == [([0.5, 10.5], 256)] * 2


def test_the_seed_decides_and_the_global_generator_is_left_alone() -> None:
    points = rows()
    state = torch.get_rng_state()
    first, again, other = (kmeans.fit(points, 16, seed=seed, seeding="random") for seed in (0, 0, 1))
    assert bits(first) == bits(again)
    assert bits(first) != bits(other)
    assert torch.equal(state, torch.get_rng_state())


# --- mini-batches


def batch_worker(group: object) -> tuple[list[object], list[object]]:
    rank, pool = group.rank, reduce.pool(group)  # type: ignore[attr-defined, arg-type]
    out = []
    for per_rank in (([[0.0]], 9 * [[10.0]]), (4 * [[100.0]], 4 * [[8.0]])):
        running = kmeans.MiniBatch(torch.tensor([[5.0], [100.0]]), pool=pool)
        running.step(torch.tensor(per_rank[rank]))
        out.append(running.centroids[:, 0].tolist())
    running = kmeans.MiniBatch(rows()[:8], pool=pool)
    inertias = [
        running.step(rows(200, seed=s)[:130] if rank == 0 else rows(200, seed=s)[130:]) for s in range(3)
    ]
    # A worker without rows takes part.
    inertias.append(running.step(rows(200, seed=4)[: 200 if rank else 0]))
    return out, [running.centroids.numpy().tobytes(), running.counts.tolist(), inertias]


def test_mini_batches_equal_the_pooled_batch() -> None:
    single = kmeans.MiniBatch(rows()[:8])
    inertias = [single.step(rows(200, seed=s)) for s in (0, 1, 2, 4)]
    expected = [single.centroids.numpy().tobytes(), single.counts.tolist(), inertias]
    for values, state in launch.run(batch_worker, 2, timeout_seconds=120):
        assert values == [[9.0, 100.0], [8.0, 100.0]]
        assert state == expected


def test_mini_batch_goes_on_from_a_state() -> None:
    first = kmeans.MiniBatch(rows()[:8])
    first.step(rows(100))
    second = kmeans.MiniBatch(torch.zeros(8, 20))
    second.load_state_dict(first.state_dict())
    for running in (first, second):
        running.step(rows(50, seed=3))
    assert torch.equal(first.centroids, second.centroids)
    assert first.counts.tolist() == second.counts.tolist()
    assert int(first.counts.sum()) == 150
    with pytest.raises(ValueError, match="state"):
        kmeans.MiniBatch(torch.zeros(3, 2)).load_state_dict(first.state_dict())
    with pytest.raises(SpecError, match="dim"):
        first.step(torch.zeros(3, 4))


def test_one_batch_from_its_own_means_stays() -> None:
    running = kmeans.MiniBatch(torch.ones(1, 1))
    for _ in range(2):
        assert running.step(torch.ones(100, 1)) == 0.0
        assert running.centroids.item() == 1.0
