"""`Audit`: looks every so many updates whether all replicas are the same, and says what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.audit._clock import Clock
from samestep.audit._compare import Moment, compare
from samestep.audit._cover import Cover, Rng, State, unwrapped
from samestep.audit._records import Records
from samestep.audit._samples import Samples
from samestep.audit._snapshot import Snapshot, take
from samestep.errors import SpecError
from samestep.group import Group
from samestep.scheduler import LRScheduler
from samestep.sharding import Shard

__all__ = ["Audit"]


class Audit:
    """Checks that all replicas are bit for bit the same, and names the first tensor that is not. Never repairs.

    Covered: parameters, buffers, gradients after reduction, optimizer state, LR and other options, scheduler,
    GradScaler, generators (by policy), the number of updates, the loader's position, sample ids. A check reduces
    one word per kind over the workers, whatever their number; digests travel only once something differs.

    Two lines attach it to a DDP program that keeps its own loop::

        audit = Audit(group, every=100, log="audit.jsonl")
        audit.watch(ddp_model, optimizer, scheduler=scheduler)

    The first check comes before the first update. With DDP, the passes that reduce gradients are counted and a
    check comes at the beginning of one, on the state that it starts from; call `check` once more at the end of
    the run. Given to TrainStep (``audit=``), it checks right after the update instead.

    Args:
        group: the workers.
        every: updates between checks; 0 checks only where `check` is called.
        on_disagreement: "raise", or "log" a warning on the main rank (logger ``samestep.audit``) and go on.
        log: file that gets one JSON line per check, written by the main rank, its folder made when needed; or a
            function that gets the record there, and does not fail.

    Raises:
        SpecError: when a setting is out of range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> audit = Audit(Group.single()).watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> audit.check(0, "at start")["verdict"]
        'agree'
    """

    def __init__(
        self,
        group: Group,
        every: int = 100,
        on_disagreement: Literal["raise", "log"] = "raise",
        log: Path | str | Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if type(every) is not int or every < 0:
            raise SpecError(
                f"`every`: expected a whole number of at least 0, got {every!r}. 0 checks on demand.",
                name="every",
            )
        if on_disagreement not in ("raise", "log"):
            raise SpecError(
                f"`on_disagreement`: expected 'raise' or 'log', got {on_disagreement!r}. Choose one.",
                name="on_disagreement",
            )
        self.group, self.every = group, every
        target = log if log is None or callable(log) else Path(log)
        self._records = Records(group, target, on_disagreement == "raise")
        self._covers: list[Cover] = []
        self._clocks: list[Clock] = []
        self._samples = Samples()
        self._driven = False  # whether TrainStep says when
        self._ticks = 0
        self._pending: Snapshot | None = None  # the state as a step began
        self._gradients = Snapshot()
        self._problem = ""

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
        """Cover a model and what belongs to it, and look by itself from now on.

        Args:
            model: a DDP model, or a plain one whose gradients are reduced some other way.
            optimizer: its updates are counted, whoever calls it.
            scheduler: anything with a `state_dict` that should be equal on all ranks.
            scaler: torch's GradScaler.
            loader: a `ShardLoader` or `StreamLoader`, whose position must agree; of torch's DataLoader, the length
                and the sampler's epoch and seed.
            per_rank: patterns (as in `fnmatch`) of names that may differ, such as "*.observer.*"; records list
                what they leave out. BatchNorm's statistics are left out by themselves unless TrainStep merges them.
            rng: "per rank" leaves the global generators alone; "same" wants equal ones, "distinct" wants no two
                ranks to draw the same numbers (dropout masks).

        Returns:
            The audit. Further models (a discriminator, a teacher) may be watched too; the first sets the pace.

        Raises:
            SpecError: when `rng` is unknown.

        Collective: all ranks of the group watch the same things in the same order.
        """
        if rng not in ("per rank", "same", "distinct"):
            raise SpecError(
                f"`rng`: expected 'per rank', 'same' or 'distinct', got {rng!r}. Choose one.", name="rng"
            )
        inner = getattr(optimizer, "optimizer", None)  # Lightning's and Accelerate's wrappers are not hooked
        if isinstance(inner, Optimizer):
            optimizer = inner
        prefix = f"{len(self._covers)}:" if self._covers else ""
        patterns = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
        cover = Cover(unwrapped(model), optimizer, scheduler, scaler, loader, patterns, rng, prefix)
        self._covers.append(cover)
        self._clocks.append(Clock(model, cover, self, leads=len(self._covers) == 1))
        return self

    def detach(self) -> None:
        """Listen to the watched models and optimizers no longer; `check` and `after_step` still work."""
        for clock in self._clocks:
            clock.stop()

    def samples(
        self,
        ids: Sequence[Shard] | Tensor | Iterable[int],
        *,
        expected: Tensor | Iterable[int] | None = None,
        whole: Tensor | Iterable[int] | None = None,
        count: float | None = None,
        expected_count: float | None = None,
    ) -> None:
        """Say which samples this rank reads in the step to come; the next check reports what is wrong with them.

        No sample may be read twice in a step. Shards of a watched `ShardLoader` must hold the very samples that its
        seed, epoch and position give; a wrong one is remembered until the next check, whichever step it was in.

        Args:
            ids: this rank's shards as the loader gave them, or sample ids >= 0.
            expected: ids that this rank should read, in order; known by itself for a watched `ShardLoader`.
            whole: ids of the whole global batch; one that no rank reads is reported.
            count: samples or tokens that this rank puts behind its loss sum.
            expected_count: how many its data hold; the number of ids when None.
        """
        loader = next((c.loader for c in self._covers if c.loader is not None), None)
        self._samples.note(ids, expected, whole, count, expected_count, loader)

    def check(self, step: int, phase: Moment = "after the step") -> dict[str, Any]:
        """Check now.

        Args:
            step: updates applied so far.
            phase: when this is: "at start", "after reduction" (between backward and update; covers the gradients)
                or "after the step".

        Returns:
            The record that goes to the log: step, verdict ("agree" or "differ"), phase, words, left_out; on a
            difference also tensor, ranks (sets by value, the largest first), values, differing, causes.

        Raises:
            ReplicaMismatchError: on all ranks, when replicas differ and `on_disagreement` is "raise".
            SpecError: on all ranks, when one could not read its state or write the log.
            WorkerError: when a worker is gone.

        Collective: all ranks of the group.
        """
        return self._look(step, phase, self._now(gradients=phase == "after reduction"))

    def after_step(self, step: int) -> None:
        """Check after an applied update, when one is due. TrainStep calls this; the audit then listens to it alone.

        Args:
            step: updates applied so far, this one included.

        Raises:
            ReplicaMismatchError: as for `check`, and its other errors.

        Collective: all ranks of the group.
        """
        self._driven = True
        self._pending = None
        if self.every and step % self.every == 0:
            self._look(step, "after the step", self._now(gradients=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of applied updates, as JSON data."""
        return {"updates": [cover.updates for cover in self._covers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a saved state."""
        for cover, updates in zip(self._covers, state["updates"], strict=True):
            cover.updates = int(updates)

    # What the clock asks for -----------------------------------------------------------------------------------

    def due(self) -> bool:
        """Return whether the next tick of the clock looks."""
        return not self._driven and self.every > 0 and self._ticks % self.every == 0

    def prepare(self) -> None:
        """Take the digests of the state as it is now, for the next tick."""
        self._pending = self._now(gradients=False)

    def remember_gradients(self, cover: Cover) -> None:
        """Take the digests of the gradients of the update that was just applied, for the next tick."""
        self._gradients.add(self._taken(cover.gradients))

    def tick(self, in_update: bool) -> None:
        """Count one common moment of all ranks, and look when it is time.

        Args:
            in_update: whether the gradients that are there are about to be applied; buffers have moved on then.

        Collective: all ranks of the group.
        """
        due, first = self.due(), self._ticks == 0
        self._ticks += 1
        if not due:
            return
        late = in_update and self._pending is None
        snapshot = self._pending or self._now(gradients=in_update)
        if not in_update:
            snapshot.add(self._gradients)
        elif not late:
            for cover in self._covers:
                snapshot.add(self._taken(cover.gradients))
        self._pending, self._gradients = None, Snapshot()
        cover = self._covers[0]
        ours = isinstance(cover.scheduler, LRScheduler)
        step = cover.scheduler.applied_steps if ours else cover.updates
        self._look(step, "at start" if first and not cover.updates else "after the step", snapshot, late)

    # ----------------------------------------------------------------------------------------------------------

    def _now(self, *, gradients: bool) -> Snapshot:
        return self._taken(partial(self._state, gradients))

    def _state(self, gradients: bool) -> State:
        state = State()
        for cover in self._covers:
            state.add(cover.state(merged_buffers=self._driven))
            if gradients:
                state.add(cover.gradients())
        return state

    def _taken(self, state: Callable[[], State]) -> Snapshot:
        try:
            return take(state())
        except Exception as error:  # told to all ranks at the next look, so that none waits for this one
            self._problem = f"{type(error).__name__}: {error}"
            return Snapshot()

    def _look(self, step: int, moment: Moment, snapshot: Snapshot, late: bool = False) -> dict[str, Any]:
        snapshot.number("step count", "step", step)
        problem, self._problem = self._problem, ""
        distinct = any(cover.rng == "distinct" for cover in self._covers)
        couples = any(cover.couples_decay for cover in self._covers)
        try:
            step, difference = compare(
                snapshot, step, moment, self._samples, self.group, late, distinct, couples, problem
            )
        finally:
            self._samples.clear()
        return self._records.settle(step, moment, snapshot, difference)
