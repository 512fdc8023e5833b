"""What the shards of one step came to, on all workers: counts, loss sums, further sums, and who failed.

One small all-gather per step, issued before the only backward that communicates, so that a worker whose loss
function raised is known to all while nobody waits for it. Everything is float64 and is added along the shard
tree, so the totals have the same bits for any number of workers.

::

    rank 0: [header | shard 0: count, loss, ... | shard 1: ...] ─┐
    rank 1: [header | shard 2: count, loss, ... | shard 3: ...] ─┴─> all workers: totals, or one error
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from samestep.errors import AgreementError
from samestep.group import Group
from samestep.sharding import tree_fold

__all__ = ["Row", "Tally", "Totals"]

_HEADER = 2  # rows that follow, and whether the long form is needed


@dataclass(frozen=True)
class Row:
    """Figures of one shard: `count` samples or tokens, the `loss` sum over them, further sums by name."""

    count: float
    loss: float
    sums: Mapping[str, float]


@dataclass(frozen=True)
class Totals:
    """Figures of the global batch, equal on all workers.

    Attributes:
        count: samples or tokens.
        loss: sum over them.
        sums: further sums by name.
        n_filled: shards with count > 0.
        rows: every shard's figures, in shard order.
        notes: what each worker had to say beside its figures, by rank; empty strings when nobody did.
    """

    count: float
    loss: float
    sums: dict[str, float]
    n_filled: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


class Tally:
    """Exchanges figures between the workers of `group`, once per step.

    Args:
        group: the workers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        # What the short form has room for; the first step, and any step that needs more, uses the long form.
        self._n_rows = 0
        self._names: tuple[str, ...] = ()

    def exchange(self, rows: Sequence[Row], failure: str = "", note: str = "") -> Totals:
        """Return the totals over all workers.

        Args:
            rows: this worker's shards, in shard order.
            failure: what went wrong on this worker, if anything; `rows` are then not read.
            note: text for all workers, rarely: it takes the long form.

        Raises:
            AgreementError: on all workers, when one of them failed; names the ranks and what they said.

        Collective: all ranks of the group.
        Numerics: order-fixed; float64.
        """
        if self._group.world_size == 1:
            everything = [(rows, note)]
            if failure:
                raise AgreementError(failure, rank=0)
        else:
            everything = self._gather(rows, failure, note)
        merged = tuple(row for part, _ in everything for row in part)
        names = sorted({name for row in merged for name in row.sums})
        return Totals(
            count=tree_fold([row.count for row in merged]) if merged else 0.0,
            loss=tree_fold([row.loss for row in merged]) if merged else 0.0,
            sums={name: tree_fold([row.sums.get(name, 0.0) for row in merged]) for name in names},
            n_filled=sum(row.count > 0 for row in merged),
            rows=merged,
            notes=tuple(text for _, text in everything),
        )

    def _gather(self, rows: Sequence[Row], failure: str, note: str) -> list[tuple[Sequence[Row], str]]:
        width = 2 + len(self._names)
        fits = len(rows) <= self._n_rows and all(set(row.sums) <= set(self._names) for row in rows)
        short = fits and not failure and not note
        packed = torch.zeros(_HEADER + self._n_rows * width, dtype=torch.float64)
        packed[0], packed[1] = len(rows), float(not short)
        if short:
            for index, row in enumerate(rows):
                figures = [row.count, row.loss, *(row.sums.get(name, 0.0) for name in self._names)]
                start = _HEADER + index * width
                packed[start : start + width] = torch.tensor(figures, dtype=torch.float64)
        parts = [torch.empty_like(packed) for _ in range(self._group.world_size)]
        with self._group.collective("exchange of loss sums and counts"):
            dist.all_gather(parts, packed, group=self._group.process_group)
        if any(part[1] for part in parts):
            return self._gather_long(rows, failure, note)
        return [(self._unpack(part.tolist(), width), "") for part in parts]

    def _unpack(self, figures: list[float], width: int) -> list[Row]:
        rows = []
        for index in range(int(figures[0])):
            count, loss, *rest = figures[_HEADER + index * width : _HEADER + (index + 1) * width]
            rows.append(Row(count, loss, dict(zip(self._names, rest))))
        return rows

    def _gather_long(self, rows: Sequence[Row], failure: str, note: str) -> list[tuple[Sequence[Row], str]]:
        self._group.agree(not failure, failure)
        mine = {"rows": [[row.count, row.loss, dict(row.sums)] for row in rows], "note": note}
        everything = [json.loads(text) for text in self._group.gather_text(json.dumps(mine))]
        self._n_rows = max(self._n_rows, *(len(part["rows"]) for part in everything))
        names = {name for part in everything for row in part["rows"] for name in row[2]}
        self._names = tuple(sorted(names | set(self._names)))
        return [([Row(*row) for row in part["rows"]], part["note"]) for part in everything]
