"""Clashes are resolved by rules that do not see the order of rows, and published ids never move."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.recipes.semantic_ids import ids

RULES: list[ids.Rule] = ["digit", "count"]


@st.composite
def coded_items(draw: st.DrawFn, min_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    kind = st.one_of(
        st.lists(st.integers(-(2**62), 2**62), unique=True, min_size=min_size, max_size=30),
        st.lists(
            st.text(st.characters(exclude_characters="\0"), max_size=4),
            unique=True,
            min_size=min_size,
            max_size=30,
        ),
    )
    item_ids = np.array(draw(kind))
    n_levels = draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 2), min_size=n_levels, max_size=n_levels)
    codes = np.array(draw(st.lists(row, min_size=len(item_ids), max_size=len(item_ids))))
    return codes.reshape(len(item_ids), n_levels), item_ids


def obvious(codes: np.ndarray, item_ids: np.ndarray, rule: str) -> list[int]:
    # The rule in plain words: sort the members of each bucket by id and number them.
    groups: dict[tuple[int, ...], list[Any]] = defaultdict(list)
    for row, item_id in zip(codes.tolist(), item_ids.tolist()):
        groups[tuple(row)].append(item_id)
    digits = []
    for row, item_id in zip(codes.tolist(), item_ids.tolist()):
        group = sorted(groups[tuple(row)])
        first = 1 if rule == "digit" and len(group) > 1 else 0
        digits.append(first + group.index(item_id))
    return digits


@pytest.mark.parametrize("rule", RULES)
def test_two_equal_rows_and_one_other(rule: ids.Rule) -> None:
    codes, item_ids = np.array([[3, 1], [3, 1], [3, 2]]), np.array(["later", "first", "alone"])
    digits = ids.resolve(codes, item_ids, rule=rule)
    assert digits.tolist() == ([2, 1, 0] if rule == "digit" else [1, 0, 0])
    assert digits.dtype == np.int64


@pytest.mark.parametrize("rule", RULES)
@given(items=coded_items(), data=st.data())
def test_resolve_is_its_rule_unique_and_blind_to_row_order(
    rule: ids.Rule, items: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    codes, item_ids = items
    digits = ids.resolve(codes, item_ids, rule=rule)
    assert digits.tolist() == obvious(codes, item_ids, rule)
    assert len({(*row, digit) for row, digit in zip(codes.tolist(), digits.tolist())}) == len(codes)
    order = np.array(data.draw(st.permutations(range(len(codes)))), dtype=int)
    assert np.array_equal(ids.resolve(codes[order], item_ids[order], rule=rule), digits[order])


@pytest.mark.parametrize(
    "values", [["a", "b", "ab", "B", "é", "zz", "\uffff", "\U00010000"], [-3, 10, 9, 2**62]]
)
def test_order_of_ids_is_by_utf8_bytes_or_by_value(values: list[Any]) -> None:
    expected = sorted(values, key=lambda value: value.encode() if isinstance(value, str) else value)
    digits = ids.resolve(np.zeros((len(values), 2), dtype=int), values)
    assert [value for _, value in sorted(zip(digits.tolist(), values))] == expected


@pytest.mark.parametrize("rule", RULES)
@given(items=coded_items(min_size=2), data=st.data())
def test_extend_in_batches_never_moves_a_published_id(
    rule: ids.Rule, items: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    codes, item_ids = items
    cut = data.draw(st.integers(1, len(codes) - 1))
    published = ids.Published(
        item_ids[:cut], codes[:cut], ids.resolve(codes[:cut], item_ids[:cut], rule=rule)
    )
    found = ids.extend(published, codes, item_ids, rule=rule)
    # The published ones come back as they were, the new ones are new, and all are distinct.
    assert np.array_equal(found.unique_digit[:cut], published.unique_digit)
    assert np.array_equal(found.codes, codes)
    assert found.known.tolist() == [True] * cut + [False] * (len(codes) - cut)
    assert not found.changed.any()
    full = np.column_stack([found.codes, found.unique_digit]).tolist()
    assert max(Counter(map(tuple, full)).values()) == 1
    # The order of rows within the batch plays no part, and neither does naming only the new ones.
    order = np.array(data.draw(st.permutations(range(cut, len(codes)))), dtype=int)
    alone = ids.extend(published, codes[order], item_ids[order], rule=rule)
    assert np.array_equal(alone.unique_digit, found.unique_digit[order])


def test_extend_by_hand() -> None:
    old = ids.Published(
        np.array([10, 20, 30, 40]), np.array([[1, 1], [2, 2], [2, 2], [5, 5]]), np.array([0, 1, 2, 0])
    )
    new_ids = [7, 6, 5, 4, 3, 40]
    new_codes = [[1, 1], [2, 2], [2, 2], [9, 9], [9, 9], [6, 6]]
    found = ids.extend(old, new_codes, new_ids)
    # 7 meets 10 (digit 0) and gets 1; 5 and 6 meet 1 and 2 and get 3 and 4; 3 and 4 meet nobody else: 1 and 2.
    assert found.unique_digit.tolist() == [1, 4, 3, 2, 1, 0]
    # 40 was published as (5, 5) and stays so, though its embedding now gives (6, 6).
    assert found.codes[5].tolist() == [5, 5]
    assert found.changed.tolist() == [False] * 5 + [True]
    assert ids.extend(old, new_codes, new_ids, rule="count").unique_digit.tolist() == [1, 4, 3, 1, 0, 0]


def test_extend_nothing_is_resolve() -> None:
    nobody = ids.Published(
        np.empty(0, dtype=str), np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=np.int64)
    )
    codes, item_ids = [[1, 1], [1, 1], [2, 0]], ["b", "a", "c"]
    assert ids.extend(nobody, codes, item_ids).unique_digit.tolist() == ids.resolve(codes, item_ids).tolist()


def test_ids_longer_than_any_published_one_are_not_cut() -> None:
    old = ids.Published(np.array(["ab"]), np.array([[1]]), np.array([0]))
    found = ids.extend(old, [[1], [1]], ["abc", "ab"])
    assert found.known.tolist() == [False, True]
    assert found.unique_digit.tolist() == [1, 0]


def test_offsets_of_the_report_and_of_unequal_levels() -> None:
    assert ids.offsets([[1, 2, 3]], [64, 64, 64]).tolist() == [[1, 66, 131]]
    assert ids.offsets([[0, 0, 0], [1, 4, 2]], [2, 5, 3]).tolist() == [[0, 2, 7], [1, 6, 9]]


def test_both_directions() -> None:
    codes, item_ids = np.array([[1, 2], [0, 9], [1, 2]]), np.array([30, 20, 10])
    assert ids.to_items(codes, item_ids) == {(0, 9): [20], (1, 2): [10, 30]}
    assert list(ids.to_items(codes, item_ids)) == [(0, 9), (1, 2)]
    full = np.column_stack([codes, ids.resolve(codes, item_ids)])
    back = ids.to_items(full, item_ids)
    assert all(back[tuple(row)] == [item_id] for row, item_id in zip(full.tolist(), item_ids.tolist()))


def test_words_of_the_lc_rec_family() -> None:
    assert ids.tokens([[12, 7, 0, 255]]) == [["<a_12>", "<b_7>", "<c_0>", "<d_255>"]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ids.resolve([[1], [1]], ["a", "a"]), "`item_ids`: expected distinct ids, got.*'a'"),
        (lambda: ids.resolve([[1], [1]], ["a"]), "`item_ids`: expected 2.*got 1"),
        (lambda: ids.resolve([1, 2], ["a", "b"]), "`codes`: expected integers of shape"),
        (lambda: ids.resolve([[0.5]], ["a"]), "`codes`: expected integers.*float64"),
        (lambda: ids.resolve([[1]], [0.5]), "`item_ids`: expected integers or strings"),
        (lambda: ids.resolve([[1]], ["a"], rule="sinkhorn"), "`rule`: expected 'digit' or 'count'"),  # type: ignore[arg-type]
        (lambda: ids.offsets([[1, 64]], [64, 64]), "`codes`: expected 0 to 63 at level 1, got 64 in row 0"),
        (lambda: ids.offsets([[1, -1]], [64, 64]), "got -1 in row 0"),
        (lambda: ids.offsets([[1, 1]], [64]), "`n_centroids_per_level`: expected 2 numbers"),
        (lambda: ids.tokens([[0] * 27]), "at most 26 levels, got 27"),
        (
            lambda: ids.extend(ids.Published(np.array([1]), np.array([[1, 1]]), np.array([0])), [[1]], [2]),
            "`codes`: expected 2 levels as published, got 1",
        ),
        (
            lambda: ids.extend(ids.Published(np.array([1]), np.array([[1]]), np.array([0])), [[1]], ["2"]),
            "`item_ids`: expected integers as published, got strings",
        ),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
