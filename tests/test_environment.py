"""What decides the bits, written down, and where two such records part."""

from __future__ import annotations

import json

import pytest
import torch

from samestep.environment import differences, fingerprint


def test_a_fingerprint_is_plain_data_and_repeats():
    found = fingerprint()
    assert found == fingerprint("cpu") == json.loads(json.dumps(found))
    assert {type(text) for text in found.values()} == {str}  # checkpoints take plain data only
    assert differences(found, found) == []


@pytest.mark.parametrize(
    ("change", "back", "words"),
    [
        (
            lambda: torch.set_num_threads(3),
            lambda: torch.set_num_threads(1),
            "intra-op threads: 1 then, 3 now",
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
            "deterministic algorithms: False then, True now",
        ),
        (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
            "precision of float32 matrix products: highest then, high now",
        ),
    ],
)
def test_each_setting_is_named_when_it_differs(change, back, words):
    torch.set_num_threads(1)
    before = fingerprint()
    try:
        change()
        assert differences(before, fingerprint()) == [words]
    finally:
        back()


def test_onednn_and_the_instruction_set_are_part_of_it(monkeypatch):
    before = fingerprint()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO SUCH")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    torch._C._set_mkldnn_enabled(False)  # torch's context manager warns about Intel GPUs
    try:
        now = fingerprint()
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert differences(before, now) == [
        f"instruction set of torch's CPU kernels: {before['cpu_capability']} then, NO SUCH now",
        "oneDNN: True then, False now",
        "ONEDNN_MAX_CPU_ISA: unset then, SSE41 now",
    ]


def test_a_name_that_one_side_lacks_is_a_difference():
    assert differences({"cuda": "12"}, {}) == ["cuda: 12 then, unset now"]
    assert differences({}, {"cuda": "12"}) == ["cuda: unset then, 12 now"]
