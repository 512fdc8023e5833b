"""A file under its final name is complete, and a failure leaves what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.recipes import atomic


def test_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with atomic.replacing(target) as file:
        file.write(b"first half, ")
        file.flush()
        assert not target.exists()
        file.write(b"second half")
    assert target.read_bytes() == b"first half, second half"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_keeps_the_old_file_and_cleans_up(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def write_half() -> None:
        with atomic.replacing(target) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write_half()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic.replacing(tmp_path / "none" / "a"):
        pass
