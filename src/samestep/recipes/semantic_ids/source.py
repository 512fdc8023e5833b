"""What every embedding file looks like once it is open, and the checks that all formats share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from samestep.errors import SpecError

__all__ = [
    "EMBEDDING_NAMES",
    "ID_NAMES",
    "Source",
    "check_shape",
    "checked_ids",
    "pick_name",
    "refuse",
    "refuse_dtype",
]

ID_NAMES = ("ids", "id", "item_id", "item_ids")
EMBEDDING_NAMES = ("embeddings", "embedding", "embeds")


@dataclass(frozen=True)
class Source:
    """One opened embedding file.

    Attributes:
        path: the file.
        n_rows: rows of its matrix.
        dim: columns of its matrix.
        dtype: numpy's name of the dtype that `read_rows` returns.
        id_name: column or key of the ids; None when row numbers are the ids.
        embedding_name: column or key of the matrix; None when the file is the matrix.
        read_ids: returns (n_rows,) int64 or str; None when row numbers are the ids.
        read_rows: ``read_rows(start, stop)`` returns (stop - start, dim) floats, lazily where the format allows.
        note: what was converted on the way, or "".
    """

    path: Path
    n_rows: int
    dim: int
    dtype: str
    id_name: str | None
    embedding_name: str | None
    read_ids: Callable[[], NDArray[Any]] | None
    read_rows: Callable[[int, int], NDArray[Any]]
    note: str = ""


def refuse(path: str | Path, finding: str) -> NoReturn:
    """Raise the error for a file that cannot be used.

    Args:
        path: the file, named first in the message.
        finding: what was expected, what was found and what to do, without the last full stop.

    Raises:
        SpecError: always; its `name` is the path.
    """
    raise SpecError(f"`{path}`: {finding}.", name=str(path))


def refuse_dtype(path: Path, dtype: str) -> NoReturn:
    """Raise the error for a matrix that does not hold floats.

    Args:
        path: the file.
        dtype: what it holds instead.

    Raises:
        SpecError: always.
    """
    refuse(path, f"expected embeddings of float16, float32 or float64, got {dtype}. Convert them to float32")


def check_shape(path: Path, shape: Sequence[int]) -> None:
    """Return if the shape is that of a matrix with rows and columns.

    Args:
        path: the file, for the message.
        shape: shape of what should be (n_items, dim).

    Raises:
        SpecError: not two-dimensional, or empty.
    """
    if len(shape) != 2:
        refuse(path, f"expected a matrix of shape (n_items, dim), got shape {tuple(shape)}. Reshape it")
    if 0 in shape:
        refuse(path, f"expected at least one row and one column, got shape {tuple(shape)}. Give another file")


def checked_ids(path: Path, name: str | None, ids: NDArray[Any], n_rows: int) -> NDArray[Any]:
    """Return the ids as int64 or str, one per row.

    Args:
        path: the file, for the message.
        name: column or key of the ids, for the message.
        ids: array as found in the file.
        n_rows: rows of the matrix beside it.

    Returns:
        (n_rows,) int64 or str array.

    Raises:
        SpecError: another dtype or number of ids, or an integer beyond 64 bits.
    """
    if ids.dtype.kind not in "iuU":
        hint = "Write them as text, with ids.astype(str)"
        refuse(path, f"expected ids {name!r} that are integers or strings, got {ids.dtype}. {hint}")
    if ids.shape != (n_rows,):
        refuse(
            path,
            f"expected {n_rows} ids in {name!r}, one per row, got shape {ids.shape}. Write one id per row",
        )
    if ids.dtype.kind == "u" and n_rows and int(ids.max()) > np.iinfo(np.int64).max:
        refuse(path, f"expected ids {name!r} below 2**63, got {int(ids.max())}. Write them as strings")
    return ids if ids.dtype.kind == "U" else ids.astype(np.int64, copy=False)


def pick_name(
    what: str, wanted: str | None, candidates: Sequence[str], known: Sequence[str], names: Sequence[str]
) -> str:
    """Return which column or key to take: the wanted one, else a usual name, else the only candidate.

    Args:
        what: option that the user would set, for the message.
        wanted: what the user asked for, or None.
        candidates: names whose content could be it.
        known: usual names; the first one that is a candidate wins.
        names: all names there are, for the message.

    Returns:
        One of `names`.

    Raises:
        ValueError: no such name (the nearest one is told), or none or several candidates. The message has no last
            full stop, since the caller puts the file in front of it.

    Example:
        >>> pick_name("id_column", None, ["pid", "ids"], ["ids", "id"], ["pid", "ids", "embedding"])
        'ids'
        >>> pick_name("id_column", None, ["pid"], ["ids", "id"], ["pid", "embedding"])
        'pid'
    """
    listed = ", ".join(repr(name) for name in names) or "none"
    if wanted is not None:
        if wanted in names:
            return wanted
        near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
        hint = f" The nearest is {near[0]!r}." if near else ""
        raise ValueError(
            f"`{what}`: expected one of {listed}, got {wanted!r}.{hint} Set {what} to one of them"
        )
    usual = [name for name in known if name in candidates]
    if usual:
        return usual[0]
    if len(candidates) == 1:
        return candidates[0]
    found = ", ".join(repr(name) for name in candidates) or "none"
    raise ValueError(f"`{what}`: expected exactly one candidate among {listed}, got {found}. Set {what}")
