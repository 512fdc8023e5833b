"""One look: do the words of all ranks agree, and what is it that does not."""

from __future__ import annotations

from typing import Literal

import torch

from samestep.audit._causes import causes
from samestep.audit._cover import PHASES
from samestep.audit._samples import Held, Samples
from samestep.audit._snapshot import Snapshot
from samestep.audit._verdict import Difference, find
from samestep.errors import SpecError
from samestep.group import Group
from samestep.reduce import gather_parts, reduce

__all__ = ["Moment", "compare"]

Moment = Literal["at start", "after reduction", "after the step"]


def compare(
    snapshot: Snapshot,
    step: int,
    moment: Moment,
    samples: Samples,
    group: Group,
    late: bool,
    distinct: bool,
    couples_decay: bool,
    problem: str,
) -> tuple[int, Difference | None]:
    """Return the common step and the first difference, the same on all ranks.

    Args:
        snapshot: digests of this rank.
        step: as this rank counts.
        moment: when this is.
        samples: what this rank said of its samples.
        group: the workers.
        late: whether this rank took its digests too late to speak for the buffers.
        distinct: whether generators must differ between ranks.
        couples_decay: whether parameters leak into the optimizer state.
        problem: why this rank has no digests, or nothing.

    Raises:
        SpecError: on all ranks, when one has a problem.

    Collective: all ranks of `group`. Constant size while everything agrees and no sample ids were given.
    """
    words = snapshot.words()
    n_ids = 0 if samples.ids is None else len(samples.ids)
    facts = [bool(problem), late, bool(samples.problem), n_ids, step]
    # The lowest word is the complement of the highest complement: one reduction gives both.
    packed = torch.tensor([*facts, *words, *(~word for word in words)], dtype=torch.int64)
    highest = reduce(packed, group, "max").tolist()
    failed, any_late, doubtful, n_longest, step = highest[:5]
    highs, lows = highest[5 : 5 + len(PHASES)], highest[5 + len(PHASES) :]
    if failed:
        text = f"audit: expected tensors to take digests of, got {problem}. Leave it out with watch(per_rank=...)."
        group.agree(not problem, text, SpecError)
    differing = [phase for phase, high, low in zip(PHASES, highs, lows) if high != ~low]
    if any_late and "buffers" in differing:
        differing.remove("buffers")
    if doubtful and (held := samples.report(group)):
        return step, _difference("data", held)
    if n_longest and (held := samples.overlap(n_longest, group)):
        return step, _difference("data", held)
    if distinct:
        if "RNG" in differing:
            differing.remove("RNG")
        if held := _shared_generators(snapshot, group):
            return step, _difference("RNG", held)
    return step, find(snapshot, differing, moment, couples_decay, group) if differing else None


def _difference(phase: str, held: Held) -> Difference:
    rank = min(rank for ranks in held.ranks[held.n_right :] for rank in ranks)
    likely = causes(phase, "")
    return Difference(phase, held.name, rank, held.ranks, held.values, {phase: 1}, likely, _EXPECTED[phase])


_EXPECTED = {"data": "every sample once and on its own rank", "RNG": "no two ranks to draw the same numbers"}


def _shared_generators(snapshot: Snapshot, group: Group) -> Held | None:
    """Return the ranks whose torch generators are in one state."""
    digests = snapshot.digests.get("RNG", {})
    name = next((name for name in digests if name.endswith("generator.cuda")), "generator.torch")
    # The generator that draws the masks: the device's own, where there is one.
    word = torch.tensor([int(digests[name][:15], 16)])
    words = [int(part) for part in gather_parts(word, group)]
    for word_held in words:
        ranks = [rank for rank, other in enumerate(words) if other == word_held]
        if len(ranks) > 1:
            others = [rank for rank in range(group.world_size) if rank not in ranks]
            if others:
                return Held(name, [others, ranks], ["other states", "one state"], 1)
            return Held(name, [ranks], ["one state"], 0)
    return None
