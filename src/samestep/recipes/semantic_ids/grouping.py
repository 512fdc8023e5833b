"""Group the rows of a code table: which rows share their codes, how many, in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Buckets", "buckets", "check_codes", "check_ids", "positions"]


class Buckets(NamedTuple):
    """Rows grouped by their codes.

    Attributes:
        codes: (n_buckets, n_levels) int64; the distinct codes in lexicographic order.
        sizes: (n_buckets,) int64; rows in each.
        members: (n_rows,) int64; bucket of each row.
    """

    codes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    members: NDArray[np.int64]


def buckets(codes: ArrayLike) -> Buckets:
    """Return the rows grouped by equal codes.

    Args:
        codes: (n_rows, n_levels) integers.

    Raises:
        ValueError: codes are not a matrix of integers.

    Example:
        >>> buckets([[7, 1], [2, 5], [7, 1]]).sizes
        array([1, 2])
    """
    table = check_codes(codes)
    order = np.lexsort(table.T[::-1])
    ordered = table[order]
    starts = np.ones(len(table), dtype=bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    members = np.empty(len(table), dtype=np.int64)
    members[order] = np.cumsum(starts) - 1
    sizes = np.bincount(members, minlength=int(starts.sum())).astype(np.int64)
    return Buckets(ordered[starts], sizes, members)


def positions(members: NDArray[np.int64], keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return each row's number within its bucket, counted from 0 in the order of the keys.

    Args:
        members: (n_rows,) bucket of each row.
        keys: (n_rows,) what the rows of a bucket are ordered by.

    Returns:
        (n_rows,) int64.

    Example:
        >>> positions(np.array([0, 1, 0]), np.array(["b", "c", "a"]))
        array([1, 0, 0])
    """
    by_key = np.argsort(keys, kind="stable")
    order = by_key[np.argsort(members[by_key], kind="stable")]
    ordered = members[order]
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(starts)
    within = np.arange(len(order)) - np.repeat(begins, np.diff([*begins, len(order)]))
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = within
    return numbers


def check_codes(codes: ArrayLike) -> NDArray[np.int64]:
    """Return codes as an int64 matrix.

    Args:
        codes: (n_items, n_levels) integers.

    Returns:
        The same, without a copy where it was int64 already.

    Raises:
        ValueError: not a matrix of integers.
    """
    table = np.asarray(codes)
    if table.ndim != 2 or table.shape[1] == 0 or table.dtype.kind not in "iu":
        got = f"{table.dtype} of shape {table.shape}"
        raise ValueError(f"`codes`: expected integers of shape (n_items, n_levels), got {got}. Convert them.")
    return table.astype(np.int64, copy=False)


def check_ids(item_ids: ArrayLike) -> NDArray[Any]:
    """Return item ids as an array, once they are known to be distinct.

    Args:
        item_ids: (n_items,) integers or strings.

    Returns:
        The same as an array.

    Raises:
        ValueError: not a vector of integers or strings, or an id that repeats.
    """
    keys = np.asarray(item_ids)
    if keys.ndim != 1 or (keys.dtype.kind not in "iuU" and keys.size):
        got = f"{keys.dtype} of shape {keys.shape}"
        raise ValueError(
            f"`item_ids`: expected integers or strings of shape (n_items,), got {got}. Convert them."
        )
    ordered = np.sort(keys)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise ValueError(
            f"`item_ids`: expected distinct ids, got {repeated[0]!r} more than once. Rename one."
        )
    return keys
