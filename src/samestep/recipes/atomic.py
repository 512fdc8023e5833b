"""Write a file so that it is complete as soon as it has its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["replacing"]


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` when the block ends well, and vanishes when it does not.

    Args:
        path: file to write; replaced if it is there. Its folder must exist.

    Yields:
        A file beside `path`, open for writing.

    Raises:
        OSError: the folder is missing or cannot be written to; `path` is then what it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/a.txt") as file:
        ...         _ = file.write(b"whole")
        ...     Path(folder, "a.txt").read_bytes()
        b'whole'
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name last through a power cut
    finally:
        os.close(folder)
