"""Reading embeddings: every format gives the same items, and every fault one error that says where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import SpecError
from samestep.recipes.semantic_ids import data

EXAMPLE = Path(__file__).parents[1] / "examples" / "data" / "esco_skills_minilm.npz"


def matrix(n_rows: int = 7, dim: int = 3, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n_rows, dim)).astype(dtype)


def write_table(path: Path, ids: list, rows: np.ndarray, **extra: pa.Array) -> Path:
    pq.write_table(
        pa.table({"item_id": ids, "embedding": pa.array(rows.tolist(), pa.list_(pa.float32())), **extra}),
        path,
    )
    return path


@given(n_rows=st.integers(0, 200), world_size=st.integers(1, 9))
def test_parts_cover_every_row_once_and_are_even(n_rows: int, world_size: int) -> None:
    bounds = [data.part_bounds(n_rows, rank, world_size) for rank in range(world_size)]
    covered = [row for start, stop in bounds for row in range(start, stop)]
    sizes = [stop - start for start, stop in bounds]
    assert covered == list(range(n_rows))
    assert max(sizes) - min(sizes) <= 1


def test_part_of_a_worker_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="`rank`: expected 0 to 1, got 2"):
        data.part_bounds(4, 2, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 11])
def test_parts_read_apart_are_the_whole(tmp_path: Path, world_size: int) -> None:
    rows = matrix(7)
    np.save(tmp_path / "a.npy", rows[:2])
    np.save(tmp_path / "b.npy", rows[2:6])
    np.save(tmp_path / "c.npy", rows[6:])
    parts = [
        data.read_embeddings(str(tmp_path / "*.npy"), part=(rank, world_size)) for rank in range(world_size)
    ]
    assert np.array_equal(np.concatenate([part.embeddings for part in parts]), rows)
    assert np.concatenate([part.ids for part in parts]).tolist() == list(range(7))
    assert all(part.n_total == 7 and part.dim == 3 for part in parts)


def test_part_of_items_equals_part_read_apart(tmp_path: Path) -> None:
    rows = matrix(7)
    rows[5] = 0
    path = write_table(tmp_path / "a.parquet", list("abcdefg"), rows)
    whole = data.read_embeddings(path)
    for rank in range(3):
        apart, cut = data.read_embeddings(path, part=(rank, 3)), whole.part(rank, 3)
        assert np.array_equal(apart.embeddings, cut.embeddings)
        assert apart.ids.tolist() == cut.ids.tolist()
        assert (apart.first_row, apart.n_zero_rows) == (cut.first_row, cut.n_zero_rows)


def test_one_large_npy_stays_mapped(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", matrix(2000, 4, "float16"))
    items = data.read_embeddings(tmp_path / "a.npy", part=(1, 2))
    assert isinstance(items.embeddings, np.memmap)
    assert items.embeddings.dtype == np.float16
    assert items.first_row == 1000


def test_files_of_different_precision_join_in_the_widest(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", matrix(2, dtype="float16"))
    np.save(tmp_path / "b.npy", matrix(2, dtype="float64"))
    items = data.read_embeddings([tmp_path / "a.npy", tmp_path / "b.npy"])
    assert items.embeddings.dtype == np.float64
    assert np.array_equal(items.embeddings[:2], matrix(2, dtype="float16").astype("float64"))


def test_order_of_files_is_that_given_and_sorted_within_a_glob(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        write_table(tmp_path / f"{name}.parquet", [name], matrix(1))
    assert data.read_embeddings(tmp_path / "*.parquet").ids.tolist() == ["a", "b", "c"]
    given_order = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
    assert data.read_embeddings(given_order).ids.tolist() == ["b", "a"]


def test_string_and_64_bit_ids_stay_what_they_are(tmp_path: Path) -> None:
    large = [2**62 + 1, -5, 2**53 + 1]
    numbers = data.read_embeddings(write_table(tmp_path / "n.parquet", large, matrix(3)))
    texts = data.read_embeddings(write_table(tmp_path / "t.parquet", ["007", "7", "é\u4e2d"], matrix(3)))
    assert numbers.ids.dtype == np.int64
    assert numbers.ids.tolist() == large
    assert texts.ids.tolist() == ["007", "7", "é\u4e2d"]


def test_the_example_set() -> None:
    items = data.read_embeddings(EXAMPLE)
    assert items.embeddings.shape == (13_939, 384)
    assert items.embeddings.dtype == np.float16
    assert items.ids[0] == "http://data.europa.eu/esco/skill/0005c151-5b5a-4a66-8aac-60e734beb1ab"
    assert items.n_zero_rows == 0
    lengths = np.linalg.norm(items.embeddings.astype(np.float64), axis=1)
    assert np.abs(lengths - 1).max() < 1e-3  # unit length before rounding to 11 bits


def fails(paths: object, *fragments: str, **options: object) -> None:
    with pytest.raises(SpecError) as caught:
        data.read_embeddings(paths, **options)  # type: ignore[arg-type]
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert caught.value.name is not None


def test_missing_file_empty_glob_and_folder(tmp_path: Path) -> None:
    fails(tmp_path / "none.npy", "none.npy", "expected a file, got none")
    fails(tmp_path / "*.npy", "*.npy", "got none")
    fails(tmp_path, "got a folder", "*.parquet")
    fails([], "expected at least one file, got none")


def test_a_file_named_twice(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", matrix())
    fails([tmp_path / "a.npy", tmp_path / "*.npy"], "expected every file once")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_row_that_is_not_finite_is_named_by_global_row_and_id(
    tmp_path: Path, value: float, dtype: str
) -> None:
    rows = matrix(10, dtype=dtype)
    rows[[5, 8], 1] = value
    np.savez(tmp_path / "a.npz", ids=np.array(list("abcd")), embeddings=rows[:4])
    np.savez(tmp_path / "b.npz", ids=np.array(list("efghij")), embeddings=rows[4:])
    fails(tmp_path / "*.npz", "b.npz", "row 5 (row 1 of b.npz)", "id 'f'", "NaN or infinity")
    # The worker that does not own the row has nothing to report.
    assert len(data.read_embeddings(tmp_path / "*.npz", part=(0, 2))) == 5
    fails(tmp_path / "*.npz", "row 8 (row 4 of b.npz)", "id 'i'", part=(2, 3))


def test_finite_rows_whose_sum_overflows_are_fine(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((3, 4), 65_504, dtype=np.float16))
    assert len(data.read_embeddings(tmp_path / "a.npy")) == 3


def test_bad_row_beyond_the_first_block_of_the_check(tmp_path: Path) -> None:
    rows = matrix(20_000, 1)
    rows[17_000] = np.nan
    np.save(tmp_path / "a.npy", rows)
    fails(tmp_path / "a.npy", "row 17000, id 17000")


def test_zero_rows_are_counted_or_refused(tmp_path: Path) -> None:
    rows = matrix()
    rows[[2, 4]] = 0
    np.save(tmp_path / "a.npy", rows)
    assert data.read_embeddings(tmp_path / "a.npy").n_zero_rows == 2
    assert data.read_embeddings(tmp_path / "a.npy", part=(0, 2)).n_zero_rows == 1
    fails(tmp_path / "a.npy", "zeros only", "row 2, id 2", zero_rows="refuse")


def test_zero_rows_are_counted_over_all_blocks_of_the_check(tmp_path: Path) -> None:
    rows = matrix(20_000, 1)
    rows[[3, 9_000, 19_999]] = 0
    np.save(tmp_path / "a.npy", rows)
    items = data.read_embeddings(tmp_path / "a.npy")
    assert items.n_zero_rows == 3
    assert [items.part(rank, 2).n_zero_rows for rank in range(2)] == [2, 1]


def test_repeated_id_names_the_id_and_both_rows(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", ["x", "y", "z"], matrix(3))
    write_table(tmp_path / "b.parquet", ["w", "z", "y"], matrix(3))
    fails(
        tmp_path / "*.parquet",
        "'z'",
        "rows 2 (row 2 of a.parquet) and 4 (row 1 of b.parquet)",
        "2 repetitions",
    )
    # Found by every worker, also by one that owns neither row.
    fails(tmp_path / "*.parquet", "'z'", part=(0, 6))


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", ["x"], matrix(1))
    write_table(tmp_path / "dim.parquet", ["y"], matrix(1, 4))
    write_table(tmp_path / "kind.parquet", [3], matrix(1))
    np.save(tmp_path / "bare.npy", matrix(2))
    fails([tmp_path / "a.parquet", tmp_path / "dim.parquet"], "dim.parquet", "expected 3 columns", "got 4")
    fails([tmp_path / "a.parquet", tmp_path / "kind.parquet"], "kind.parquet", "strings", "got integers")
    fails([tmp_path / "a.parquet", tmp_path / "bare.npy"], "bare.npy", "row numbers")


def test_description_of_the_sources_is_json_ready(tmp_path: Path) -> None:
    import json

    path = write_table(tmp_path / "a.parquet", ["x"], matrix(1))
    (source,) = data.read_embeddings(path).sources
    assert json.loads(json.dumps(source)) == source
    assert (source["rows"], source["dim"], source["ids"], source["embeddings"]) == (
        1,
        3,
        "item_id",
        "embedding",
    )
    assert source["bytes"] == path.stat().st_size
