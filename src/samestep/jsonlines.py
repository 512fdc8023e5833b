"""JSON lines as runs write them, of which a kill or a full disk may have damaged some."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Lines", "json_lines"]

_NAMED_LINES = 8


@dataclass
class Lines:
    """What a file of JSON lines holds.

    Attributes:
        entries: the good ones, in the order of the file.
        damaged: numbers of the others, from 1.
        n_lines: good and damaged ones; empty lines do not count.
        cut: whether the only damaged one is an unfinished last line, as after a kill.
        problem: why the file cannot be read at all; empty where it can, or is not there.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    n_lines: int = 0
    cut: bool = False
    problem: str = ""

    def where(self) -> str:
        """Return the damaged lines in words, the first eight by number.

        Example:
            >>> Lines(damaged=[3, 5]).where()
            'lines 3, 5'
        """
        named = ", ".join(map(str, self.damaged[:_NAMED_LINES]))
        more = ", ..." if len(self.damaged) > _NAMED_LINES else ""
        return f"{'line' if len(self.damaged) == 1 else 'lines'} {named}{more}"


def json_lines(path: Path, fits: Callable[[dict[str, Any]], bool]) -> Lines:
    """Return the JSON objects of a file that are as they should be, and which lines are not.

    Args:
        path: of the file; one that is not there has no lines.
        fits: whether an object is as it should be.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = Path(folder.name, "log.jsonl")
        >>> _ = file.write_text('{"step": 1}\\nno\\n{"st')
        >>> found = json_lines(file, lambda entry: "step" in entry)
        >>> found.entries, found.damaged
        ([{'step': 1}], [2, 3])
        >>> folder.cleanup()
    """
    found = Lines()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return found
    except OSError as error:
        found.problem = error.strerror or str(error)
        return found
    number = 0
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        found.n_lines += 1
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and fits(entry):
            found.entries.append(entry)
        else:
            found.damaged.append(number)
    # Behind a last line that is whole, an empty one follows.
    found.cut = found.damaged == [number] and not raw.endswith(b"\n")
    return found
