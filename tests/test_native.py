"""Kernels in C: compiled once, shared by processes, and done without where they cannot be had."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from samestep import native

SOURCE = "int seven(void) { return 7; }"
needs_compiler = pytest.mark.skipif(native._compiler() is None, reason="no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path / "samestep"
    native.load.cache_clear()


@needs_compiler
def test_a_kernel_is_compiled_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.load("seven", SOURCE)
    assert library is not None
    assert library.seven() == 7
    (kept,) = cache.iterdir()
    native.load.cache_clear()
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.load("seven", SOURCE).seven() == 7
    assert list(cache.iterdir()) == [kept]


@needs_compiler
def test_another_source_is_another_file(cache: Path) -> None:
    assert native.load("seven", SOURCE).seven() == 7
    assert native.load("seven", SOURCE.replace("7", "8")).seven() == 8
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_source_that_does_not_compile_is_none_and_leaves_nothing(cache: Path) -> None:
    assert native.load("broken", "int broken(void) {") is None
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_cache_that_others_can_write_is_not_used(cache: Path) -> None:
    cache.mkdir()
    os.chmod(cache, 0o777)
    assert native.load("seven", SOURCE).seven() == 7
    assert list(cache.iterdir()) == []


def test_without_compiler_or_by_request_there_is_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_NATIVE", "0")
    assert native.load("seven", SOURCE) is None
    monkeypatch.delenv("SAMESTEP_NATIVE")
    native.load.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.load("seven", SOURCE) is None
