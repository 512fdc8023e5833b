"""Codes and distances of raw rows: their frame, their checks, and rows too far away for float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.kmeans._frame import Frame, centroid_frame
from samestep.kmeans._points import BLOCK_ROWS, Points, as_points, each_piece
from samestep.kmeans._search import Codes, Nearest

__all__ = [
    "Assigner",
    "assign",
    "assign_pieces",
    "check_centroids",
    "row_distances",
    "thread_count",
]

_FAR = 2.0**40


def assign(points: object, centroids: Tensor, *, n_threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Return each row's nearest centroid and its squared distance to it.

    Ties go to the lowest index. Distances are compared as in float64 around the centroids' mean, so that a common
    offset does no harm; the distance returned is that of the row to its own centroid, taken directly, so it is
    0 for a row equal to its centroid. A row's answer depends on that row and on the centroids only.

    Args:
        points: (n_points, dim) float tensor, array or memmap, or an iterable of such chunks.
        centroids: (n_centroids, dim) finite float tensor.
        n_threads: threads to use; torch's number by default.

    Returns:
        codes: (n_points,) int64.
        squared_distances: (n_points,) float32, infinite where it leaves the range of float32.

    Raises:
        ValueError: when shapes do not fit or a value is not finite; names the row.

    Numerics: each row alone; codes as by float64 scores, distances in float32.

    Example:
        >>> codes, distances = assign(torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [7.0]]))
        >>> codes.tolist(), distances.tolist()
        ([0, 1], [1.0, 4.0])
    """
    table = check_centroids(centroids)
    codes, distances, frame = assign_pieces(as_points(points), table, thread_count(n_threads))
    return codes.long(), (distances / frame.scale / frame.scale).float()


def assign_pieces(
    points: Points, centroids: Tensor, n_threads: int, given: Codes | None = None
) -> tuple[Tensor, Tensor, Frame]:
    """Return int32 codes, float64 squared distances in the frame of the centroids, and that frame.

    With `given` codes, no search is made.
    """
    search = Assigner(centroids, n_threads)
    found: list[tuple[int, Codes, Tensor]] = []

    def work(thread: int, start: int, rows: Tensor) -> None:
        if rows.shape[0]:
            codes = None if given is None else given[start : start + rows.shape[0]]
            found.append((start, *search.measure(rows, start, thread, codes)))

    each_piece(points, work, n_threads)
    found.sort(key=lambda item: item[0])
    if not found:
        return torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.float64), search.frame
    return (
        torch.from_numpy(np.concatenate([codes for _, codes, _ in found])),
        torch.cat([distances for _, _, distances in found]),
        search.frame,
    )


class Assigner:
    """Codes and distances of raw rows, in the frame that the centroids choose.

    Args:
        centroids: (n_centroids, dim) finite, in the units of the rows.
        n_threads: how many threads will ask.
    """

    def __init__(self, centroids: Tensor, n_threads: int) -> None:
        self.frame = centroid_frame(centroids)
        self._centroids = centroids
        self._table = self.frame.prepare(centroids)
        self._search = Nearest(self._table, n_threads)

    def codes(self, rows: Tensor, start: int, thread: int) -> Codes:
        """Return (n_rows,) codes; raises ValueError naming a row that is not finite, counted from `start`."""
        prepared, far = self._prepare(rows, start)
        codes = self._search.codes(prepared, thread)
        if far is not None:
            codes[far] = self._from_afar(rows[torch.from_numpy(far)])[0]
        return codes

    def measure(self, rows: Tensor, start: int, thread: int, given: Codes | None) -> tuple[Codes, Tensor]:
        """Return codes and (n_rows,) float64 squared distances in the frame."""
        prepared, far = self._prepare(rows, start)
        codes = self._search.codes(prepared, thread) if given is None else given
        distances = row_distances(prepared, self._table, codes)
        if far is not None and given is None:
            apart = torch.from_numpy(far)
            codes[far], distances[apart] = self._from_afar(rows[apart])
        return codes, distances

    def _prepare(self, rows: Tensor, start: int) -> tuple[Tensor, npt.NDArray[np.intp] | None]:
        if rows.shape[1] != self._table.shape[1]:
            dim = self._table.shape[1]
            raise ValueError(f"`points`: expected dim {dim} as the centroids have, got {rows.shape[1]}.")
        prepared = self.frame.prepare(rows)
        low, high = prepared.aminmax() if prepared.numel() else (torch.zeros(()), torch.zeros(()))
        if float(torch.maximum(-low, high)) <= _FAR:
            return prepared, None
        finite = rows.isfinite().all(1)
        if not bool(finite.all()):
            row = start + int((~finite).nonzero()[0, 0])
            raise ValueError(f"`points`: expected finite rows, got a value that is not finite in row {row}.")
        return prepared, np.flatnonzero((prepared.abs().amax(1) > _FAR).numpy())

    def _from_afar(self, rows: Tensor) -> tuple[Codes, Tensor]:
        """Search in float64 for rows so far from all centroids that squares leave the range of float32."""
        codes, distances = np.empty(rows.shape[0], dtype=np.int32), torch.empty(rows.shape[0]).double()
        table = self._centroids.double()
        half = table.square().sum(1).mul_(0.5)
        for number, row in enumerate(rows.double()):
            unit = row.abs().amax()
            # Differences would lose the centroid; what tells centroids apart is |c|^2 / 2 - c x.
            codes[number] = int((half / unit - table @ (row / unit)).argmin())
            gap = (table[codes[number]] / unit - row / unit).square().sum()
            distances[number] = gap * (unit * self.frame.scale) ** 2
        return codes, distances


def row_distances(rows: Tensor, table: Tensor, codes: Codes) -> Tensor:
    """Return (n_rows,) float64 squared distances |row - table[code]|^2 of prepared rows, taken directly."""
    distances = torch.empty(rows.shape[0], dtype=torch.float64)
    difference = torch.zeros(BLOCK_ROWS, rows.shape[1])
    chosen = torch.from_numpy(codes.astype(np.int64))
    for begin in range(0, rows.shape[0], BLOCK_ROWS):
        block = rows[begin : begin + BLOCK_ROWS]
        n_block = block.shape[0]
        # Always summed over a full block, since the shape may decide the order of the sum.
        torch.sub(block, table[chosen[begin : begin + n_block]], out=difference[:n_block])
        distances[begin : begin + n_block] = difference.square_().sum(1)[:n_block]
    return distances


def check_centroids(centroids: Tensor, name: str = "centroids") -> Tensor:
    """Return detached CPU centroids, or raise ValueError when they are no finite float matrix."""
    if not isinstance(centroids, Tensor) or centroids.ndim != 2 or 0 in centroids.shape:
        shape = tuple(centroids.shape) if isinstance(centroids, Tensor) else type(centroids).__name__
        raise ValueError(f"`{name}`: expected a tensor (n_centroids, dim), got {shape}.")
    if not centroids.dtype.is_floating_point:
        raise ValueError(f"`{name}`: expected a float tensor, got {centroids.dtype}.")
    table = centroids.detach().cpu()
    if not bool(table.isfinite().all()):
        row = int((~table.isfinite().all(1)).nonzero()[0, 0])
        raise ValueError(f"`{name}`: expected finite values, got one that is not in row {row}.")
    return table


def thread_count(n_threads: int | None) -> int:
    """Return how many threads to use; torch's number by default."""
    if n_threads is None:
        return torch.get_num_threads()
    if n_threads < 1:
        raise ValueError(f"`n_threads`: expected at least 1, got {n_threads}.")
    return n_threads
