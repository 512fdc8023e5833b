"""Which worker holds which samples: shards, the order of samples, and the loaders that follow both.

A global batch is always cut into the same S shards; a worker holds a contiguous block of them. Nothing here
asks whether a process group exists: a `group` is anything that has `rank` and `world_size`.

::

    order of the epoch  = f(seed, epoch)        the position in it is the number of samples consumed
          |
    global batch        order[position : position + global_batch_size]
          |
    shards 0 .. S-1     sizes differ by at most one, the same for every world size
          |
    workers             S = 8, N = 3:  0 1 2 | 3 4 5 | 6 7
          |
    sums                one binary tree over the shards, whoever holds them

Refused: padding with repeated samples, a world size above S, a global batch below S.
"""

from __future__ import annotations

from samestep.sharding._blocks import (
    counter_merges,
    fold_order,
    shard_range,
    straggler_factor,
    subtrees,
    tree_fold,
)
from samestep.sharding._fetch import Shard
from samestep.sharding._loader import ShardLoader
from samestep.sharding._order import sample_order
from samestep.sharding._stream import SampleStream, StreamLoader

__all__ = [
    "SampleStream",
    "Shard",
    "ShardLoader",
    "StreamLoader",
    "counter_merges",
    "fold_order",
    "sample_order",
    "shard_range",
    "straggler_factor",
    "subtrees",
    "tree_fold",
]
