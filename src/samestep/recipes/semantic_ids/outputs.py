"""Write what the recipe gives, and read back what a later run needs.

=======================  ===================================================================================
``write_parquet``        ``item_id``, ``codes`` (list of int64), ``unique_digit``; on request ``offset_codes``
``write_npy``            one row of codes per item
``write_lcrec_json``     ``{"0": ["<a_12>", "<b_7>"], ...}`` as LC-Rec, LETTER and MiniOneRec read it
``write_codebooks``      ``level_0`` … and ``offset`` as safetensors
``write_json``           any table, such as the quality of the ids
=======================  ===================================================================================

Every file is written beside its place, flushed to the disk and then renamed, so a file under its final name is
complete. Equal content gives equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from samestep.errors import SpecError
from samestep.recipes.atomic import replacing
from samestep.recipes.semantic_ids import ids
from samestep.recipes.semantic_ids.grouping import check_codes, check_ids

__all__ = [
    "CodebookFile",
    "read_codebooks",
    "read_parquet",
    "write_codebooks",
    "write_json",
    "write_lcrec_json",
    "write_npy",
    "write_parquet",
]

FORMAT_VERSION = 1


class CodebookFile(NamedTuple):
    """What `read_codebooks` finds.

    Attributes:
        levels: one (n_centroids, dim) tensor per level.
        offset: (dim,) tensor that was subtracted from the data before level 0, or None.
        metadata: what the writer said about them.
    """

    levels: list[Tensor]
    offset: Tensor | None
    metadata: dict[str, Any]


def write_parquet(
    path: str | Path,
    item_ids: ArrayLike,
    codes: ArrayLike,
    unique_digit: ArrayLike,
    *,
    n_centroids_per_level: Sequence[int] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write one row per item: ``item_id``, ``codes``, ``unique_digit``.

    Args:
        path: file to write; replaced if it is there.
        item_ids: (n_items,) distinct integers or strings.
        codes: (n_items, n_levels) integers.
        unique_digit: (n_items,) integers, see `ids.resolve`.
        n_centroids_per_level: when given, a column ``offset_codes`` holds the codes shifted for one vocabulary.
        metadata: JSON-ready facts, stored in the file's own metadata under ``samestep``.

    Raises:
        ValueError: columns of other lengths, or ids that repeat.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    keys, joined = _keyed(item_ids, codes, unique_digit)
    table, digits = joined[:, :-1], joined[:, -1]
    columns = {"item_id": pa.array(keys), "codes": _lists(table), "unique_digit": pa.array(digits)}
    if n_centroids_per_level is not None:
        columns["offset_codes"] = _lists(ids.offsets(table, n_centroids_per_level))
    content = pa.table(columns).replace_schema_metadata({"samestep": _dumps(metadata)})
    with replacing(path) as file:
        pq.write_table(content, file)


def read_parquet(path: str | Path) -> ids.Published:
    """Return the semantic ids in a file that `write_parquet` wrote.

    Args:
        path: the file.

    Returns:
        Item ids, codes and digits, in the order of the file.

    Raises:
        SpecError: the file is missing, damaged or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            content = file.read(columns=["item_id", "codes", "unique_digit"])
        text = not pa.types.is_integer(content.schema.field("item_id").type)
        item_ids = content.column("item_id").to_pylist()
        rows = content.column("codes").to_pylist()
        digits = content.column("unique_digit").to_numpy()
        keys = np.array(item_ids, dtype=np.str_ if text else np.int64)
        keys, joined = _keyed(keys, rows, digits)
    except (OSError, ValueError, KeyError) as error:
        _refuse(path, "a Parquet file with item_id, codes and unique_digit", error)
    return ids.Published(keys, joined[:, :-1], joined[:, -1])


def write_npy(path: str | Path, codes: ArrayLike, unique_digit: ArrayLike | None = None) -> None:
    """Write the codes as one int64 matrix.

    Args:
        path: file to write; replaced if it is there.
        codes: (n_items, n_levels) integers.
        unique_digit: (n_items,) integers; when given, they become the last column.

    Raises:
        ValueError: codes are not a matrix of integers, or another number of digits.
    """
    with replacing(path) as file:
        np.save(file, _joined(codes, unique_digit))


