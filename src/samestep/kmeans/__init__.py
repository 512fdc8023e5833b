"""k-means over the rows of all workers, the same bits however the rows are split.

``fit`` finds centroids, ``assign`` gives rows their nearest one. Points may be a tensor, an array, a memmap or
chunks that are read again in each pass. What other workers hold comes in through a `Pool`.
"""

from __future__ import annotations

from samestep.kmeans._assign import assign
from samestep.kmeans._fit import KMeans, fit

__all__ = ["KMeans", "assign", "fit"]
