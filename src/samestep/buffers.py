"""Buffers that change in the forward, merged over shards so that all replicas hold the same ones.

BatchNorm's running statistics, observers' ranges, EMA codebooks: every shard starts from the values that the
step began with, and what the S shards made of them is merged once, in shard order. The default is the mean over
the shards that had samples; integers (counters) are counted once and flags are or-ed. A module that wants
another rule says so in an attribute, ``buffer_rules = {"cluster_size": ema_sum(0.99), "max_val": "max"}``: a name,
or a function of the value at the start and those of the shards. What is computed from merged buffers, the module
sets anew in a method ``buffers_merged()``.

::

    start ──> shard 0 ──> b0 ┐
    start ──> shard 1 ──> b1 ┼─ start + rule(b - start over shards) ──> all replicas
    start ──> shard 2 ──> b2 ┘

A sum over shards of an exponential average needs care: each shard lets the old value decay. `ema_sum` lets it decay
once, so that eight shards give what one big batch would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.group import Group
from samestep.reduce import gather_parts, reduce
from samestep.sharding import tree_fold

__all__ = ["BufferMerge", "Rule", "ema_sum"]

Rule: TypeAlias = str | Callable[[Tensor, Sequence[Tensor]], Tensor]
_RULES = ("mean", "sum", "max", "min", "once")


def ema_sum(decay: float) -> Rule:
    """Return the rule of a buffer that every shard sets to ``decay * start + (1 - decay) * its own sum``.

    The merged buffer is ``decay * start + (1 - decay) * (sum over all shards)``: what one worker with the whole
    batch would have set. For the cluster sizes and sums of EMA codebooks.

    Args:
        decay: of the average, 0 to 1.

    Example:
        >>> start, shards = torch.tensor(10.0), [torch.tensor(9.0), torch.tensor(9.3)]  # sums 0 and 3
        >>> round(float(ema_sum(0.9)(start, shards)), 4)
        9.3
    """

    def rule(start: Tensor, values: Sequence[Tensor]) -> Tensor:
        return decay * start + tree_fold([value - decay * start for value in values])

    return rule


@dataclass(frozen=True)
class _Slot:
    """One buffer: where it lives, what it is called, how it is merged."""

    module: nn.Module
    key: str
    name: str
    rule: Rule

    @property
    def tensor(self) -> Tensor:
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor


class BufferMerge:
    """Gives every shard the buffers that the step began with, and merges what became of them.

    Args:
        model: its buffers, non-persistent ones too, as they are now.
        group: the workers.

    Raises:
        SpecError: when a module's `buffer_rules` names an unknown rule or buffer.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._model, self._group = model, group
        self._slots: list[_Slot] = []
        self._seen: list[tuple[nn.Module, tuple[str, ...]]] = []  # what the slots were made of
        self._look()
        self._start: list[Tensor] = []
        self._kept: list[dict[int, Tensor]] = []  # of each shard with samples, what it changed

    def begin(self) -> None:
        """Remember the buffers as the step begins."""
        # Modules may register buffers late, in their first forward.
        if any(_held(module) != names for module, names in self._seen):
            self._look()
        self._start = [slot.tensor.clone() for slot in self._slots]
        self._kept = []

    def _look(self) -> None:
        self._slots = _slots(self._model)
        self._seen = [(module, _held(module)) for module in self._model.modules()]

    def restore(self) -> None:
        """Set the buffers to what they were as the step began."""
        with torch.no_grad():
            for slot, start in zip(self._slots, self._start):
                if slot.tensor.shape == start.shape:
                    slot.tensor.copy_(start)
                else:
                    slot.module._buffers[slot.key] = start.clone()

    def after_shard(self) -> None:
        """Keep what the shard, which had samples, made of the buffers.

        Raises:
            SpecError: when it changed the shape or dtype of one.
        """
        changed = {}
        for i, (slot, start) in enumerate(zip(self._slots, self._start)):
            now = slot.tensor
            if now.shape != start.shape or now.dtype != start.dtype:
                raise SpecError(
                    f"buffer `{slot.name}`: expected {tuple(start.shape)} {start.dtype} as the step began, got "
                    f"{tuple(now.shape)} {now.dtype}. Give buffers their shape before TrainStep is made.",
                    name=slot.name,
                )
            # By value: BatchNorm's kernels change the running statistics without raising the tensor's version.
            if not torch.equal(now, start):
                changed[i] = now.clone()
        self._kept.append(changed)

    def rewind(self) -> None:
        """Give up the step: the buffers are as it found them."""
        self.restore()
        self._kept = []

    def merge(self) -> None:
        """Merge the shards' buffers over all workers and set them on every replica.

        Collective: all ranks of the group, when the model has buffers.
        Numerics: order-fixed; means and sums accumulate in float64.
        """
        if not self._slots:
            return
        flags = torch.zeros(len(self._slots), dtype=torch.uint8)
        flags[list({i for changed in self._kept for i in changed})] = 1
        places = [i for i, flag in enumerate(reduce(flags, self._group, "max").tolist()) if flag]
        if not places:
            return
        packed = [
            torch.cat([_wide(changed.get(i, self._start[i])).reshape(-1) for i in places])
            for changed in self._kept
        ]
        shards = _all_shards(packed, sum(_wide(self._start[i]).numel() for i in places), self._group)
        position = 0
        for i in places:
            start = _wide(self._start[i])
            values = [shard[position : position + start.numel()].view(start.shape) for shard in shards]
            position += start.numel()
            merged = _merge(self._slots[i].rule, start, values)
            with torch.no_grad():
                tensor = self._slots[i].tensor
                tensor.copy_(torch.view_as_complex(merged) if tensor.is_complex() else merged)
        for module in self._model.modules():
            recompute = getattr(module, "buffers_merged", None)
            if callable(recompute):
                recompute()


