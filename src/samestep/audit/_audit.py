"""`Audit`: looks every so many updates whether all replicas are the same, and says what is not."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.audit._cover import PHASES, Cover, Rng, unwrapped
from samestep.audit._snapshot import Snapshot, take
from samestep.audit._verdict import Difference, find
from samestep.errors import ReplicaMismatchError, SpecError
from samestep.group import Group
from samestep.reduce import reduce

__all__ = ["Audit"]

Moment = Literal["at start", "after reduction", "after the step"]
_logger = logging.getLogger("samestep.audit")


class Audit:
    """Checks that all replicas are bit for bit the same; never repairs.

    Args:
        group: the workers.
        every: updates between checks; 0 checks only where `check` is called.
        on_disagreement: "raise", or "log" a warning on the main rank and go on.
        log: file that gets one JSON line per check, written by the main rank; its folder is made when needed.

    Raises:
        SpecError: when a setting is out of range.
    """

    def __init__(
        self,
        group: Group,
        every: int = 100,
        on_disagreement: Literal["raise", "log"] = "raise",
        log: Path | str | None = None,
    ) -> None:
        if type(every) is not int or every < 0:
            raise SpecError(f"`every`: expected a whole number of at least 0, got {every!r}.", name="every")
        if on_disagreement not in ("raise", "log"):
            raise SpecError(
                f"`on_disagreement`: expected 'raise' or 'log', got {on_disagreement!r}.",
                name="on_disagreement",
            )
        self.group, self.every = group, every
        self._raises = on_disagreement == "raise"
        self._log = None if log is None else Path(log)
        self._covers: list[Cover] = []
        self._driven = False

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        *,
        per_rank: Sequence[str] = (),
        rng: Rng = "per rank",
    ) -> Audit:
        """Cover a model and what belongs to it, and return the audit."""
        prefix = f"{len(self._covers)}: " if self._covers else ""
        self._covers.append(
            Cover(unwrapped(model), optimizer, scheduler, scaler, loader, tuple(per_rank), rng, prefix)
        )
        return self

    def after_step(self, step: int) -> None:
        """Check after an applied update, when one is due; what TrainStep calls.

        Collective: all ranks of the group, with the same step.
        """
        self._driven = True
        if self.every and step % self.every == 0:
            self._compare(step, "after the step", self._now(gradients=True))

    def check(self, step: int, phase: Moment = "after the step") -> dict[str, Any]:
        """Check now and return the record that goes to the log.

        Collective: all ranks of the group.
        """
        return self._compare(step, phase, self._now(gradients=phase == "after reduction"))

    def _now(self, *, gradients: bool) -> Snapshot:
        snapshot = Snapshot()
        for cover in self._covers:
            snapshot.add(take(cover.state(merged_buffers=self._driven)))
            if gradients:
                snapshot.add(take(cover.gradients()))
        return snapshot

    def _compare(self, step: int, moment: Moment, snapshot: Snapshot) -> dict[str, Any]:
        words = snapshot.words()
        both = torch.tensor([*words, *(~word for word in words)], dtype=torch.int64)
        highest = reduce(both, self.group, "max").tolist()
        n = len(PHASES)
        differing = [phase for i, phase in enumerate(PHASES) if highest[i] != ~highest[n + i]]
        record: dict[str, Any] = {"step": step, "verdict": "agree", "phase": moment}
        difference = None
        if differing:
            couples = any(cover.couples_decay for cover in self._covers)
            difference = find(snapshot, differing, moment, couples, self.group)
            record |= {
                "verdict": "differ",
                "phase": difference.phase,
                "tensor": difference.tensor,
                "ranks": difference.ranks,
                "values": difference.values,
                "differing": difference.differing,
                "causes": difference.causes,
            }
        record |= {"words": snapshot.named_words(), "left_out": snapshot.left_out}
        self._write(record)
        if difference is not None:
            self._tell(difference, step)
        return record

    def _write(self, record: dict[str, Any]) -> None:
        if self._log is None:
            return
        problem = ""
        if self.group.is_main:
            try:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                problem = (
                    f"`log`: expected to write {self._log}, got {error}. Make room, or choose another file."
                )
        self.group.agree(not problem, problem, SpecError)

    def _tell(self, difference: Difference, step: int) -> None:
        sentence = difference.sentence(step)
        if self._raises:
            error = ReplicaMismatchError(sentence, rank=difference.rank, step=step, name=difference.tensor)
            error.common = True
            raise error
        if self.group.is_main:
            _logger.warning("%s", sentence)
