"""Rows of an .npz archive: those of numpy itself, and a damaged matrix is refused with the file's name."""

from __future__ import annotations

import numpy as np
import pytest

from samestep.errors import SpecError
from samestep.recipes.semantic_ids.archive import Member

ROWS = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_slices_are_those_of_the_matrix(tmp_path, save, order):
    save(tmp_path / "a.npz", ids=np.arange(50), x=np.asarray(ROWS, order=order))
    member = Member(tmp_path / "a.npz", "x")
    for start, stop in ((0, 50), (7, 20), (49, 50), (5, 5)):
        np.testing.assert_array_equal(member[start:stop], ROWS[start:stop])


def test_a_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=ROWS)
    member = Member(path, "x")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"a\.npz"):
        member[:50]
