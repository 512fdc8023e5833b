"""The page of a classifier's run: accuracy by class, confusion matrix, and damaged figures that hurt nothing."""

from __future__ import annotations

import json

import pytest

from samestep import report
from samestep.report._classification import classification

NAMES = [{"class": name} for name in ("cat", "dog", "<owl>")]
FIGURES = {
    "test_samples": 10,
    "test_accuracy": 0.7,
    "classes": NAMES,
    "confusion_matrix": [[3, 1, 0], [2, 4, 0], [0, 0, 0]],
}


def test_the_parts_say_what_was_called_what() -> None:
    parts = classification(FIGURES)
    assert parts["columns"] == ["is \\ called", "cat", "dog", "<owl>"]
    assert parts["levels"][1] == ["dog", "2", "4", "0"]
    assert parts["buckets"] == [("dog called cat", "2"), ("cat called dog", "1")]
    assert ("test accuracy", "0.7") in parts["rows"]
    _, svg, _ = parts["charts"][0]
    assert "cat 0.75" in svg
    assert "dog 0.6667" in svg


def test_the_page_shows_them_and_escapes_names(tmp_path) -> None:
    (tmp_path / "quality.json").write_text(json.dumps(FIGURES))
    page = report.write(tmp_path).read_text()
    assert "On the test set" in page
    assert "Semantic ids" not in page
    assert "&lt;owl&gt;" in page
    assert "<owl>" not in page


def test_many_classes_show_the_worst_and_no_matrix() -> None:
    matrix = [[9 if i == j else int(i == 77 and j == 3) * 5 for j in range(100)] for i in range(100)]
    parts = classification({"confusion_matrix": matrix})
    assert parts["columns"] == parts["levels"] == []
    assert parts["buckets"] == [("77 called 3", "5")]
    assert "30 worst of 100" in parts["charts"][0][2]
    assert "77 0.6429" in parts["charts"][0][1]


@pytest.mark.parametrize("matrix", [None, 3, [], [[1, 2]], [["a"]], [[1.5]], [[-1]], [[True]]])
def test_a_matrix_that_is_none_is_left_out(matrix) -> None:
    parts = classification({"confusion_matrix": matrix, "test_samples": 4})
    assert parts["charts"] == parts["levels"] == parts["buckets"] == []
    assert parts["rows"] == [("test samples", "4")]
