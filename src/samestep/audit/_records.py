"""What becomes of a verdict: a line in the log, then an error on all ranks or a warning on one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.audit._snapshot import Snapshot
from samestep.audit._verdict import Difference
from samestep.errors import ReplicaMismatchError, SpecError
from samestep.group import Group

__all__ = ["Records"]

_logger = logging.getLogger("samestep.audit")
_MAX_NAMES = 6


class Records:
    """Writes records and raises.

    Args:
        group: the workers.
        log: file for one JSON line per check, a function that gets the record on the main rank, or None.
        raises: whether a difference is an error.
    """

    def __init__(
        self, group: Group, log: Path | Callable[[dict[str, Any]], None] | None, raises: bool
    ) -> None:
        self._group, self._log, self._raises = group, log, raises

    def settle(
        self, step: int, moment: str, snapshot: Snapshot, difference: Difference | None
    ) -> dict[str, Any]:
        """Record a verdict and return the record.

        Raises:
            ReplicaMismatchError: on all ranks, when there is a difference and it is an error.
            SpecError: on all ranks, when the log could not be written.

        Collective: all ranks of the group, with the same difference.
        """
        record: dict[str, Any] = {"step": step, "verdict": "agree", "phase": moment}
        if difference is not None:
            record |= {"verdict": "differ", "phase": difference.phase, **difference.fields()}
        record |= {"words": snapshot.named_words(), "left_out": _short(snapshot.left_out)}
        self._write(record)
        if difference is not None:
            self._tell(difference, step)
        return record

    def _write(self, record: dict[str, Any]) -> None:
        if self._log is None or (callable(self._log) and not self._group.is_main):
            return
        if callable(self._log):
            self._log(record)
            return
        problem = ""
        if self._group.is_main:
            try:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                problem = (
                    f"`log`: expected to write {self._log}, got {error}. Make room, or choose another file."
                )
        self._group.agree(not problem, problem, SpecError)

    def _tell(self, difference: Difference, step: int) -> None:
        sentence = difference.sentence(step)
        if self._raises:
            error = ReplicaMismatchError(sentence, rank=difference.rank, step=step, name=difference.tensor)
            error.common = True
            raise error
        if self._group.is_main:
            _logger.warning("%s", sentence)


def _short(left_out: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the names that are not covered, by reason; the first few of many."""
    return {
        reason: [*names[:_MAX_NAMES], f"and {len(names) - _MAX_NAMES} more"]
        if len(names) > _MAX_NAMES
        else names
        for reason, names in left_out.items()
    }
