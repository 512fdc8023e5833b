"""What a run shows while it works: a bar on a terminal, plain lines elsewhere, one voice for all workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["Display"]

_PLAIN_SECONDS = 5.0


class Display:
    """Shows progress on the main worker and nothing on the others.

    Args:
        is_main: whether this worker speaks.
        console: where to; standard error by default, so that results can be piped.
    """

    def __init__(self, is_main: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=not is_main)
        self._is_main = is_main
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._title, self._total, self._last = "", 0, 0.0

    def say(self, text: str) -> None:
        """Print a line."""
        if self._is_main:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, title: str, total: int, done: int = 0) -> Iterator[None]:
        """Show progress over `total` units, of which `done` were done before, until the block ends."""
        self._title, self._total, self._last = title, total, time.monotonic()
        if not (self._is_main and self._console.is_terminal):
            self.say(f"{title}: {total} to go" if not done else f"{title}: {done} of {total} done before")
            yield
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        ) as progress:
            self._progress = progress
            self._task = progress.add_task(title, total=total, completed=done, note="")
            try:
                yield
            finally:
                self._progress = None

    def advance(self, done: int, note: str = "") -> None:
        """Say that `done` units of the stage are done."""
        if not self._is_main:
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._last >= _PLAIN_SECONDS or done >= self._total:
            self._last = time.monotonic()
            self.say(f"{self._title}: {done}/{self._total}  {note}")

    def table(self, title: str, rows: Sequence[tuple[str, Any]]) -> None:
        """Print a closing table of names and values."""
        if not self._is_main:
            return
        table = Table(title=title, show_header=False, title_justify="left", min_width=60)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, str(value))
        self._console.print(table)
