"""Which samples a step reads on which rank: the right ones, each once, with the right count behind the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.group import Group
from samestep.reduce import gather_parts
from samestep.sharding import Shard, ShardLoader, sample_order

__all__ = ["Held", "Samples"]


class Held(NamedTuple):
    """A finding about what ranks hold.

    Attributes:
        name: of what is wrong.
        ranks: sets of ranks by value, those in order first.
        values: in words, one for each set.
        n_right: how many of the sets are in order.
    """

    name: str
    ranks: list[list[int]]
    values: list[str]
    n_right: int


_NONE = -1  # fills up the ids of ranks that hold fewer; sample ids are at least 0


class Samples:
    """Keeps what this rank said of its samples until the next audit."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.problem = ""
        self._whole: Tensor | None = None
        self._place: tuple[int, int] | None = None  # epoch and position after the step before
        self._order: tuple[tuple[int, int, int, bool], Any] | None = None

    def note(
        self,
        ids: Sequence[Shard] | Tensor | Iterable[int],
        expected: Tensor | Iterable[int] | None,
        whole: Tensor | Iterable[int] | None,
        count: float | None,
        expected_count: float | None,
        loader: Any,
    ) -> None:
        """Take this step's samples; a problem stays until it was reported."""
        shards = list(ids) if not isinstance(ids, Tensor) else []
        if shards and all(isinstance(shard, Shard) for shard in shards):
            mine = torch.cat([shard.sample_ids for shard in shards])
            if expected is None and isinstance(loader, ShardLoader):
                expected = self._planned(loader, shards)
        else:
            mine = _whole_numbers(ids if isinstance(ids, Tensor) else shards)
        self.ids, self._whole = mine, None if whole is None else _whole_numbers(whole)
        if expected is not None and not self.problem:
            self.problem = _unlike(mine, _whole_numbers(expected))
        right = len(mine) if expected_count is None else expected_count
        if count is not None and count != right and not self.problem:
            self.problem = f"count {count:g} where its samples hold {right:g}"

    def clear(self) -> None:
        """Begin anew, after an audit."""
        self.ids, self.problem, self._whole = None, "", None

    def report(self, group: Group) -> Held | None:
        """Return which ranks noted a problem of their own, and what they noted.

        Collective: all ranks of `group`.
        """
        texts = group.gather_text(self.problem)
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            by_text.setdefault(text or "as planned", []).append(rank)
        if len(by_text) == 1 and "as planned" in by_text:
            return None
        # The ranks without a problem come first, whatever their number.
        sets = sorted(by_text.items(), key=lambda one: (one[0] != "as planned", -len(one[1]), one[1][0]))
        name = "count" if any(text.startswith("count ") for text in texts) else "sample ids"
        right = int("as planned" in by_text)
        return Held(name, [ranks for _, ranks in sets], [text for text, _ in sets], right)

    def overlap(self, n_longest: int, group: Group) -> Held | None:
        """Return a sample that several ranks hold, or one of the whole batch that none holds.

        Args:
            n_longest: the largest number of ids on a rank.
            group: the workers.

        Collective: all ranks of `group`.
        """
        padded = torch.full((n_longest,), _NONE, dtype=torch.int64)
        if self.ids is not None:
            padded[: len(self.ids)] = self.ids
        parts = [part[part != _NONE] for part in gather_parts(padded, group)]
        every = torch.cat(parts)
        found, counts = torch.unique(every, return_counts=True)
        if bool((counts > 1).any()):
            twice = int(found[counts > 1][0])
            holders = [rank for rank, part in enumerate(parts) for _ in range(int((part == twice).sum()))]
            return _once(f"sample {twice}", holders, int((counts > 1).sum()), group.world_size)
        if self._whole is not None:
            missing = self._whole[~torch.isin(self._whole, found)]
            if len(missing):
                everyone = list(range(group.world_size))
                text = f"{len(missing)} of {len(self._whole)} samples of the batch are read by no rank"
                return Held(f"sample {int(missing[0])}", [everyone], [text], 0)
        return None

    def _planned(self, loader: ShardLoader, shards: Sequence[Shard]) -> Tensor:
        """Return the ids that these shards should hold, from the loader's settings and position."""
        state = loader.state_dict()
        n_samples, batch = state["dataset"]["n_samples"], state["global_batch_size"]
        epoch, end = state["epoch"], state["samples_consumed"]
        size = end - self._place[1] if self._place and self._place[0] == epoch else 0
        if not 0 < size <= batch:  # first step of an epoch, or steps were not noted
            size = n_samples % batch or batch if end == n_samples else batch
        self._place = (epoch, end)
        order = self._order_of(n_samples, state["seed"], epoch, state["shuffle"])
        each, larger = divmod(size, state["shards"])
        parts = []
        for shard in shards:
            start = end - size + shard.index * each + min(shard.index, larger)
            parts.append(torch.from_numpy(order[start : start + each + (shard.index < larger)].copy()))
        return torch.cat(parts)

    def _order_of(self, n_samples: int, seed: int, epoch: int, shuffle: bool) -> Any:
        key = (n_samples, seed, epoch, shuffle)
        if self._order is None or self._order[0] != key:
            self._order = (key, sample_order(*key))
        return self._order[1]


def _whole_numbers(ids: Tensor | Iterable[int]) -> Tensor:
    tensor = ids if isinstance(ids, Tensor) else torch.tensor(list(ids), dtype=torch.int64)
    return tensor.detach().reshape(-1).to("cpu", torch.int64)


def _unlike(mine: Tensor, expected: Tensor) -> str:
    if torch.equal(mine, expected):
        return ""
    if len(mine) != len(expected):
        return f"{len(mine)} samples where {len(expected)} are planned"
    at = int((mine != expected).nonzero()[0])
    return f"sample {int(mine[at])} in place of {int(expected[at])}"


def _once(name: str, holders: list[int], n_twice: int, world_size: int) -> Held:
    several = sorted(set(holders))
    others = [rank for rank in range(world_size) if rank not in several]
    text = f"read {len(holders)} times in one step (samples read more than once: {n_twice})"
    if not others:
        return Held(name, [several], [text], 0)
    return Held(name, [others, several], ["not read", text], 1)
