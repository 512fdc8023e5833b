"""Each file format, read back against the array it was written from, and its faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from samestep.errors import SpecError
from samestep.recipes.semantic_ids import formats

ROWS = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
IDS = np.array([11, 5, 9, 2**60, 0, 3])


def put(
    folder: Path, suffix: str, rows: np.ndarray = ROWS, names: tuple[str, str] = ("ids", "embeddings")
) -> Path:
    path = folder / f"items{suffix}"
    named = dict(zip(names, (IDS, rows)))
    if suffix == ".npz":
        np.savez(path, **named)
    elif suffix == ".safetensors":
        safetensors.torch.save_file({name: torch.from_numpy(value) for name, value in named.items()}, path)
    elif suffix in (".pt", ".pth"):
        torch.save({name: torch.from_numpy(value) for name, value in named.items()}, path)
    else:
        lists = pa.array(list(rows), pa.list_(pa.from_numpy_dtype(rows.dtype)))
        pq.write_table(pa.table(dict(zip(names, (pa.array(IDS), lists)))), path, row_group_size=4)
    return path


NAMED = [".npz", ".parquet", ".safetensors", ".pt", ".pth"]


@pytest.mark.parametrize("suffix", NAMED)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_named_formats_give_ids_and_rows_bit_for_bit(tmp_path: Path, suffix: str, dtype: str) -> None:
    rows = ROWS.astype(dtype)
    source = formats.open_source(put(tmp_path, suffix, rows))
    assert (source.n_rows, source.dim, source.dtype) == (6, 3, dtype)
    assert source.read_ids is not None
    assert source.read_ids().tolist() == IDS.tolist()
    for start, stop in ((0, 6), (1, 3), (3, 5), (4, 6), (5, 6)):
        part = source.read_rows(start, stop)
        assert part.dtype == dtype
        assert np.array_equal(part, rows[start:stop])


@pytest.mark.parametrize("suffix", NAMED)
def test_names_are_found_or_given(tmp_path: Path, suffix: str) -> None:
    path = put(tmp_path, suffix, names=("pid", "vector"))
    found = formats.open_source(path)
    assert (found.id_name, found.embedding_name) == ("pid", "vector")
    assert formats.open_source(path, "pid", "vector").id_name == "pid"
    with pytest.raises(SpecError, match=r"`embedding_column`.*got 'vectr'\. The nearest is 'vector'"):
        formats.open_source(path, None, "vectr")


def test_embeds_of_an_npz(tmp_path: Path) -> None:
    assert formats.open_source(put(tmp_path, ".npz", names=("ids", "embeds"))).embedding_name == "embeds"


def test_bare_matrices_have_row_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    np.savez(tmp_path / "b.npz", only=ROWS)
    torch.save(torch.from_numpy(ROWS), tmp_path / "c.pt")
    safetensors.torch.save_file({"only": torch.from_numpy(ROWS)}, tmp_path / "d.safetensors")
    pq.write_table(pa.table({"only": pa.array(list(ROWS), pa.list_(pa.float32()))}), tmp_path / "e.parquet")
    for path in sorted(tmp_path.iterdir()):
        source = formats.open_source(path)
        assert source.read_ids is None, path
        assert np.array_equal(source.read_rows(0, 6), ROWS), path


def test_bfloat16_becomes_float32_with_a_note(tmp_path: Path) -> None:
    rows = torch.from_numpy(ROWS).bfloat16()
    torch.save(rows, tmp_path / "a.pt")
    safetensors.torch.save_file({"x": rows}, tmp_path / "b.safetensors")
    for path in sorted(tmp_path.iterdir()):
        source = formats.open_source(path)
        assert (source.dtype, source.note) == ("float32", "bfloat16 read as float32")
        assert np.array_equal(source.read_rows(0, 6), rows.float().numpy())


def test_torch_file_with_a_list_of_string_ids(tmp_path: Path) -> None:
    torch.save(
        {"item_id": list("abcdef"), "embedding": torch.from_numpy(ROWS), "note": "text"}, tmp_path / "a.pt"
    )
    source = formats.open_source(tmp_path / "a.pt")
    assert source.read_ids is not None
    assert source.read_ids().tolist() == list("abcdef")


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32(), 3), pa.list_(pa.float32()), pa.large_list(pa.float32())]
)
def test_kinds_of_parquet_lists_and_ids(tmp_path: Path, kind: pa.DataType) -> None:
    ids = [pa.array(list("abcdef"), pa.large_string()), pa.array(list("abcdef")).dictionary_encode()]
    for number, column in enumerate(ids):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"price": [1.5] * 6, "pid": column, "v": pa.array(list(ROWS), kind)}), path)
        source = formats.open_source(path)
        assert source.read_ids is not None
        assert source.read_ids().tolist() == list("abcdef")
        assert np.array_equal(source.read_rows(2, 5), ROWS[2:5])


def read_all(path: Path, **options: Any) -> None:
    source = formats.open_source(path, **options)
    if source.read_ids is not None:
        source.read_ids()
    source.read_rows(0, source.n_rows)


def refused(path: Path, *fragments: str, **options: Any) -> None:
    with pytest.raises(SpecError) as caught:
        read_all(path, **options)
    for fragment in (str(path), *fragments):
        assert fragment in str(caught.value)


def test_wrong_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n")
    refused(tmp_path / "a.csv", ".npy, .npz, .parquet, .safetensors", "got '.csv'")


@pytest.mark.parametrize("suffix", [".npy", *NAMED])
@pytest.mark.parametrize("content", ["text", "empty", "cut"])
def test_damaged_files(tmp_path: Path, suffix: str, content: str) -> None:
    path = tmp_path / f"items{suffix}"
    if content == "cut":
        rows = np.random.default_rng(2).normal(size=(6, 900))
        np.save(path, rows) if suffix == ".npy" else put(tmp_path, suffix, rows)
        path.write_bytes(path.read_bytes()[:-3000])
    else:
        path.write_bytes(b"this is no such file" * 300 if content == "text" else b"")
    refused(path, "expected")


@pytest.mark.parametrize("shape", [(6,), (2, 3, 1), (0, 3), (6, 0)])
def test_shapes_that_are_no_matrix_with_rows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape, dtype=np.float32))
    torch.save(torch.zeros(shape), tmp_path / "b.pt")
    for path in sorted(tmp_path.iterdir()):
        refused(path, f"got shape {shape}")


@pytest.mark.parametrize("rows", [ROWS.astype(np.int64), ROWS > 0, ROWS.astype(complex), ROWS.astype(str)])
def test_matrices_that_are_not_of_floats(tmp_path: Path, rows: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", rows)
    refused(tmp_path / "a.npy", "float16, float32 or float64", str(rows.dtype))


def test_integer_matrices_of_torch_and_parquet(tmp_path: Path) -> None:
    torch.save(torch.zeros(2, 2, dtype=torch.int32), tmp_path / "a.pt")
    pq.write_table(pa.table({"id": [1], "v": [[1, 2]]}), tmp_path / "b.parquet")
    refused(tmp_path / "a.pt", "got int32")
    refused(tmp_path / "b.parquet", "got int64")


def test_python_objects_are_not_loaded(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"embeddings": Payload()}, tmp_path / "a.pt")
    np.savez(tmp_path / "b.npz", ids=np.array([Payload()], dtype=object), embeddings=ROWS)
    np.save(tmp_path / "c.npy", np.array([[Payload()]], dtype=object))
    refused(tmp_path / "a.pt", "Save plain tensors")
    refused(tmp_path / "b.npz", "ids.astype(str)")
    refused(tmp_path / "c.npy", "Python objects")
    assert not (tmp_path / "ran").exists()


def test_ids_that_cannot_be_ids(tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", ids=IDS[:4], embeddings=ROWS)
    np.savez(tmp_path / "float.npz", ids=IDS.astype(float), embeddings=ROWS)
    np.savez(tmp_path / "wide.npz", ids=IDS.astype(np.uint64) + np.uint64(2**63), embeddings=ROWS)
    refused(tmp_path / "few.npz", "expected 6 ids", "got shape (4,)")
    refused(tmp_path / "float.npz", "integers or strings", "got float64")
    refused(tmp_path / "wide.npz", "below 2**63")


def test_ambiguous_columns_are_listed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", left=ROWS, right=ROWS, ids=IDS)
    lists = pa.array(list(ROWS), pa.list_(pa.float32()))
    pq.write_table(pa.table({"sku": IDS, "name": list("abcdef"), "v": lists}), tmp_path / "b.parquet")
    refused(tmp_path / "a.npz", "`embedding_column`", "'left', 'right'")
    refused(tmp_path / "b.parquet", "`id_column`", "'sku', 'name'")
    refused(tmp_path / "b.parquet", "`id_column`", "The nearest is 'name'", id_column="names")
    refused(tmp_path / "b.parquet", "expected a list column", id_column="name", embedding_column="sku")
    refused(tmp_path / "b.parquet", "integers or strings", id_column="v")


def test_names_for_a_file_without_names(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ROWS)
    refused(tmp_path / "a.npy", "`id_column`", "got 'ids'", id_column="ids")


@pytest.mark.parametrize("fixed", [True, False])
def test_holes_in_parquet_are_named_by_row(tmp_path: Path, fixed: bool) -> None:
    kind = pa.list_(pa.float32(), 2) if fixed else pa.list_(pa.float32())
    whole = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]

    def write(name: str, ids: Any, rows: list[Any]) -> Path:
        pq.write_table(pa.table({"id": pa.array(ids), "v": pa.array(rows, kind)}), tmp_path / name)
        return tmp_path / name

    refused(write("null.parquet", [1, 2, 3], [whole[0], whole[1], None]), "got none in row 2")
    refused(write("inner.parquet", [1, 2, 3], [whole[0], [1.0, None], whole[2]]), "null in row 1")
    refused(write("id.parquet", ["a", None, "c"], whole), "null in row 1 of 'id'")
    refused(write("none.parquet", np.empty(0, dtype=np.int64), []), "at least one row, got 0")
    if not fixed:
        refused(
            write("length.parquet", [1, 2, 3], [*whole[:2], [1.0]]),
            "expected 2 numbers",
            "got 1 numbers in row 2",
        )
        refused(write("first.parquet", [1, 2, 3], [None, *whole[:2]]), "row 0")
