"""From the digests of all ranks to a sentence: which tensor, which phase, which ranks, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.audit._causes import causes
from samestep.audit._cover import PHASES
from samestep.audit._snapshot import Snapshot
from samestep.group import Group

__all__ = ["Difference", "find", "numbers"]

_ABSENT = ["", "absent"]


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs.

    Attributes:
        phase: where in a step, such as "parameters after the step".
        tensor: its name.
        rank: the first rank outside the majority.
        ranks: sets of ranks that hold the same value, the largest set first.
        values: what each set holds: a number, or the first digits of a digest.
        differing: how many tensors differ, by phase.
        causes: likely ones, most likely first.
        expected: what should have been, in words.
    """

    phase: str
    tensor: str
    rank: int
    ranks: list[list[int]]
    values: list[str]
    differing: dict[str, int]
    causes: list[str]
    expected: str = "the same on all workers"

    def fields(self) -> dict[str, Any]:
        """Return what a record says of it, as JSON data."""
        return {
            "tensor": self.tensor,
            "ranks": self.ranks,
            "values": self.values,
            "differing": self.differing,
            "causes": self.causes,
        }

    def sentence(self, step: int) -> str:
        """Return what was found, where, and what to look at."""
        world_size = sum(map(len, self.ranks))
        held = "; ".join(f"{numbers(r)} of {world_size}: {v}" for r, v in zip(self.ranks, self.values))
        total = sum(self.differing.values())
        others = "" if total == 1 else f" {total} differ in all: {_counted(self.differing)}."
        tie = len(self.ranks) > 1 and len(self.ranks[0]) == len(self.ranks[1])
        doubt = " No majority tells which is right." if tie and self.phase not in ("data", "RNG") else ""
        return (
            f"`{self.tensor}` ({self.phase}, step {step}): expected {self.expected}, got {held}.{doubt}{others} "
            f"Look at the likely causes: {'; or '.join(self.causes)}."
        )


def numbers(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    Example:
        >>> numbers([0, 2, 3]), numbers([1])
        ('ranks 0, 2, 3', 'rank 1')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def find(
    snapshot: Snapshot, phases: Sequence[str], moment: str, couples_decay: bool, group: Group
) -> Difference:
    """Gather the digests of the phases that differ and name the first tensor.

    Args:
        snapshot: of this rank.
        phases: those whose words differ, the same on all ranks.
        moment: when the audit looked.
        couples_decay: whether parameters leak into the optimizer state.
        group: the workers.

    Collective: all ranks of `group`.
    """
    mine = {"phases": {phase: snapshot.readable(phase) for phase in phases}, "couples": couples_decay}
    ranks = [json.loads(text) for text in group.gather_text(json.dumps(mine))]
    differing = {
        phase: names for phase in phases if (names := _names([rank["phases"][phase] for rank in ranks]))
    }
    first = _first(list(differing), any(rank["couples"] for rank in ranks))
    tensor = differing[first][0]
    sets = _sets([rank["phases"][first].get(tensor, _ABSENT) for rank in ranks])
    return Difference(
        phase=shown(first, moment),
        tensor=tensor,
        rank=min(rank for members, _ in sets[1:] for rank in members),
        ranks=[members for members, _ in sets],
        values=[value for _, value in sets],
        differing={shown(phase, moment): len(names) for phase, names in differing.items()},
        causes=causes(first, moment),
    )


def shown(phase: str, moment: str) -> str:
    """Return a phase as records name it."""
    if phase == "gradients":
        return "gradients after reduction"
    return f"parameters {moment}" if phase == "parameters" else phase


def _names(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names that differ, in the first rank's order, then those that only others have."""
    every = dict.fromkeys(name for rank in ranks for name in rank)
    return [name for name in every if len({rank.get(name, _ABSENT)[0] for rank in ranks}) > 1]


def _first(phases: Sequence[str], couples_decay: bool) -> str:
    order = list(PHASES)
    if couples_decay and "parameters" in phases:
        # A changed parameter reaches its own moment through the decay; the other way round is the rule otherwise.
        order.remove("parameters")
        order.insert(order.index("optimizer state"), "parameters")
    return min(phases, key=order.index)


def _sets(held: Sequence[Sequence[str]]) -> list[tuple[list[int], str]]:
    """Return the ranks by value with the value's readable form, the largest set first."""
    by_digest: dict[str, tuple[list[int], str]] = {}
    for rank, (digest, value) in enumerate(held):
        by_digest.setdefault(digest, ([], value))[0].append(rank)
    return sorted(by_digest.values(), key=lambda one: (-len(one[0]), one[0][0]))


def _counted(differing: Mapping[str, int]) -> str:
    return ", ".join(f"{n} of {phase}" for phase, n in differing.items())
