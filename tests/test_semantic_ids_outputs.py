"""What is written reads back equal, in equal bytes, and never appears half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
import safetensors.torch
import torch

from samestep.errors import SpecError
from samestep.recipes.semantic_ids import outputs

CODES = np.array([[1, 2, 3], [1, 2, 3], [63, 0, 5]])
DIGITS = np.array([2, 1, 0])
TEXTS = np.array(["b", "a\u00e9", "c"])
LEVELS = [torch.arange(8.0).reshape(4, 2), torch.tensor([[0.1, -0.0]])]


@pytest.mark.parametrize("item_ids", [TEXTS, np.array([2**62 + 1, -7, 0])])
def test_parquet_round_trip(tmp_path: Path, item_ids: np.ndarray) -> None:
    outputs.write_parquet(tmp_path / "a.parquet", item_ids, CODES, DIGITS, metadata={"rule": "digit"})
    content = pq.read_table(tmp_path / "a.parquet")
    assert content.column_names == ["item_id", "codes", "unique_digit"]
    assert content.schema.field("codes").type.value_type == pa.int64()
    assert pa.types.is_list(content.schema.field("codes").type)
    assert content.to_pylist()[0] == {"item_id": item_ids[0], "codes": [1, 2, 3], "unique_digit": 2}
    assert json.loads(content.schema.metadata[b"samestep"]) == {"format_version": 1, "rule": "digit"}
    back = outputs.read_parquet(tmp_path / "a.parquet")
    assert back.item_ids.dtype.kind == item_ids.dtype.kind
    assert back.item_ids.tolist() == item_ids.tolist()
    assert np.array_equal(back.codes, CODES)
    assert back.codes.dtype == back.unique_digit.dtype == np.int64
    assert np.array_equal(back.unique_digit, DIGITS)


def test_vocabulary_offsets_on_request(tmp_path: Path) -> None:
    outputs.write_parquet(tmp_path / "a.parquet", TEXTS, CODES, DIGITS, n_centroids_per_level=[64, 64, 64])
    assert pq.read_table(tmp_path / "a.parquet").column("offset_codes").to_pylist()[0] == [1, 66, 131]


def test_npy_with_and_without_digit(tmp_path: Path) -> None:
    outputs.write_npy(tmp_path / "a.npy", CODES.astype(np.int32))
    outputs.write_npy(tmp_path / "b.npy", CODES, DIGITS)
    plain, full = np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy")
    assert plain.dtype == full.dtype == np.int64
    assert np.array_equal(plain, CODES)
    assert full.tolist() == [[1, 2, 3, 2], [1, 2, 3, 1], [63, 0, 5, 0]]


def test_json_of_the_lc_rec_family(tmp_path: Path) -> None:
    outputs.write_lcrec_json(tmp_path / "a.json", np.arange(3), CODES)
    outputs.write_lcrec_json(tmp_path / "b.json", TEXTS, CODES, DIGITS)
    plain = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    full = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert plain["2"] == ["<a_63>", "<b_0>", "<c_5>"]
    assert list(plain) == ["0", "1", "2"]
    assert full["a\u00e9"] == ["<a_1>", "<b_2>", "<c_3>", "<d_1>"]


def test_codebooks_round_trip_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "codebooks.safetensors"
    outputs.write_codebooks(
        path, LEVELS, offset=torch.tensor([1.5, 1 / 3]), metadata={"kind": "rkmeans", "seed": 3}
    )
    back = outputs.read_codebooks(path)
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(back.levels, LEVELS, strict=True)
    )
    assert back.offset is not None
    assert torch.equal(back.offset, torch.tensor([1.5, 1 / 3]))
    assert back.metadata == {"format_version": 1, "n_levels": 2, "kind": "rkmeans", "seed": 3}
    with safetensors.safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == ["level_0", "level_1", "offset"]


def test_codebooks_that_share_memory_have_gaps_or_gradients(tmp_path: Path) -> None:
    table = torch.arange(12.0).reshape(4, 3).requires_grad_()
    outputs.write_codebooks(tmp_path / "a.safetensors", [table[:, :2], table[:, :2], table.t()[:2].t()])
    back = outputs.read_codebooks(tmp_path / "a.safetensors")
    assert all(torch.equal(level, table[:, :2].detach()) for level in back.levels)
    assert back.offset is None


def test_more_than_ten_levels_stay_in_order(tmp_path: Path) -> None:
    levels = [torch.full((1, 1), float(k)) for k in range(12)]
    outputs.write_codebooks(tmp_path / "a.safetensors", levels)
    assert [level.item() for level in outputs.read_codebooks(tmp_path / "a.safetensors").levels] == list(
        range(12)
    )


WRITERS: list[Callable[[Path], None]] = [
    lambda path: outputs.write_parquet(path, TEXTS, CODES, DIGITS, metadata={"b": 1, "a": 2}),
    lambda path: outputs.write_npy(path, CODES),
    lambda path: outputs.write_lcrec_json(path, TEXTS, CODES),
    lambda path: outputs.write_codebooks(path, LEVELS, metadata={"b": 1, "a": 2}),
    lambda path: outputs.write_json(path, {"b": 1, "a": [0.1]}),
]


@pytest.mark.parametrize("write", WRITERS)
def test_equal_content_gives_equal_bytes_and_nothing_beside(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "one")
    first = (tmp_path / "one").read_bytes()
    write(tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_order_of_metadata_plays_no_part(tmp_path: Path) -> None:
    for name, facts in (("a", {"seed": 1, "kind": "rvq"}), ("b", {"kind": "rvq", "seed": 1})):
        outputs.write_codebooks(tmp_path / name, LEVELS, metadata=facts)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: outputs.write_parquet(path, TEXTS[:2], CODES, DIGITS), "`item_ids`: expected 3, got 2"),
        (
            lambda path: outputs.write_parquet(path, TEXTS, CODES, DIGITS[:2]),
            "`unique_digit`: expected shape",
        ),
        (
            lambda path: outputs.write_lcrec_json(path, ["a", "a", "b"], CODES),
            "`item_ids`: expected distinct",
        ),
        (lambda path: outputs.write_npy(path, [1, 2]), "`codes`"),
        (lambda path: outputs.write_codebooks(path, []), "`levels`"),
        (lambda path: outputs.write_codebooks(path, [torch.zeros(2, 3), torch.zeros(2, 4)]), "`levels`"),
        (
            lambda path: outputs.write_codebooks(path, LEVELS, offset=torch.zeros(3)),
            r"`offset`: expected shape \(2,\)",
        ),
        (lambda path: outputs.write_json(path, {"x": float("nan")}), "JSON"),
    ],
)
def test_refusal_leaves_the_old_file_alone(tmp_path: Path, write: Any, message: str) -> None:
    (tmp_path / "one").write_bytes(b"old")
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("content", [None, b"", b"no such file" * 50])
@pytest.mark.parametrize("read", [outputs.read_parquet, outputs.read_codebooks])
def test_reading_what_is_not_there_or_is_damaged(tmp_path: Path, read: Any, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "one").write_bytes(content)
    with pytest.raises(SpecError, match="one`: expected"):
        read(tmp_path / "one")


def test_reading_files_of_another_kind(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item_id": [1]}), tmp_path / "a.parquet")
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(SpecError, match="item_id, codes and unique_digit"):
        outputs.read_parquet(tmp_path / "a.parquet")
    with pytest.raises(SpecError, match="codebooks that samestep wrote"):
        outputs.read_codebooks(tmp_path / "b.safetensors")
