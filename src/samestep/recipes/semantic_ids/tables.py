"""Open a Parquet file with an id column and a column of lists, one list per item."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.recipes.semantic_ids.source import (
    EMBEDDING_NAMES,
    ID_NAMES,
    Source,
    check_shape,
    checked_ids,
    pick_name,
    refuse,
    refuse_dtype,
)

if TYPE_CHECKING:
    import pyarrow

__all__ = ["open_table"]


def open_table(path: Path, id_column: str | None, embedding_column: str | None) -> Source:
    """Return the opened Parquet file; rows are read later, by the row groups that hold them.

    Args:
        path: the file. Lists may be of fixed or of variable size, as long as all are of one length.
        id_column: column of integers or strings; None to find it. A file with one column has row numbers as ids.
        embedding_column: column of lists of floats; None to find it.

    Returns:
        The file as a `Source`.

    Raises:
        SpecError: no such column, no lists of floats in it, no rows, or lists of length 0.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        schema, n_rows = file.schema_arrow, file.metadata.num_rows
    lists = [field.name for field in schema if _is_list(field.type)]
    scalars = [field.name for field in schema if _is_id(field.type)]
    try:
        name = pick_name("embedding_column", embedding_column, lists, EMBEDDING_NAMES, schema.names)
        id_name = None
        if id_column is not None or len(schema.names) > 1:
            id_name = pick_name("id_column", id_column, scalars, ID_NAMES, schema.names)
    except ValueError as error:
        refuse(path, str(error))
    column_type = schema.field(name).type
    if not _is_list(column_type):
        refuse(path, f"expected a list column, got {name!r} of type {column_type}. Set embedding_column")
    dtype = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(column_type.value_type))
    if dtype is None:
        refuse_dtype(path, str(column_type.value_type))
    if n_rows == 0:
        refuse(path, "expected at least one row, got 0. Give another file")
    dim = _list_lengths(_read_column(path, name, 0, 1), path, 0)
    check_shape(path, (n_rows, dim))
    return Source(
        path=path,
        n_rows=n_rows,
        dim=dim,
        dtype=dtype,
        id_name=id_name,
        embedding_name=name,
        read_ids=None if id_name is None else partial(_parquet_ids, path, id_name, n_rows),
        read_rows=partial(_parquet_rows, path, name, dim),
    )


def _is_list(column_type: pyarrow.DataType) -> bool:
    import pyarrow.types as kinds

    return bool(
        kinds.is_list(column_type)
        or kinds.is_large_list(column_type)
        or kinds.is_fixed_size_list(column_type)
    )


def _is_id(column_type: pyarrow.DataType) -> bool:
    import pyarrow.types as kinds

    if kinds.is_dictionary(column_type):
        column_type = column_type.value_type
    text = kinds.is_string(column_type) or kinds.is_large_string(column_type)
    return bool(text or kinds.is_integer(column_type))


def _read_column(path: Path, name: str, start: int, stop: int) -> pyarrow.Array:
    # Reads the row groups that overlap [start, stop) and cuts the rows out of them.
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        wanted = [i for i, end in enumerate(ends) if end > start and end - sizes[i] < stop]
        table = file.read_row_groups(wanted, columns=[name])
        first = int(ends[wanted[0]] - sizes[wanted[0]])
    column = table.column(name).slice(start - first, stop - start).combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _list_lengths(column: pyarrow.Array, path: Path, start: int, dim: int | None = None) -> int:
    # Returns the length that all lists have; `start` is the number of the first row in the file.
    import pyarrow.compute as pc

    lengths = pc.list_value_length(column).fill_null(-1).to_numpy(zero_copy_only=False)
    expected = int(lengths[0]) if dim is None else dim
    bad = np.flatnonzero((lengths != expected) | (lengths < 0))
    if len(bad):
        got = "none" if lengths[bad[0]] < 0 else f"{lengths[bad[0]]} numbers"
        wanted = "a list" if expected < 0 else f"{expected} numbers"
        refuse(
            path, f"expected {wanted} in every row, got {got} in row {start + bad[0]}. Mend or drop that row"
        )
    return expected


def _parquet_rows(path: Path, name: str, dim: int, start: int, stop: int) -> NDArray[Any]:
    column = _read_column(path, name, start, stop)
    _list_lengths(column, path, start, dim)
    values = column.flatten()
    if values.null_count:
        row = start + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) // dim
        refuse(path, f"expected {dim} numbers in every row, got a null in row {row}. Mend or drop that row")
    matrix: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(-1, dim)
    return matrix


def _parquet_ids(path: Path, name: str, n_rows: int) -> NDArray[Any]:
    import pyarrow as pa

    column = _read_column(path, name, 0, n_rows)
    if not _is_id(column.type):
        refuse(
            path,
            f"expected ids that are integers or strings, got {name!r} of type {column.type}. Set id_column",
        )
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        refuse(
            path, f"expected an id in every row, got a null in row {row} of {name!r}. Mend or drop that row"
        )
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    text = not pa.types.is_integer(column.type)
    ids = np.array(column.to_pylist(), dtype=np.str_) if text else column.to_numpy(zero_copy_only=False)
    return checked_ids(path, name, ids, n_rows)
