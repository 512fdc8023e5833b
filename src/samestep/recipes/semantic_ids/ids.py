"""From codes to semantic ids: make clashing ids unique, shift codes for one vocabulary, look items up by id.

Two items may get the same codes. A last digit then tells them apart, by one of two named rules:

=========  ==================  ===================================================
rule       item alone          m items that share their codes
=========  ==================  ===================================================
``digit``  0                   1, 2, …, m
``count``  0                   0, 1, …, m-1
=========  ==================  ===================================================

Within a clash the items are ordered by their item id (integers by value, strings by their characters' code points,
which is also the order of their UTF-8 bytes), so the digits do not depend on the order of the rows, on the number
of workers or on the machine. An id that was published never changes: `extend` only hands out digits that are free.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.recipes.semantic_ids.grouping import buckets, check_codes, check_ids, positions

__all__ = ["Extension", "Published", "Rule", "extend", "offsets", "resolve", "to_items", "tokens"]

Rule = Literal["digit", "count"]


class Published(NamedTuple):
    """Semantic ids that are already in use and must stay.

    Attributes:
        item_ids: (n_items,) int64 or str.
        codes: (n_items, n_levels) int64.
        unique_digit: (n_items,) int64.
    """

    item_ids: NDArray[Any]
    codes: NDArray[np.int64]
    unique_digit: NDArray[np.int64]


class Extension(NamedTuple):
    """Semantic ids of items that were encoded after others had been published.

    Attributes:
        codes: (n_items, n_levels) int64; for an item that was published, the published ones.
        unique_digit: (n_items,) int64; likewise.
        known: (n_items,) bool; whether the item was published before.
        changed: (n_items,) bool; whether a known item's embedding now gives other codes than the published ones.
    """

    codes: NDArray[np.int64]
    unique_digit: NDArray[np.int64]
    known: NDArray[np.bool_]
    changed: NDArray[np.bool_]


def resolve(codes: ArrayLike, item_ids: ArrayLike, *, rule: Rule = "digit") -> NDArray[np.int64]:
    """Return the digit that makes every item's semantic id unique.

    Args:
        codes: (n_items, n_levels) integers.
        item_ids: (n_items,) distinct integers or strings.
        rule: "digit" (0 if alone, else 1 … m) or "count" (0 … m-1); see the module.

    Returns:
        (n_items,) int64. Permuting the rows permutes the digits with them.

    Raises:
        ValueError: unknown rule, ids that repeat, or other numbers of ids than of codes.

    Example:
        >>> resolve([[1, 1], [1, 1], [4, 2]], ["b", "a", "c"])
        array([2, 1, 0])

    Reference: S. Rajput et al., Recommender Systems with Generative Retrieval, 2023, section 3.1 (the extra token
    for items that collide). The order inside a clash is ours.
    """
    _check_rule(rule)
    table, keys = check_codes(codes), check_ids(item_ids)
    _check_lengths(table, keys)
    grouped = buckets(table)
    digits = positions(grouped.members, keys)
    if rule == "digit":
        digits += grouped.sizes[grouped.members] > 1
    return digits


def extend(published: Published, codes: ArrayLike, item_ids: ArrayLike, *, rule: Rule = "digit") -> Extension:
    """Return semantic ids for items that come later, without moving any published one.

    An item that was published keeps its codes and its digit, even if its embedding now gives other codes. A new
    item whose codes nobody has is treated as by `resolve`. A new item that meets published ones gets the next digit
    above theirs; so a published item that was alone keeps its 0. Digits depend on which items came in which batch,
    never on the order of rows within a batch.

    Args:
        published: the ids in use.
        codes: (n_items, n_levels) integers of the new batch.
        item_ids: (n_items,) distinct integers or strings; some may be published already.
        rule: the rule that the published ids were made by.

    Returns:
        An `Extension`, in the order of the batch.

    Raises:
        ValueError: as `resolve`; also another number of levels, or ids of another kind than the published ones.

    Example:
        >>> old = Published(np.array(["a", "b"]), np.array([[1, 1], [2, 2]]), np.array([0, 0]))
        >>> extend(old, [[1, 1], [3, 3], [1, 1]], ["d", "e", "c"]).unique_digit
        array([2, 0, 1])
    """
    _check_rule(rule)
    table, keys = check_codes(codes).copy(), check_ids(item_ids)
    _check_lengths(table, keys)
    _check_compatible(published, table, keys)
    old_row = _rows_of(published.item_ids, keys)
    known = old_row >= 0
    changed = np.zeros(len(keys), dtype=bool)
    changed[known] = (published.codes[old_row[known]] != table[known]).any(axis=1)
    table[known] = published.codes[old_row[known]]
    digits = np.zeros(len(keys), dtype=np.int64)
    digits[known] = published.unique_digit[old_row[known]]

    grouped = buckets(np.concatenate([published.codes, table[~known]]))
    n_published = len(published.codes)
    highest = np.full(len(grouped.sizes), -1, dtype=np.int64)
    np.maximum.at(highest, grouped.members[:n_published], published.unique_digit)
    members = grouped.members[n_published:]
    n_new = np.bincount(members, minlength=len(grouped.sizes))[members]
    first = highest[members] + 1
    if rule == "digit":
        first += (highest[members] < 0) & (n_new > 1)
    digits[~known] = first + positions(members, keys[~known])
    return Extension(table, digits, known, changed)


def offsets(codes: ArrayLike, n_centroids_per_level: ArrayLike) -> NDArray[np.int64]:
    """Return codes shifted so that the levels share one vocabulary: level k starts where level k-1 ends.

    Args:
        codes: (n_items, n_levels) integers, each below its level's number of centroids.
        n_centroids_per_level: (n_levels,) integers.

    Returns:
        (n_items, n_levels) int64, all below the sum of `n_centroids_per_level`.

    Raises:
        ValueError: another number of levels, or a code outside its level.

    Example:
        >>> offsets([[1, 2, 3]], [64, 64, 64])
        array([[  1,  66, 131]])
    """
    table = check_codes(codes)
    sizes = np.asarray(n_centroids_per_level, dtype=np.int64)
    if sizes.shape != (table.shape[1],):
        found = f"expected {table.shape[1]} numbers, one per level, got {sizes.size}"
        raise ValueError(f"`n_centroids_per_level`: {found}. Give one per level.")
    bad = np.argwhere((table < 0) | (table >= sizes))
    if len(bad):
        row, level = bad[0]
        found = f"expected 0 to {sizes[level] - 1} at level {level}, got {table[row, level]} in row {row}"
        raise ValueError(f"`codes`: {found}. Give the sizes that the codes were made with.")
    starts = np.cumsum(sizes) - sizes
    shifted: NDArray[np.int64] = table + starts
    return shifted


def to_items(codes: ArrayLike, item_ids: ArrayLike) -> dict[tuple[int, ...], list[Any]]:
    """Return which items stand behind each semantic id; the other direction is the row itself.

    Args:
        codes: (n_items, n_levels) integers, with or without the unique digit as last column, or with fewer levels
            to look up by prefix.
        item_ids: (n_items,) distinct integers or strings.

    Returns:
        ids -> items, both in ascending order.

    Raises:
        ValueError: ids that repeat, or other numbers of ids than of codes.

    Example:
        >>> to_items([[1, 2], [3, 4], [1, 2]], ["b", "c", "a"])
        {(1, 2): ['a', 'b'], (3, 4): ['c']}
    """
    table, keys = check_codes(codes), check_ids(item_ids)
    _check_lengths(table, keys)
    grouped = buckets(table)
    found: dict[tuple[int, ...], list[Any]] = {tuple(row): [] for row in grouped.codes.tolist()}
    lists = list(found.values())
    order = np.argsort(keys, kind="stable")
    for bucket, item_id in zip(grouped.members[order].tolist(), keys[order].tolist()):
        lists[bucket].append(item_id)
    return found


def tokens(codes: ArrayLike) -> list[list[str]]:
    """Return every item's codes as words, one letter per level.

    Args:
        codes: (n_items, n_levels) integers; at most 26 levels. Join the unique digit as last column for ids that
            are unique.

    Returns:
        One list of words per item.

    Raises:
        ValueError: more than 26 levels.

    Example:
        >>> tokens([[12, 7]])
        [['<a_12>', '<b_7>']]

    Reference: B. Zheng et al., Adapting Large Language Models by Integrating Collaborative Semantics for
    Recommendation (LC-Rec), 2024, section 3.2.
    """
    table = check_codes(codes)
    letters = "abcdefghijklmnopqrstuvwxyz"
    if table.shape[1] > len(letters):
        raise ValueError(
            f"`codes`: expected at most 26 levels, got {table.shape[1]}. Use the numbers instead."
        )
    return [[f"<{letter}_{code}>" for letter, code in zip(letters, row)] for row in table.tolist()]


def _rows_of(published_ids: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.int64]:
    # Row of each key among the published ids, or -1.
    if not len(published_ids):
        return np.full(len(keys), -1, dtype=np.int64)
    order = np.argsort(published_ids, kind="stable")
    at = np.minimum(np.searchsorted(published_ids, keys, sorter=order), len(order) - 1)
    rows = order[at]
    return np.where(published_ids[rows] == keys, rows, -1).astype(np.int64)


def _check_lengths(table: NDArray[np.int64], keys: NDArray[Any]) -> None:
    if len(table) != len(keys):
        found = f"expected {len(table)}, one per row of codes, got {len(keys)}"
        raise ValueError(f"`item_ids`: {found}. Give one id per row.")


def _check_rule(rule: str) -> None:
    if rule not in ("digit", "count"):
        raise ValueError(f"`rule`: expected 'digit' or 'count', got {rule!r}. Choose one of them.")


def _check_compatible(published: Published, table: NDArray[np.int64], keys: NDArray[Any]) -> None:
    if published.codes.shape[1:] != table.shape[1:]:
        found = f"expected {published.codes.shape[1]} levels as published, got {table.shape[1]}"
        raise ValueError(f"`codes`: {found}. Encode with the published codebooks.")
    kinds = {"i": "integers", "u": "integers", "U": "strings"}
    old, new = (kinds.get(each.dtype.kind, "none") for each in (published.item_ids, keys))
    if old != new and len(keys) and len(published.item_ids):
        raise ValueError(f"`item_ids`: expected {old} as published, got {new}. Write the same kind of ids.")
