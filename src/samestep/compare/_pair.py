"""Two traces side by side: which ranks are compared, and how far their tensors are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samestep.compare import _sketch
from samestep.compare._trace import Entry, Trace

__all__ = ["Pair", "ulps_between"]

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pair:
    """Two traces, aligned by step, phase and tensor name.

    Workers are compared one by one when both runs have as many; otherwise all of the second with rank 0 of the
    first.

    Args:
        a: the reference.
        b: the other.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.steps = sorted(set(a.ranks[0]) & set(b.ranks[0]))
        same = a.world_size == b.world_size
        self.ranks = [(rank if same else 0, rank) for rank in range(b.world_size)]

    def names(self, phase: str, step: int) -> list[str]:
        """Return the tensors of a phase: the reference's in its order, then what only the other has."""
        found = dict.fromkeys(self.a.ranks[0][step].names(phase))
        return list(found | dict.fromkeys(self.b.ranks[0][step].names(phase)))

    def norm(self, phase: str, name: str, step: int) -> float:
        """Return the norm of the reference's tensor, 0 when it has none."""
        entry = self.a.ranks[0][step]
        return entry.norm(phase, name) if name in entry.marks.get(phase, {}) else 0.0

    def gap(self, phase: str, name: str, step: int) -> tuple[float, list[int]]:
        """Return the largest distance over the ranks, and the ranks of the second run whose bits differ.

        The distance is infinite when a tensor is missing, has another shape or is not finite.
        """
        worst, ranks = 0.0, []
        seen: dict[tuple[int, str], float] = {}
        for rank_a, rank_b in self.ranks:
            left, right = self.a.ranks[rank_a][step], self.b.ranks[rank_b][step]
            key = (rank_a, right.marks.get(phase, {}).get(name, ("", ""))[0])
            if key not in seen:
                seen[key] = self._distance(phase, name, left, right)
            if seen[key] != 0.0:
                ranks.append(rank_b)
                worst = max(worst, seen[key])
        return worst, ranks

    def _distance(self, phase: str, name: str, left: Entry, right: Entry) -> float:
        if name not in left.marks.get(phase, {}) or name not in right.marks.get(phase, {}):
            return math.inf
        if left.digest(phase, name) == right.digest(phase, name):
            return 0.0
        key = f"{phase}/{name}"
        if self.a.kinds[key] != self.b.kinds[key]:
            return math.inf
        if key in left.tensors and key in right.tensors:
            found = float((left.tensors[key].double() - right.tensors[key].double()).norm())
        else:
            found = _sketch.distance(left.sketch(phase, name), right.sketch(phase, name))
        # Different bits of equal values, -0.0 and 0.0, are a difference of the smallest size.
        return math.inf if math.isnan(found) else max(found, 5e-324)

    def update(self, name: str, before: int, step: int, *, other: bool = False) -> float:
        """Return the norm of a parameter's change between two steps, in the reference or the other run."""
        entries = (self.b if other else self.a).ranks[0]
        if any(name not in entries[t].marks.get("parameters", {}) for t in (before, step)):
            return 0.0
        return _sketch.distance(
            entries[before].sketch("parameters", name), entries[step].sketch("parameters", name)
        )

    def factor(self, phase: str, name: str, before: int | None, step: int, rank: int) -> float | None:
        """Return f when the other's tensor (or its change since `before`) is f times the reference's."""
        rank_a = rank if self.a.world_size == self.b.world_size else 0
        rows = []
        for entries in (self.a.ranks[rank_a], self.b.ranks[rank]):
            if name not in entries[step].marks.get(phase, {}):
                return None
            row = entries[step].sketch(phase, name)[: _sketch.WIDTH]
            if before is not None:
                row = row - entries[before].sketch(phase, name)[: _sketch.WIDTH]
            rows.append(row)
        left, right = rows
        if not left.any():
            return None
        ratio = float(left @ right) / float(left @ left)
        rest = math.sqrt(float(((right - ratio * left) ** 2).sum()))
        fits = rest <= 1e-3 * math.sqrt(float(right @ right)) and abs(ratio - 1) > 1e-2
        return ratio if fits else None

    def ulps(self, phase: str, name: str, step: int, rank: int) -> int | None:
        """Return the largest distance of two elements in ulps, None when whole tensors were not kept."""
        rank_a = rank if self.a.world_size == self.b.world_size else 0
        key = f"{phase}/{name}"
        left = self.a.ranks[rank_a][step].tensors.get(key)
        right = self.b.ranks[rank][step].tensors.get(key)
        return None if left is None or right is None else ulps_between(left, right)


def ulps_between(a: Tensor, b: Tensor) -> int | None:
    """Return the largest distance of two elements, counted in numbers of their dtype; None where that says nothing.

    Args:
        a: any shape.
        b: the same shape and dtype.

    Example:
        >>> import torch
        >>> ulps_between(torch.tensor([1.0]), torch.tensor([1.0 + 2**-22]))
        2
    """
    if a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return None
    if not (a.isfinite().all() and b.isfinite().all()) or a.element_size() not in _INTEGERS:
        return None
    sides = []
    for side in (a, b):
        bits = side.contiguous().view(_INTEGERS[a.element_size()]).long()
        # Below zero, larger bits mean smaller numbers.
        low = -(2 ** (8 * a.element_size() - 1))
        sides.append(torch.where(bits < 0, low - bits, bits))
    gaps = sides[0].double() - sides[1].double() if a.element_size() == 8 else sides[0] - sides[1]
    return int(gaps.abs().max())
