"""Buffers that change in the forward, merged over shards so that all replicas hold the same ones.

BatchNorm's running statistics, observers' ranges, EMA codebooks: every shard starts from the values that the
step began with, and what the S shards made of them is merged once, in shard order. The default is the mean over
the shards that had samples; integers (counters) are counted once and flags are or-ed. A module that wants another
rule says so in an attribute: ``buffer_rules = {"cluster_sum": "sum", "max_val": "max"}``.

::

    start ──> shard 0 ──> b0 ┐
    start ──> shard 1 ──> b1 ┼─ start + rule(b - start over shards) ──> all replicas
    start ──> shard 2 ──> b2 ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.group import Group
from samestep.reduce import gather_parts, reduce
from samestep.sharding import tree_fold

__all__ = ["BufferMerge", "Rule"]

Rule = Literal["mean", "sum", "max", "min", "once", "own"]
_RULES = ("mean", "sum", "max", "min", "once", "own")


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
        self._group = group
        self._slots = _slots(model)
        self._start: list[Tensor] = []
        self._kept: list[list[Tensor]] = []
        self._changed: set[int] = set()

    def begin(self) -> None:
        """Remember the buffers as the step begins."""
        self._start = [slot.tensor.clone() for slot in self._slots]
        self._kept, self._changed = [], set()

    def before_shard(self) -> None:
        """Put back what an earlier shard of this worker changed."""
        self._restore()

    def after_shard(self) -> None:
        """Keep what the shard, which had samples, made of the buffers."""
        # By value: BatchNorm's kernels change the running statistics without raising the tensor's version.
        self._changed |= {
            i for i, slot in enumerate(self._slots) if not torch.equal(slot.tensor, self._start[i])
        }
        if self._slots:
            self._kept.append([slot.tensor.clone() for slot in self._slots])

    def rewind(self) -> None:
        """Give up the step: the buffers are as it found them."""
        self._restore()
        self._kept = []

    def merge(self) -> None:
        """Merge the shards' buffers over all workers and set them on every replica.

        Collective: all ranks of the group, when the model has buffers.
        Numerics: order-fixed; means and sums accumulate in float64.
        """
        if not self._slots:
            return
        flags = torch.zeros(len(self._slots), dtype=torch.uint8)
        flags[list(self._changed)] = 1
        places = [i for i, flag in enumerate(reduce(flags, self._group, "max").tolist()) if flag]
        places = [i for i in places if self._slots[i].rule != "own"]
        if not places:
            return
        packed = [torch.cat([_wide(kept[i]).reshape(-1) for i in places]) for kept in self._kept]
        shards = _all_shards(packed, sum(_wide(self._start[i]).numel() for i in places), self._group)
        position = 0
        for i in places:
            start = _wide(self._start[i])
            size = start.numel()
            values = [shard[position : position + size].view(start.shape) for shard in shards]
            merged = _merge(self._slots[i].rule, start, values)
            with torch.no_grad():
                tensor = self._slots[i].tensor
                tensor.copy_(torch.view_as_complex(merged) if tensor.is_complex() else merged)
            position += size

    def _restore(self) -> None:
        with torch.no_grad():
            for i in self._changed:
                if self._slots[i].rule != "own":
                    self._slots[i].tensor.copy_(self._start[i])


def _wide(tensor: Tensor) -> Tensor:
    """Return a buffer's values in float64 on the CPU; complex ones as pairs."""
    plain = tensor.detach().cpu()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).double()


def _slots(model: nn.Module) -> list[_Slot]:
    slots = []
    for prefix, module in model.named_modules():
        rules = getattr(module, "buffer_rules", {})
        unknown = [
            f"{key}={rule}" for key, rule in rules.items() if rule not in _RULES or key not in module._buffers
        ]
        if unknown:
            raise SpecError(
                f"`buffer_rules` of {prefix or 'the model'}: expected names of its buffers with one of "
                f"{', '.join(_RULES)}, got {', '.join(unknown)}.",
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
    if rule == "once":
        return values[0]
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