def _held(module: nn.Module) -> tuple[str, ...]:
    return tuple(key for key, tensor in module._buffers.items() if tensor is not None)


def _wide(tensor: Tensor) -> Tensor:
    """Return a buffer's values in float64 on the CPU; complex ones as pairs."""
    plain = tensor.detach().cpu()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).double()


def _slots(model: nn.Module) -> list[_Slot]:
    slots = []
    for prefix, module in model.named_modules():
        rules = getattr(module, "buffer_rules", {})
        unknown = [
            f"{key}={rule}"
            for key, rule in rules.items()
            if key not in module._buffers or not (callable(rule) or rule in _RULES)
        ]
        if unknown:
            raise SpecError(
                f"`buffer_rules` of {prefix or 'the model'}: expected names of its buffers with one of "
                f"{', '.join(_RULES)} or a function, got {', '.join(unknown)}.",
                name=prefix,
            )
        for key, tensor in module._buffers.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                slots.append(_Slot(module, key, name, rules.get(key, _default(tensor))))
    return slots


def _default(tensor: Tensor) -> Rule:
    if tensor.dtype == torch.bool:
        return "max"
    return "mean" if tensor.is_floating_point() or tensor.is_complex() else "once"


def _merge(rule: Rule, start: Tensor, values: Sequence[Tensor]) -> Tensor:
    if callable(rule):
        return rule(start, values)
    if rule == "once":
        return next((value for value in values if not torch.equal(value, start)), start)
    if rule in ("max", "min"):
        stacked = torch.stack(list(values))
        return stacked.amax(0) if rule == "max" else stacked.amin(0)
    # Where all shards agree the value is taken as it is: a mean of equal numbers may round to another one, and
    # the difference of infinities is not a number.
    same = torch.stack([value == start for value in values]).all(0)
    moved = tree_fold([value - start for value in values])
    if rule == "mean":
        moved = moved / len(values)
    return torch.where(same, start, start + moved)


def _all_shards(packed: list[Tensor], size: int, group: Group) -> list[Tensor]:
    """Return every worker's shards that had samples, in shard order."""
    if group.world_size == 1:
        return packed
    counts = torch.zeros(group.world_size, dtype=torch.int64)
    counts[group.rank] = len(packed)
    held = [int(n) for n in reduce(counts, group)]
    mine = torch.zeros(max(held), size, dtype=torch.float64)
    for row, values in enumerate(packed):
        mine[row] = values
    return [part[row] for part, n in zip(gather_parts(mine, group), held) for row in range(n)]
