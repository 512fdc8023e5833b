"""k-means over the rows of all workers, the same bits however the rows are split.

``fit`` finds centroids, ``assign`` gives rows their nearest one, and ``MiniBatch`` follows batches. Points
may be a tensor, an array, a memmap or chunks that are read again in each pass. What other workers hold comes in
through a `Pool`.
"""

from __future__ import annotations

from samestep.kmeans._assign import assign
from samestep.kmeans._fit import KMeans, fit
from samestep.kmeans._minibatch import MiniBatch

__all__ = ["KMeans", "MiniBatch", "assign", "fit"]
