"""Small C kernels, compiled on first use; whoever asks for one also has a way without it.

::

    source ── compiler of this machine ──> <cache>/samestep/<name>-<digest of source and flags>.so ──> ctypes

A machine without a compiler, with a cache that cannot be written, or with ``SAMESTEP_NATIVE=0`` in its environment
gets None. A kernel must give the same bits as the way in torch: it may change how long something takes, no result.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["load"]

_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-shared", "-fPIC", "-pthread")
_LIMIT_SECONDS = 60.0


@functools.cache
def load(name: str, source: str, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library made of a C source, or None where it cannot be had.

    It is compiled once per machine and kept in ``$XDG_CACHE_HOME/samestep`` (else ``~/.cache/samestep``), if that
    folder belongs to this user alone; otherwise it is compiled for this process. Several processes may ask at the
    same time. Why there is none is said at level DEBUG.

    Args:
        name: of the file, for people.
        source: text in C; asks at run time which instructions the processor has.
        flags: a tuple, in addition to ``-O3``.

    Example:
        >>> library = load("one", "int one(void) { return 1; }")
        >>> library is None or library.one() == 1
        True
    """
    compiler = _compiler()
    if os.environ.get("SAMESTEP_NATIVE") == "0" or compiler is None:
        return None
    options = [*_FLAGS, *flags]
    text = "\0".join([source, *options, compiler, platform.machine()])
    file_name = f"{name}-{hashlib.blake2b(text.encode(), digest_size=10).hexdigest()}.so"
    try:
        if (folder := _cache()) is not None:
            return _loaded(folder / file_name, source, [compiler, *options])
        with tempfile.TemporaryDirectory() as own:
            return _loaded(Path(own) / file_name, source, [compiler, *options])
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("no native %s: %s", name, error)
        return None


def _compiler() -> str | None:
    if os.name != "posix":
        return None
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _cache() -> Path | None:
    """Return the folder of compiled kernels, if nobody else can put a library there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
    except OSError:
        return None
    is_own = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    return folder if is_own and os.access(folder, os.W_OK) else None


def _loaded(path: Path, source: str, command: list[str]) -> ctypes.CDLL:
    if not path.exists():
        # Under a name of its own until it is whole: another process may be loading the file already.
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            made = Path(aside) / path.name
            subprocess.run(
                [*command, "-x", "c", "-", "-o", str(made)],
                input=source.encode(),
                capture_output=True,
                check=True,
                timeout=_LIMIT_SECONDS,
            )
            os.replace(made, path)
    return ctypes.CDLL(str(path))
