"""How good a set of semantic ids is, as one JSON-ready table with stated definitions.

The words are used differently in the field; here N is the number of items and u the number of distinct ids.

===================  ==========================================================================================
``collision_rate``   1 - u/N: the share of items that an id per item would save
``items_sharing``    share of items whose id another item has too; about twice the collision rate for pairs
``items_alone``      share of items that are alone on their id; 1 - items_sharing
``largest_bucket``   items on the most crowded id
``gini``             Gini coefficient of the numbers of items on the u occupied ids: 0 if all are equally full
``used``             codes of a level that at least one item has
``dead``             codes of a level that no item has
``perplexity``       exp of the entropy of a level's code use over all items: 256 if 256 codes are used evenly
``relative_error``   squared error left after a level, divided by the squared distance of the data from its mean
``distinct_prefixes``  distinct ids when cut after this level
===================  ==========================================================================================

All are taken over the whole set: perplexity over a batch is bounded by the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.recipes.semantic_ids import ids
from samestep.recipes.semantic_ids.grouping import buckets

__all__ = ["gini", "measure", "perplexity"]


def measure(
    codes: ArrayLike,
    n_centroids_per_level: Sequence[int],
    relative_errors: Sequence[float] | None = None,
    unique_digit: ArrayLike | None = None,
    *,
    n_top_buckets: int = 10,
) -> dict[str, Any]:
    """Return the quality of the semantic ids of a whole set; the module defines every entry.

    Args:
        codes: (n_items, n_levels) integers, without the unique digit.
        n_centroids_per_level: (n_levels,) size of each codebook.
        relative_errors: (n_levels,) relative squared error after each level; None if there is none to state.
        unique_digit: (n_items,) integers that resolve clashes; None if they were not resolved.
        n_top_buckets: how many of the most crowded ids are listed.

    Returns:
        ``items, distinct_ids, collision_rate, items_sharing, items_alone, largest_bucket, gini, top_buckets``
        (``codes, items`` each), ``levels`` (``level, n_centroids, used, dead, perplexity, relative_error,
        distinct_prefixes`` each) and ``after_resolving`` (``distinct, collisions, largest_digit``, or None).

    Raises:
        ValueError: no items, a code outside its level, or lists of other lengths.

    Example:
        >>> found = measure([[0, 1], [0, 1], [1, 0], [1, 1]], [2, 2], unique_digit=[1, 2, 0, 0])
        >>> found["distinct_ids"], found["collision_rate"], found["items_sharing"]
        (3, 0.25, 0.5)
        >>> found["after_resolving"]["distinct"], round(found["levels"][1]["perplexity"], 3)
        (4, 1.755)
    """
    ids.offsets(codes, n_centroids_per_level)  # refuses codes outside their level
    table = np.asarray(codes, dtype=np.int64)
    if len(table) == 0:
        raise ValueError("`codes`: expected at least one item, got 0. Encode some items first.")
    errors: Sequence[float | None] = (
        relative_errors if relative_errors is not None else [None] * table.shape[1]
    )
    if len(errors) != table.shape[1]:
        found = f"expected {table.shape[1]} numbers, one per level, got {len(errors)}"
        raise ValueError(f"`relative_errors`: {found}. Give one per level.")
    levels = enumerate(zip(n_centroids_per_level, errors))
    return {
        **_whole(table, n_top_buckets),
        "levels": [_level(table, level, int(n_centroids), error) for level, (n_centroids, error) in levels],
        "after_resolving": None if unique_digit is None else _resolved(table, np.asarray(unique_digit)),
    }


def perplexity(counts: ArrayLike) -> float:
    """Return exp of the entropy of code use: the number of codes that would be as varied if used evenly.

    Args:
        counts: (n_centroids,) how often each code is used; at least one of them above 0.

    Returns:
        From 1 (one code takes all) to n_centroids.

    Raises:
        ValueError: no count above 0.

    Numerics: float64.

    Example:
        >>> perplexity([5, 5, 0])
        2.0
    """
    numbers = np.asarray(counts, dtype=np.float64)
    total = numbers.sum()
    if not total > 0:
        raise ValueError(f"`counts`: expected a sum above 0, got {total:g}. Count some items first.")
    shares = numbers[numbers > 0] / total
    return math.exp(-float((shares * np.log(shares)).sum()))


def gini(sizes: ArrayLike) -> float:
    """Return the Gini coefficient of bucket sizes: 0 if all are equal, towards 1 if one holds nearly all.

    With sizes x sorted upwards and counted from 1, ``sum_i (2 i - n - 1) x_i / (n sum_i x_i)``.

    Args:
        sizes: (n_buckets,) items in each occupied bucket.

    Raises:
        ValueError: no bucket, or no item in them.

    Numerics: float64.

    Example:
        >>> gini([1, 3])
        0.25
    """
    ordered = np.sort(np.asarray(sizes, dtype=np.float64))
    n_buckets, total = len(ordered), ordered.sum()
    if not total > 0:
        raise ValueError(f"`sizes`: expected a sum above 0, got {total:g}. Count some items first.")
    weights = 2 * np.arange(1, n_buckets + 1) - n_buckets - 1
    return float((weights * ordered).sum() / (n_buckets * total))


def _whole(table: NDArray[np.int64], n_top_buckets: int) -> dict[str, Any]:
    grouped = buckets(table)
    n_items, sizes = len(table), grouped.sizes
    n_sharing = int(sizes[sizes > 1].sum())
    top = np.argsort(-sizes, kind="stable")[:n_top_buckets]
    return {
        "items": n_items,
        "distinct_ids": len(sizes),
        "collision_rate": 1 - len(sizes) / n_items,
        "items_sharing": n_sharing / n_items,
        "items_alone": (n_items - n_sharing) / n_items,
        "largest_bucket": int(sizes.max()),
        "gini": gini(sizes),
        "top_buckets": [{"codes": grouped.codes[i].tolist(), "items": int(sizes[i])} for i in top],
    }


def _level(
    table: NDArray[np.int64], level: int, n_centroids: int, relative_error: float | None
) -> dict[str, Any]:
    counts = np.bincount(table[:, level], minlength=n_centroids)
    used = int((counts > 0).sum())
    return {
        "level": level,
        "n_centroids": n_centroids,
        "used": used,
        "dead": n_centroids - used,
        "perplexity": perplexity(counts),
        "relative_error": None if relative_error is None else float(relative_error),
        "distinct_prefixes": len(buckets(table[:, : level + 1]).sizes),
    }


def _resolved(table: NDArray[np.int64], unique_digit: NDArray[Any]) -> dict[str, int]:
    if unique_digit.shape != (len(table),):
        found = f"expected {len(table)} numbers, one per item, got shape {unique_digit.shape}"
        raise ValueError(f"`unique_digit`: {found}. Give one per item.")
    distinct = len(buckets(np.column_stack([table, unique_digit])).sizes)
    return {
        "distinct": distinct,
        "collisions": len(table) - distinct,
        "largest_digit": int(unique_digit.max()),
    }