def write_lcrec_json(
    path: str | Path, item_ids: ArrayLike, codes: ArrayLike, unique_digit: ArrayLike | None = None
) -> None:
    """Write one list of words per item, as the trainers of the LC-Rec family read it.

    Args:
        path: file to write; replaced if it is there.
        item_ids: (n_items,) distinct integers or strings; they become the keys, as text.
        codes: (n_items, n_levels) integers.
        unique_digit: (n_items,) integers; when given, every item gets it as its last word.

    Raises:
        ValueError: as `ids.tokens`, or other numbers of ids or digits than of codes.
    """
    joined = _joined(codes, unique_digit)
    keys = check_ids(item_ids)
    if len(keys) != len(joined):
        raise ValueError(
            f"`item_ids`: expected {len(joined)}, got {len(keys)}. Give one id per row of codes."
        )
    write_json(path, dict(zip((str(key) for key in keys.tolist()), ids.tokens(joined))), indent=None)


def write_codebooks(
    path: str | Path,
    levels: Sequence[Tensor],
    *,
    offset: Tensor | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write codebooks as safetensors: ``level_0``, ``level_1``, … and ``offset``.

    Args:
        path: file to write; replaced if it is there.
        levels: one (n_centroids, dim) float tensor per level.
        offset: (dim,) float tensor to subtract from data before level 0; None if there is none.
        metadata: JSON-ready facts such as the kind of recipe, the seed and the data.

    Raises:
        ValueError: no level, or levels or offset of different dim.
    """
    import safetensors.torch

    if not levels or any(level.ndim != 2 or level.shape[1] != levels[0].shape[1] for level in levels):
        shapes = [tuple(level.shape) for level in levels]
        raise ValueError(f"`levels`: expected matrices of one dim, got shapes {shapes}. Give one per level.")
    if offset is not None and offset.shape != levels[0].shape[1:]:
        dim = levels[0].shape[1]
        raise ValueError(
            f"`offset`: expected shape ({dim},), got {tuple(offset.shape)}. Give one number per column."
        )
    tensors = {f"level_{k}": level for k, level in enumerate(levels)}
    if offset is not None:
        tensors["offset"] = offset
    # Copies on the CPU, since safetensors refuses tensors that share memory or have gaps.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    # One entry only: safetensors writes several in an order that changes from run to run.
    facts = {"n_levels": len(levels), **(metadata or {})}
    content = safetensors.torch.save(tensors, metadata={"samestep": _dumps(facts)})
    with replacing(path) as file:
        file.write(content)


def read_codebooks(path: str | Path) -> CodebookFile:
    """Return the codebooks in a file that `write_codebooks` wrote.

    Args:
        path: the file.

    Returns:
        Levels, offset and metadata; the tensors are on the CPU.

    Raises:
        SpecError: the file is missing, damaged or of another kind.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["samestep"])
            levels = [file.get_tensor(f"level_{k}") for k in range(facts["n_levels"])]
            names = set(file.keys())
            offset = file.get_tensor("offset") if "offset" in names else None
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        _refuse(path, "codebooks that samestep wrote", error)
    return CodebookFile(levels, offset, facts)


def write_json(path: str | Path, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON file.

    Args:
        path: file to write; replaced if it is there.
        content: JSON-ready; keys keep their order.
        indent: spaces per depth; None for one line.

    Raises:
        ValueError: NaN or infinity in it, which JSON does not have.
    """
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def _keyed(
    item_ids: ArrayLike, codes: ArrayLike, unique_digit: ArrayLike | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    keys, joined = check_ids(item_ids), _joined(codes, unique_digit)
    if len(keys) != len(joined):
        raise ValueError(
            f"`item_ids`: expected {len(joined)}, got {len(keys)}. Give one id per row of codes."
        )
    return keys, joined


def _joined(codes: ArrayLike, unique_digit: ArrayLike | None) -> NDArray[np.int64]:
    table = check_codes(codes)
    if unique_digit is None:
        return table
    digits = np.asarray(unique_digit)
    if digits.shape != (len(table),):
        raise ValueError(
            f"`unique_digit`: expected shape ({len(table)},), got {digits.shape}. Give one per item."
        )
    return check_codes(np.column_stack([table, digits]))


def _lists(table: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    starts = pa.array(np.arange(len(table) + 1) * table.shape[1]).cast(pa.int32())
    return pa.ListArray.from_arrays(starts, pa.array(table.reshape(-1)))


def _dumps(metadata: Mapping[str, Any] | None) -> str:
    facts = {"format_version": FORMAT_VERSION, **(metadata or {})}
    return json.dumps(facts, sort_keys=True, ensure_ascii=False, allow_nan=False)


def _refuse(path: str | Path, expected: str, error: Exception) -> NoReturn:
    reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
    raise SpecError(
        f"`{path}`: expected {expected}, got: {reason}. Check the path.", name=str(path)
    ) from error
