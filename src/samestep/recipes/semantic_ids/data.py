"""Read item embeddings from one or many files, check them, and give every worker its own rows.

::

    a.npy      rows 0..6   ─┐                ┌─ worker 0: rows 0..4
    b.parquet  rows 7..9   ─┼─ global rows ──┤
                            └────────────────┴─ worker 1: rows 5..9

Ids are read in full by every worker, since they must be unique over all files; the matrix is read (or mapped) only
for the worker's own rows. Nothing here talks to other workers: a caller that has some passes the finding on with
`pool.agree`, so that all raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from samestep.recipes.semantic_ids.formats import PathLike, find_files, open_source
from samestep.recipes.semantic_ids.source import Source, refuse

__all__ = ["Items", "part_bounds", "read_embeddings"]

_CHECK_ROWS = 8192


@dataclass(frozen=True)
class Items:
    """Embedded items, or one worker's part of them.

    Attributes:
        all_ids: (n_total,) int64 or str; ids of all items, in the order of the files.
        embeddings: (n_items, dim) float16, float32 or float64 array, or a memory map of one; the part's rows.
        first_row: global number of the part's first row.
        n_zero_rows: rows of this part whose embedding is all zero.
        sources: one JSON-ready description per file.
    """

    all_ids: NDArray[Any]
    embeddings: NDArray[Any]
    first_row: int
    n_zero_rows: int
    sources: tuple[dict[str, Any], ...]

    def __len__(self) -> int:
        return int(self.embeddings.shape[0])

    @property
    def ids(self) -> NDArray[Any]:
        """(n_items,) ids of the part's rows."""
        return self.all_ids[self.first_row : self.first_row + len(self)]

    @property
    def dim(self) -> int:
        """Columns of the matrix."""
        return int(self.embeddings.shape[1])

    @property
    def n_total(self) -> int:
        """Items over all parts."""
        return len(self.all_ids)

    def part(self, rank: int, world_size: int) -> Items:
        """Return the contiguous part of these items that a worker owns.

        Args:
            rank: the worker, 0 … world_size-1.
            world_size: number of workers.

        Returns:
            Items that share the memory of these.

        Example:
            >>> items = Items(np.arange(5), np.ones((5, 2)), first_row=0, n_zero_rows=0, sources=())
            >>> items.part(1, 2).ids
            array([2, 3, 4])
        """
        start, stop = part_bounds(len(self), rank, world_size)
        rows = self.embeddings[start:stop]
        zero = _n_zero_rows(rows) if self.n_zero_rows else 0
        return replace(self, embeddings=rows, first_row=self.first_row + start, n_zero_rows=zero)


