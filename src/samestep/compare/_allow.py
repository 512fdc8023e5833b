"""The bound of every tensor at every step, from the differences observed so far; derived in `bounds`."""

from __future__ import annotations

import math

from samestep.compare import _bounds
from samestep.compare._pair import Pair

__all__ = ["Allowance"]

_SQUARES = ("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq")
_ROUNDINGS_OF_AN_UPDATE = 4.0  # decay, history, scale, addition: one rounding each


class Allowance:
    """Goes through the steps of a pair in order and says what each tensor is allowed.

    Args:
        pair: two traces.
        n_samples: of the global batch, None when unknown.
    """

    def __init__(self, pair: Pair, n_samples: int | None) -> None:
        self._pair = pair
        dtype = max(pair.a.compute_dtype, pair.b.compute_dtype, key=_bounds.unit_roundoff)
        self.relative = _bounds.rounding(dtype, pair.a.shapes("parameters"), n_samples)
        self.smallest_fault = _bounds.SMALLEST_FAULT if n_samples is None else 1.0 / n_samples
        self._largest = 0.0  # norm of the model's gradient so far, G
        self._moving: set[str] = set()  # parameters whose gradient ever was more than rounding
        self._gaps: dict[str, float] = {}  # observed so far, by <phase>/<name>
        self._most: dict[str, float] = {}  # the largest gradient gap so far, by parameter
        self._update = 0.0  # norm of the last update, U
        self._carried = 0.0  # what differences of the parameters may add to a gradient
        self._kinked = False  # whether a gradient has jumped as at the kink of a ReLU
        self._step = self._before = -1
        self._grown = 0.0  # square of what this step's bounds add to the parameters
        self._seen = 0.0  # square of what this step was seen to add to their differences
        self._narrow = True  # whether even bounds with what is carried are narrower than the smallest fault
        self.judged = True  # whether the bounds that this step needed are narrower than the smallest fault

    def begin(self, step: int, before: int | None) -> None:
        """Go on to a step; `before` is None for the first one."""
        pair, entry = self._pair, self._pair.a.ranks[0][step]
        self._step, self._before = step, -1 if before is None else before
        self._grown = self._seen = 0.0
        if before is None:
            return
        norms = {name: entry.norm("gradients", name) for name in entry.names("gradients")}
        now = math.sqrt(sum(n * n for n in norms.values()))
        self._largest = max(self._largest, now)
        parted = math.sqrt(sum(self._gaps.get(f"parameters/{name}", 0.0) ** 2 for name in self._moving))
        factor = _bounds.amplification(max(entry.momentum, pair.b.ranks[0][step].momentum))
        self._carried = 0.0
        if parted:
            self._carried = factor * self._largest * parted / self._update if self._update else math.inf
        self._moving |= {name for name, n in norms.items() if n > self.relative * self._largest}
        fresh, fault = self.relative * self._largest, self.smallest_fault * now
        self.judged = not self._kinked and fresh <= fault
        self._narrow = fresh + self._carried <= fault
        updates = [pair.update(name, before, step) for name in entry.names("parameters")]
        self._update = math.sqrt(sum(u * u for u in updates))

    @property
    def update_judged(self) -> bool:
        """Whether this step's update, by its bound or by twice what was seen, cannot hide the smallest fault."""
        most = math.sqrt(min(self._grown, 4 * self._seen))
        return self.judged and most <= self.smallest_fault * self._update

    def observe(self, phase: str, name: str, gap: float) -> None:
        """Take note of a difference that was found."""
        if phase == "parameters" and name in self._moving:
            self._seen += max(0.0, gap - self._gap(phase, name)) ** 2
        self._gaps[f"{phase}/{name}"] = gap
        if phase == "gradients":
            self._most[name] = max(self._most.get(name, 0.0), gap)

    def of(self, phase: str, name: str, gap: float) -> float:
        """Return the largest distance that rounding explains; 0 where the same bits are right.

        Args:
            phase: of the tensor.
            name: of the tensor.
            gap: what was found; a jump as at a kink ends the judging of this step and those after it.
        """
        if self._before < 0 or phase == "options":
            return 0.0
        if not self._unit(phase, name):
            return 0.0
        if phase == "gradients":
            fresh = self.relative * self._largest
            if gap <= fresh and not self._kinked:
                return fresh
            self.judged = self.judged and self._narrow
            smooth = fresh + self._carried
            share = self.smallest_fault * self._largest
            if self._carried and smooth < gap <= share:
                self._kinked, self.judged = True, False
            return math.inf if self._kinked else smooth
        if self._kinked:
            return math.inf
        if phase == "parameters":
            return self._of_parameter(name)
        return self._of_state(name) if phase == "optimizer" else self._of_buffer(name)

    def _unit(self, phase: str, name: str) -> float:
        return _bounds.unit_roundoff(self._pair.a.dtype(phase, name))

    def _gap(self, phase: str, name: str) -> float:
        return self._gaps.get(f"{phase}/{name}", 0.0)

    def _decay(self) -> float:
        """Return the largest weight decay of the param groups."""
        entry = self._pair.a.ranks[0][self._step]
        names = [name for name in entry.names("options") if name.endswith(".weight_decay")]
        return max((entry.norm("options", name) for name in names), default=0.0)

    def _of_state(self, name: str) -> float:
        parameter, key = name.rsplit(".", 1)
        size = self._pair.norm("optimizer", name, self._step)
        own = self._gap("optimizer", name) + _ROUNDINGS_OF_AN_UPDATE * self._unit("optimizer", name) * size
        parted = self._gap("gradients", parameter) + self._decay() * self._gap("parameters", parameter)
        if key in _SQUARES:
            gradient = self._pair.norm("gradients", parameter, self._step)
            return own + (2 * gradient + parted) * parted
        return own + parted

    def _of_parameter(self, name: str) -> float:
        pair, step, before = self._pair, self._step, self._before
        size = pair.norm("parameters", name, step)
        ours, theirs = (pair.update(name, before, step, other=other) for other in (False, True))
        last = self._gap("parameters", name)
        entry = pair.a.ranks[0][step]
        rounding = _ROUNDINGS_OF_AN_UPDATE * self._unit("parameters", name) * (size + ours)
        kept = {key.rsplit(".", 1)[1] for key in entry.names("optimizer") if key.rsplit(".", 1)[0] == name}
        if name in entry.spread:
            noise = self.relative * self._largest
            worse = max(1.0, self._most.get(name, 0.0) / noise) if noise else 1.0
            moved = entry.spread[name] * worse
        elif kept <= {"momentum_buffer"} and entry.lr:
            history = self._gap("optimizer", f"{name}.momentum_buffer")
            moved = entry.lr * (self._gap("gradients", name) + history)
        else:
            moved = math.inf  # an optimizer that we know nothing of
        moved = min(moved, ours + theirs) + entry.lr * self._decay() * last
        fresh = moved + rounding
        if name in self._moving:
            self._grown += fresh**2
        return last + fresh

    def _of_buffer(self, name: str) -> float:
        # Statistics of activations: like gradients, they carry the rounding of what surrounds them.
        entry = self._pair.a.ranks[0][self._step]
        sizes = [entry.norm("buffers", n) for n in entry.names("buffers") if self._unit("buffers", n)]
        carried = self._carried / self._largest if self._largest else 0.0
        return self._gap("buffers", name) + (self.relative + carried) * math.sqrt(sum(s * s for s in sizes))
