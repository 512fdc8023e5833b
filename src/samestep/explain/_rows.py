"""Batches as rows: how many, which ones, and the same rows found again in another batch.

A batch is any nesting of tuples, lists and dicts; tensors whose first axis is the samples are cut, the rest goes
along as it is.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from samestep.errors import SpecError

__all__ = ["converted", "count", "digests", "locate", "on_cuda", "take"]


def _leaves(batch: Any) -> list[Tensor]:
    found = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not found:
        raise SpecError(
            "`global_batch`: expected tensors with the samples on their first axis, got none. "
            "Give a tensor, or a tuple, list or dict of tensors.",
            name="global_batch",
        )
    return [leaf for leaf in found if len(leaf) == len(found[0])]


def count(batch: Any) -> int:
    """Return the number of samples: the first axis of the first tensor.

    Example:
        >>> count((torch.zeros(5, 2), {"y": torch.zeros(5)}))
        5
    """
    return len(_leaves(batch)[0])


def take(batch: Any, rows: Iterable[int]) -> Any:
    """Return the batch of these rows.

    Example:
        >>> take((torch.arange(4),), [3, 0])
        (tensor([3, 0]),)
    """
    n_rows = count(batch)

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == n_rows:
            return leaf[torch.tensor(list(rows), dtype=torch.int64, device=leaf.device)]
        return leaf

    rows = list(rows)
    return _pytree.tree_map(pick, batch)


def converted(batch: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    """Return the batch on a device, its floats in `dtype` where that is given."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return _pytree.tree_map(convert, batch)


def on_cuda(batch: Any) -> bool:
    """Return whether the batch is on a CUDA device."""
    return _leaves(batch)[0].is_cuda


def digests(batch: Any) -> list[str]:
    """Return one digest per row, over the bytes of all tensors.

    Example:
        >>> first, second, third = digests(torch.tensor([[1.0], [2.0], [1.0]]))
        >>> first == third, first == second
        (True, False)
    """
    leaves = [leaf.detach().cpu().contiguous() for leaf in _leaves(batch)]
    found = []
    for row in range(len(leaves[0])):
        digest = hashlib.blake2b(digest_size=12)
        for leaf in leaves:
            item = leaf[row].contiguous().reshape(-1)
            digest.update(f"{item.dtype}{tuple(leaf.shape[1:])}".encode())
            digest.update(item.view(torch.uint8).numpy().tobytes() if item.numel() else b"")
        found.append(digest.hexdigest())
    return found


def locate(rows: list[str], whole: list[str]) -> list[int]:
    """Return where each row stands in the whole batch, -1 for one that is not there.

    Equal rows of the whole are handed out in turn.

    Example:
        >>> locate(["b", "a", "b", "z"], ["a", "b", "b"])
        [1, 0, 2, -1]
    """
    places: dict[str, list[int]] = defaultdict(list)
    for index, digest in enumerate(whole):
        places[digest].append(index)
    seen: dict[str, int] = defaultdict(int)
    found = []
    for digest in rows:
        options = places.get(digest)
        found.append(options[seen[digest] % len(options)] if options else -1)
        seen[digest] += 1
    return found