def part_bounds(n_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first and the last-plus-one row of a worker's contiguous part.

    The parts differ by at most one row in size, and together cover every row once.

    Args:
        n_rows: rows over all workers.
        rank: the worker, 0 … world_size-1.
        world_size: number of workers.

    Returns:
        ``(start, stop)``.

    Raises:
        ValueError: rank outside 0 … world_size-1.

    Example:
        >>> [part_bounds(10, rank, 3) for rank in range(3)]
        [(0, 3), (3, 6), (6, 10)]
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank`: expected 0 to {world_size - 1}, got {rank}. Use this worker's rank.")
    return n_rows * rank // world_size, n_rows * (rank + 1) // world_size


def read_embeddings(
    paths: PathLike | Sequence[PathLike],
    *,
    id_column: str | None = None,
    embedding_column: str | None = None,
    part: tuple[int, int] = (0, 1),
    zero_rows: Literal["keep", "refuse"] = "keep",
) -> Items:
    """Return the embeddings of all given files, or one worker's part of them, checked.

    Ids stay what they are, strings or 64-bit integers. The id of an item in a file without ids is its row number,
    counted through all files.

    Args:
        paths: a file, a glob such as ``"parts/*.parquet"`` (its matches in sorted order), or several of these.
        id_column: column or key of the ids in files that have names; None to find it.
        embedding_column: column or key of the matrix in files that have names; None to find it.
        part: ``(rank, world_size)``; only the rows of that worker are read.
        zero_rows: whether rows of nothing but zeros are kept (and counted) or refused.

    Returns:
        The items of the part. Files of different float types are joined in the widest.

    Raises:
        SpecError: a file is missing, damaged, of an unknown kind, empty or without usable columns; files differ in
            dim or in the kind of ids; ids are not unique; a row is not finite. Names the file, and the row and id.
            Findings about single rows are those of the part, so they may differ between workers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/a.npy", np.ones((3, 2), dtype=np.float32))
        ...     np.save(f"{folder}/b.npy", np.ones((2, 2), dtype=np.float32))
        ...     items = read_embeddings(f"{folder}/*.npy", part=(1, 2))
        >>> items.ids, items.embeddings.shape, items.n_total
        (array([2, 3, 4]), (3, 2), 5)
    """
    sources = [open_source(path, id_column, embedding_column) for path in find_files(paths)]
    _check_alike(sources)
    ids = _join_ids(sources)
    _check_unique(ids, sources)
    start, stop = part_bounds(len(ids), *part)
    rows = _join_rows(sources, start, stop)
    n_zero_rows = _check_rows(rows, ids, start, sources, zero_rows)
    return Items(ids, rows, start, n_zero_rows, tuple(_describe(source) for source in sources))


def _check_alike(sources: list[Source]) -> None:
    first = sources[0]
    for source in sources[1:]:
        if source.dim != first.dim:
            hint = f"{first.dim} columns as in {first.path}, got {source.dim}. Take both from one embedding model"
            refuse(source.path, f"expected {hint}")
        if (source.read_ids is None) != (first.read_ids is None):
            kinds = [
                "row numbers" if each.read_ids is None else "ids in the file" for each in (first, source)
            ]
            hint = f"{kinds[0]} as in {first.path}, got {kinds[1]}. Write ids into all files or into none"
            refuse(source.path, f"expected {hint}")


def _join_ids(sources: list[Source]) -> NDArray[Any]:
    parts = [source.read_ids() for source in sources if source.read_ids is not None]
    if not parts:
        return np.arange(sum(source.n_rows for source in sources), dtype=np.int64)
    for source, ids in zip(sources, parts):
        if ids.dtype.kind != parts[0].dtype.kind:
            names = {"i": "integers", "U": "strings"}
            hint = f"{names[parts[0].dtype.kind]} as in {sources[0].path}, got {names[ids.dtype.kind]}"
            refuse(source.path, f"expected ids that are {hint}. Write the same kind into all files")
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _check_unique(ids: NDArray[Any], sources: list[Source]) -> None:
    order = np.argsort(ids, kind="stable")
    repeated = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(repeated):
        # A stable sort keeps equal ids in row order, so the smallest second row is the first repetition met.
        at = repeated[np.argmin(order[repeated + 1])]
        first, second = int(order[at]), int(order[at + 1])
        where = f"rows {_place(sources, first)} and {_place(sources, second)}"
        path = _locate(sources, second)[0].path
        found = f"got {_show(ids[first])} in {where} ({len(repeated)} repetitions in all)"
        refuse(path, f"expected every id once, {found}. Drop or rename the repeated items")


def _join_rows(sources: list[Source], start: int, stop: int) -> NDArray[Any]:
    parts, before = [], 0
    for source in sources:
        low, high = max(start - before, 0), min(stop - before, source.n_rows)
        if low < high:
            parts.append(source.read_rows(low, high))
        before += source.n_rows
    if not parts:
        return np.empty((0, sources[0].dim), dtype=np.result_type(*(source.dtype for source in sources)))
    # One file stays as it is, so that a memory map stays one.
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _check_rows(
    rows: NDArray[Any], ids: NDArray[Any], start: int, sources: list[Source], zero_rows: str
) -> int:
    n_zero_rows = 0
    for low in range(0, len(rows), _CHECK_ROWS):
        block = rows[low : low + _CHECK_ROWS]
        bad = np.flatnonzero(~np.isfinite(block).all(axis=1))
        zero = np.flatnonzero(~block.any(axis=1))
        n_zero_rows += len(zero)
        if len(bad) or (len(zero) and zero_rows == "refuse"):
            row = start + low + int(bad[0] if len(bad) else zero[0])
            wanted = "finite numbers in every row, got NaN or infinity"
            if not len(bad):
                wanted = "no row of zeros only (zero_rows is 'refuse'), got one"
            found = f"expected {wanted} in row {_place(sources, row)}, id {_show(ids[row])}"
            refuse(_locate(sources, row)[0].path, f"{found}. Mend or drop that item")
    return n_zero_rows


def _n_zero_rows(rows: NDArray[Any]) -> int:
    starts = range(0, len(rows), _CHECK_ROWS)
    return sum(int((~rows[low : low + _CHECK_ROWS].any(axis=1)).sum()) for low in starts)


def _locate(sources: list[Source], row: int) -> tuple[Source, int]:
    for source in sources:
        if row < source.n_rows:
            return source, row
        row -= source.n_rows
    raise IndexError(f"row {row} lies behind the last file")


def _place(sources: list[Source], row: int) -> str:
    source, inner = _locate(sources, row)
    return str(row) if len(sources) == 1 else f"{row} (row {inner} of {source.path.name})"


def _show(item_id: Any) -> str:
    return repr(item_id.item())


def _describe(source: Source) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "rows": source.n_rows,
        "dim": source.dim,
        "dtype": source.dtype,
        "ids": source.id_name or "row number",
        "embeddings": source.embedding_name or "whole file",
        "bytes": source.path.stat().st_size,
        "note": source.note,
    }
