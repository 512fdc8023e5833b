"""The measures, against counts by hand, against plain loops, and on permuted rows."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.recipes.semantic_ids import ids, quality


def test_counts_by_hand() -> None:
    # Ten items: four on (0, 0), two on (0, 1), two on (1, 1), one on (1, 0), one on (3, 1); code 2 is dead.
    codes = np.repeat([[0, 0], [0, 1], [1, 1], [1, 0], [3, 1]], [4, 2, 2, 1, 1], axis=0)
    found = quality.measure(codes, [4, 2], [0.5, 0.25], ids.resolve(codes, np.arange(10)), n_top_buckets=2)
    assert found["items"] == 10
    assert found["distinct_ids"] == 5
    assert found["collision_rate"] == 0.5
    assert (found["items_sharing"], found["items_alone"]) == (0.8, 0.2)
    assert found["largest_bucket"] == 4
    assert found["top_buckets"] == [{"codes": [0, 0], "items": 4}, {"codes": [0, 1], "items": 2}]
    # Sizes 1 1 2 2 4: the ten pairs differ by 0 1 1 3, 1 1 3, 0 2, 2: 28 over ordered pairs, / 25, / 2, / mean 2.
    assert found["gini"] == pytest.approx(28 / 25 / 2 / 2, abs=1e-15)
    first, second = found["levels"]
    assert {key: first[key] for key in first if key != "perplexity"} == {
        "level": 0,
        "n_centroids": 4,
        "used": 3,
        "dead": 1,
        "relative_error": 0.5,
        "distinct_prefixes": 3,
    }
    assert first["perplexity"] == pytest.approx(0.6**-0.6 * 0.3**-0.3 * 0.1**-0.1, rel=1e-14)
    assert second["perplexity"] == pytest.approx(2.0, rel=1e-14)
    assert second["distinct_prefixes"] == 5
    assert found["after_resolving"] == {"distinct": 10, "collisions": 0, "largest_digit": 4}


def test_pairs_share_twice_as_much_as_they_collide() -> None:
    # The definitions of two published figures for one file differ by this factor.
    codes = np.array([[0], [0], [1], [2], [3], [4], [5], [6]])
    found = quality.measure(codes, [8])
    assert found["items_sharing"] == 2 * found["collision_rate"] == 0.25


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60), data=st.data()
)
def test_measure_against_plain_loops(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    found = quality.measure(rows, [5, 5])
    counts = Counter(rows)
    assert found["distinct_ids"] == len(counts)
    assert found["collision_rate"] == pytest.approx(1 - len(counts) / len(rows), abs=1e-15)
    assert found["items_sharing"] == sum(1 for row in rows if counts[row] > 1) / len(rows)
    sizes = list(counts.values())
    pairs = sum(abs(a - b) for a in sizes for b in sizes)
    assert found["gini"] == pytest.approx(pairs / (2 * len(sizes) * sum(sizes)), abs=1e-12)
    for level in range(2):
        use = Counter(row[level] for row in rows)
        entropy = -sum(n / len(rows) * math.log(n / len(rows)) for n in use.values())
        assert found["levels"][level]["perplexity"] == pytest.approx(math.exp(entropy), rel=1e-12)
        assert found["levels"][level]["used"] == len(use)
    assert quality.measure(data.draw(st.permutations(rows)), [5, 5]) == found


def test_ends_of_the_scales() -> None:
    even = quality.measure(np.arange(256)[:, None], [256])
    assert even["levels"][0]["perplexity"] == pytest.approx(256, rel=1e-13)
    assert (even["collision_rate"], even["gini"], even["items_sharing"]) == (0, 0, 0)
    collapsed = quality.measure(np.zeros((100, 3), dtype=int), [4, 4, 4])
    assert [level["perplexity"] for level in collapsed["levels"]] == [1.0, 1.0, 1.0]
    assert (collapsed["distinct_ids"], collapsed["collision_rate"]) == (1, 0.99)
    assert collapsed["gini"] == 0


def test_result_is_json_and_leaves_out_nothing() -> None:
    found = quality.measure(np.array([[1], [0]]), (np.int64(2),), np.float32([0.5]), np.array([0, 0]))  # type: ignore[arg-type]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    bare = quality.measure(np.array([[1], [0]]), [2])
    assert bare["after_resolving"] is None
    assert bare["levels"][0]["relative_error"] is None


def test_collisions_left_by_a_bad_digit_are_seen() -> None:
    found = quality.measure([[1], [1], [0]], [2], unique_digit=[1, 1, 0])
    assert found["after_resolving"] == {"distinct": 2, "collisions": 1, "largest_digit": 1}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least one item, got 0"):
        quality.measure(np.empty((0, 2), dtype=int), [2, 2])
    with pytest.raises(ValueError, match="expected 0 to 1 at level 0, got 2"):
        quality.measure([[2]], [2])
    with pytest.raises(ValueError, match="`relative_errors`: expected 2"):
        quality.measure([[0, 0]], [2, 2], [0.5])
    with pytest.raises(ValueError, match="`unique_digit`: expected 1"):
        quality.measure([[0, 0]], [2, 2], unique_digit=[0, 1])
    with pytest.raises(ValueError, match="`counts`"):
        quality.perplexity([0, 0])
    with pytest.raises(ValueError, match="`sizes`"):
        quality.gini([])
