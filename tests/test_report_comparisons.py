"""What comparisons left in a folder, on its page: verdict, first difference; damaged parts hurt nothing."""

from __future__ import annotations

import json

import pytest

from samestep import report
from samestep.errors import SpecError

FIRST = {
    "step": 3,
    "phase": "gradients",
    "tensor": "fc1.<weight>",
    "ranks": [1, 2],
    "relative": 3.0,
    "allowed": 1e-5,
    "ulps": 77,
}
ONE = {
    "reference": "1-worker",
    "other": "4-workers",
    "verdict": "different",
    "proves": True,
    "sentence": "different: step 3, gradients",
    "explanation": "a mean of means, counts 6, 6, 5, 5",
    "first": FIRST,
    "phases": {"gradients": {"exact": 2, "within": 0, "different": 9}},
    "refusals": [],
    "warnings": ["2 workers only"],
}


def page(folder, *found):
    (folder / "comparison.json").write_text(json.dumps({"comparisons": list(found)}))
    return report.write(folder).read_text()


def test_the_first_difference_is_shown(tmp_path):
    text = page(tmp_path, ONE)
    assert 'id="comparisons"' in text
    assert "1-worker against 4-workers: different" in text
    assert "a mean of means, counts 6, 6, 5, 5" in text
    assert "fc1.&lt;weight&gt;" in text
    assert "<td>77</td>" in text
    assert "<td>gradients</td><td>2</td><td>0</td><td>9</td>" in text
    assert "2 workers only" in text
    assert "not audited" not in text  # nothing ran in this folder


def test_a_comparison_that_proves_nothing_is_not_green(tmp_path):
    text = page(tmp_path, ONE | {"verdict": "exact", "proves": False, "first": None})
    assert "1-worker against 4-workers: proves nothing" in text
    assert "badge bad" in text
    assert "badge good" not in text


@pytest.mark.parametrize("odd", [{}, {"first": 3, "phases": [1], "warnings": None, "verdict": None}, 7])
def test_odd_parts_are_left_out(tmp_path, odd):
    assert "exact" not in page(tmp_path, odd) or odd


def test_event_files_need_tensorboard_and_metrics(tmp_path):
    page(tmp_path, ONE)
    with pytest.raises(SpecError, match=r"expected lines in .*metrics\.jsonl"):
        report.write_events(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 0.5, "lr": [0.1]}\n')
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        with pytest.raises(SpecError, match="expected the package"):
            report.write_events(tmp_path)
        assert not list(tmp_path.glob("*tensorboard*"))
        return
    for _ in range(2):  # a second call replaces the first one's
        events = EventAccumulator(str(report.write_events(tmp_path)))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, 0.5)]
