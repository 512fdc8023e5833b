"""What the shards of one step came to, on all workers: counts, loss sums, further sums, and who failed.

One small all-gather per step, begun before the only backward that communicates and waited for after it, so that it
costs no turn of its own. A worker whose loss function raised takes part in both, with nothing, and then all know.
Everything is float64 and is added along the shard tree, so the totals have the same bits for any number of workers.

::

    rank 0: [header | shard 0: count, loss, ... | shard 1: ...] ─┐
    rank 1: [header | shard 2: count, loss, ... | shard 3: ...] ─┴─> all workers: totals, or one error
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from samestep.errors import AgreementError, SamestepError, SpecError
from samestep.group import Group
from samestep.sharding import tree_fold

__all__ = ["Failure", "Row", "Tally", "Totals"]

_HEADER = 2  # rows that follow, and one of:
# Broken: a contract; failed: an exception; away: a worker that cannot take part in the backward of the others.
_SHORT, _LONG, _BROKEN, _FAILED, _AWAY = 0.0, 1.0, 2.0, 3.0, 4.0


@dataclass(frozen=True)
class Row:
    """Figures of one shard: `count` samples or tokens, the `loss` sum over them, further sums by name."""

    count: float
    loss: float
    sums: Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """What went wrong on this worker: `text`, and whether it is a contract of ours that was broken.

    `is_away` says that this worker cannot take part in the backward of the others, and so in nothing after it.
    """

    text: str
    is_spec: bool = False
    is_away: bool = False


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
        return self.begin(rows, failure)()

    def begin(self, rows: Sequence[Row], failure: Failure | None = None) -> Callable[[], Totals]:
        """Start an exchange and return the function that waits for it; see `exchange`.

        Args:
            rows: as for `exchange`.
            failure: as for `exchange`.

        Returns:
            A function that returns the totals, or raises what `exchange` raises.

        Collective: all ranks of the group, and so is what it returns.
        """
        if self._group.world_size > 1:
            return self._gather(list(rows), failure)

        def alone() -> Totals:
            if failure is not None:
                raise (SpecError if failure.is_spec else AgreementError)(failure.text, rank=0)
            return _add_up(tuple(rows))

        return alone

    def _gather(self, rows: list[Row], failure: Failure | None) -> Callable[[], Totals]:
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
        what = "exchange of loss sums and counts"
        with self._group.collective(what):
            work = dist.all_gather(parts, mine, group=self._group.process_group, async_op=True)

        def end() -> Totals:
            with self._group.collective(what):
                assert work is not None
                work.wait()
            everything = [part.tolist() for part in parts]
            form = max(part[1] for part in everything)
            if form == _AWAY:
                self._part([rank for rank, part in enumerate(everything) if part[1] == _AWAY], failure)
            if form >= _BROKEN:
                error: type[SamestepError] = SpecError if form != _FAILED else AgreementError
                self._group.agree(failure is None, failure.text if failure else "", error)
            if form >= _LONG:
                return _add_up(tuple(self._gather_long(rows)))
            return _add_up(tuple(row for part in everything for row in self._unpack(part, width)))

        return end

    def _part(self, away: list[int], failure: Failure | None) -> None:
        """Raise where some cannot take part; the others lose contact with them, and find the word left for them."""
        if len(away) == self._group.world_size:
            return
        text = failure.text if failure else f"rank {away[0]} of {self._group.world_size} cannot go on."
        self._group.abandon(text)
        raise SpecError(text, rank=away[0])

    def _form(self, rows: Sequence[Row], failure: Failure | None) -> float:
        if failure is not None and failure.is_away:
            return _AWAY
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


def _add_up(rows: tuple[Row, ...]) -> Totals:
    names = sorted({name for row in rows for name in row.sums})
    return Totals(
        count=tree_fold([row.count for row in rows]) if rows else 0.0,
        loss=tree_fold([row.loss for row in rows]) if rows else 0.0,
        sums={name: tree_fold([row.sums.get(name, 0.0) for row in rows]) for name in names},
        rows=rows,
    )
