"""Draws and picks by global row number: the same rows whatever worker holds them.

A row's draw is a hash of seed, purpose and global row number, so it needs no generator that walks over the rows.
The n smallest of all workers' keys are found by counting digits, in eight rounds of one small sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.kmeans._points import Points, each_piece, together
from samestep.pooling import Pool

__all__ = ["draw_keys", "gather_local", "gather_rows", "pick_smallest", "uniform"]

Keys = npt.NDArray[np.int64]


def draw_keys(first_row: int, n_rows: int, seed: int, purpose: int, weights: Tensor | None = None) -> Keys:
    """Return (n_rows,) keys below 2**63; the rows with the n smallest are a random sample without replacement.

    Args:
        first_row: global number of the first row.
        n_rows: consecutive rows.
        seed: the user's.
        purpose: a number for each use of a seed, so that uses do not repeat each other's draws.
        weights: (n_rows,) float64; a row is drawn in proportion to it.
    """
    number = np.arange(first_row, first_row + n_rows, dtype=np.uint64)
    bits = _mix(number + _mix(np.array([seed % 2**64], dtype=np.uint64) + np.uint64(purpose)))
    if weights is None:
        return (bits >> np.uint64(1)).astype(np.int64)
    # Exponential arrival times with these rates; positive floats order as their bits do.
    chance = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    with np.errstate(divide="ignore"):
        times: npt.NDArray[np.float64] = -np.log(chance) / weights.numpy()
    return times.view(np.int64)


def uniform(n: int, seed: int, purpose: int) -> npt.NDArray[np.float64]:
    """Return (n,) draws in (0, 1), the same on all workers."""
    keys = draw_keys(0, n, seed, purpose)
    return ((keys >> 10).astype(np.float64) + 0.5) * 2.0**-53


def pick_smallest(keys: Keys, n: int, pool: Pool) -> npt.NDArray[np.int64]:
    """Return this worker's rows, ascending, among the n of all workers with the smallest keys.

    Args:
        keys: (n_rows,) of this worker, not negative; equal keys go by global row number.
        n: how many to pick in all, at most as many as there are rows.
        pool: all workers.

    Collective: all workers call it.
    """
    candidates = np.arange(len(keys))
    chosen: list[npt.NDArray[np.int64]] = []
    needed = n
    for shift in range(56, -1, -8):
        digits = (keys[candidates] >> shift) & 255
        counts = pool(torch.from_numpy(np.bincount(digits, minlength=256))).numpy()
        below = np.cumsum(counts)
        digit = int(np.searchsorted(below, needed))
        if digit > 255:
            return np.arange(len(keys))
        needed -= int(below[digit] - counts[digit])
        chosen.append(candidates[digits < digit])
        candidates = candidates[digits == digit]
    room = max(needed - pool.offset(len(candidates)), 0)
    chosen.append(candidates[:room])
    return np.sort(np.concatenate(chosen))


def gather_rows(
    points: Points, picked: npt.NDArray[np.int64], n: int, dim: int, pool: Pool, n_threads: int
) -> Tensor:
    """Return (n, dim) float32 prepared rows of all workers, by global row number.

    Args:
        points: this worker's prepared rows.
        picked: this worker's rows to give, ascending.
        n: rows that all workers give together.
        dim: their columns.
        pool: all workers.
        n_threads: threads for the pass.

    Collective: all workers call it.
    """
    offset = pool.offset(len(picked))
    out: list[Tensor] = []

    def read() -> None:
        table = torch.zeros(n, dim)
        table[offset : offset + len(picked)] = gather_local(points, picked, dim, torch.float32, n_threads)
        out.append(table)

    together(pool, read)
    # -0.0 + 0.0 is 0.0, alone as between workers.
    return pool(out.pop()).add_(0.0)


def gather_local(
    points: Points, picked: npt.NDArray[np.int64], dim: int, dtype: torch.dtype, n_threads: int
) -> Tensor:
    """Return (n_picked, dim) of this worker's own rows, in one pass."""
    out = torch.empty(len(picked), dim, dtype=dtype)

    def work(_: int, start: int, rows: Tensor) -> None:
        low, high = np.searchsorted(picked, (start, start + rows.shape[0]))
        if high > low:
            out[low:high] = rows[torch.from_numpy(picked[low:high] - start)]

    each_piece(points, work, n_threads)
    return out


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
