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

from samestep.errors import AgreementError, SamestepError, SpecError
from samestep.group import Group
from samestep.sharding import tree_fold

__all__ = ["Failure", "Row", "Tally", "Totals"]

_HEADER = 2  # rows that follow, and one of:
_SHORT, _LONG, _BROKEN, _FAILED = 0.0, 1.0, 2.0, 3.0  # broken: a contract; failed: an exception


@dataclass(frozen=True)
class Row:
    """Figures of one shard: `count` samples or tokens, the `loss` sum over them, further sums by name."""

    count: float
    loss: float
    sums: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """What went wrong on this worker: `text`, and whether it is a contract of ours that was broken."""

    text: str
    is_spec: bool = False


@dataclass(frozen=True)
class Totals:
    """Figures of the global batch, equal on all workers.

    Attributes:
        count: samples or tokens.
        loss: sum over them.
        sums: further sums by name.
        rows: every shard's figures, in shard order.
    """

    count: float
    loss: float
    sums: dict[str, float]
    rows: tuple[Row, ...]


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

    def exchange(self, rows: Sequence[Row], failure: Failure | None = None) -> Totals:
        """Return the totals over all workers.

        Args:
            rows: this worker's shards, in shard order.
            failure: what went wrong on this worker, if anything; `rows` are then not read.

        Raises:
            SpecError: on all workers, when some of them broke a contract and nothing else failed; names the ranks
                and what they said.
            AgreementError: on all workers, when one of them failed otherwise.

        Collective: all ranks of the group.
        Numerics: order-fixed; float64.
        """
        if self._group.world_size > 1:
            merged = tuple(self._gather(rows, failure))
        elif failure is None:
            merged = tuple(rows)
        else:
            raise (SpecError if failure.is_spec else AgreementError)(failure.text, rank=0)
        names = sorted({name for row in merged for name in row.sums})
        return Totals(
            count=tree_fold([row.count for row in merged]) if merged else 0.0,
            loss=tree_fold([row.loss for row in merged]) if merged else 0.0,
            sums={name: tree_fold([row.sums.get(name, 0.0) for row in merged]) for name in names},
            rows=merged,
        )

    def _gather(self, rows: Sequence[Row], failure: Failure | None) -> list[Row]:
        width = 2 + len(self._names)
        packed = [0.0] * (_HEADER + self._n_rows * width)
        packed[:_HEADER] = float(len(rows)), self._form(rows, failure)
        if packed[1] == _SHORT:
            for index, row in enumerate(rows):
                start = _HEADER + index * width
                packed[start : start + width] = (
                    row.count,
                    row.loss,
                    *(row.sums.get(n, 0.0) for n in self._names),
                )
        mine = torch.tensor(packed, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self._group.world_size)]
        with self._group.collective("exchange of loss sums and counts"):
            dist.all_gather(parts, mine, group=self._group.process_group)
        everything = [part.tolist() for part in parts]
        form = max(part[1] for part in everything)
        if form >= _BROKEN:
            error: type[SamestepError] = SpecError if form == _BROKEN else AgreementError
            self._group.agree(failure is None, failure.text if failure else "", error)
        if form >= _LONG:
            return self._gather_long(rows)
        return [row for part in everything for row in self._unpack(part, width)]

    def _form(self, rows: Sequence[Row], failure: Failure | None) -> float:
        if failure is not None:
            return _BROKEN if failure.is_spec else _FAILED
        fits = len(rows) <= self._n_rows and all(set(row.sums) <= set(self._names) for row in rows)
        return _SHORT if fits else _LONG

    def _unpack(self, figures: list[float], width: int) -> list[Row]:
        rows = []
        for index in range(int(figures[0])):
            count, loss, *rest = figures[_HEADER + index * width : _HEADER + (index + 1) * width]
            rows.append(Row(count, loss, dict(zip(self._names, rest))))
        return rows

    def _gather_long(self, rows: Sequence[Row]) -> list[Row]:
        mine = [[row.count, row.loss, dict(row.sums)] for row in rows]
        everything = [json.loads(text) for text in self._group.gather_text(json.dumps(mine))]
        self._n_rows = max(self._n_rows, *(len(part) for part in everything))
        names = {name for part in everything for row in part for name in row[2]}
        self._names = tuple(sorted(names | set(self._names)))
        return [Row(*row) for part in everything for row in part]
