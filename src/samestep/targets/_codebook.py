"""Codebooks that follow exponential averages of all workers' rows, and codes that nothing chooses any more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from samestep import kmeans
from samestep.errors import SpecError
from samestep.kmeans._points import Points, together
from samestep.kmeans._select import draw_keys, gather_rows, pick_smallest
from samestep.kmeans._update import ExactSums
from samestep.pooling import Pool, alone
from samestep.targets._exact import checked

__all__ = ["ema_start", "ema_update", "restart_dead"]

State = dict[str, Tensor]


def ema_start(codebook: Tensor, points: object, pool: Pool = alone) -> State:
    """Return the averages that belong to a codebook just found from data: sums, not means, and their counts.

    Args:
        codebook: (n_codes, dim) float, equal on all workers.
        points: (n_points, dim) float rows of this worker, may be none.
        pool: all workers.

    Returns:
        ``codebook`` (n_codes, dim) float32, ``sums`` (n_codes, dim) and ``counts`` (n_codes,) float64, with
        sums = codebook * counts.

    Raises:
        SpecError: on all workers: no row at all, dims that differ, a row that is not finite.

    Collective: all workers of `pool` call it.
    Numerics: order-free; counts are integers.

    Example:
        >>> ema_start(torch.ones(1, 1), torch.ones(100, 1))["sums"].item()
        100.0
    """
    counts = _batch(codebook, points, pool)[1]
    table = codebook.detach().float().clone()
    return {"codebook": table, "sums": table.double() * counts.unsqueeze(1), "counts": counts}


def ema_update(state: State, points: object, pool: Pool = alone, *, decay: float = 0.99) -> State:
    """Return the state after one batch of all workers.

    ``counts = decay * counts + (1 - decay) * n``, sums alike, ``codebook = sums / counts``; a code that was never
    chosen keeps its value.

    Args:
        state: of `ema_start`, `ema_update` or `restart_dead`; equal on all workers, left as it is.
        points: (batch_rows, dim) float rows of this worker, may be none.
        pool: all workers.
        decay: in [0, 1).

    Raises:
        ValueError: for a decay out of range.
        SpecError: on all workers, as `ema_start`.

    Collective: all workers of `pool` call it.
    Numerics: order-free; exact fixed-point sums over the batch, averages in float64.

    Example:
        >>> state = ema_start(torch.ones(1, 1), torch.ones(100, 1))
        >>> ema_update(state, torch.ones(100, 1), decay=0.8)["codebook"].item()
        1.0

    Reference: van den Oord et al., Neural discrete representation learning, 2017, appendix A.1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"`decay`: expected a number in [0, 1), got {decay}.")
    batch_sums, batch_counts = _batch(state["codebook"], points, pool)
    counts = decay * state["counts"] + (1 - decay) * batch_counts
    sums = decay * state["sums"] + (1 - decay) * batch_sums
    used = (counts > 0).unsqueeze(1)
    mean = sums / counts.clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(1)
    return {"codebook": torch.where(used, mean.float(), state["codebook"]), "sums": sums, "counts": counts}


def restart_dead(
    state: State, points: object, pool: Pool = alone, *, threshold: float = 1.0, seed: int = 0, step: int = 0
) -> State:
    """Return the state with rows of all workers in place of the codes whose count is below the threshold.

    The drawn rows, in the order of their global numbers, replace the dead codes in the order of theirs. A replaced
    code gets a count of max(threshold, 1) and a sum to match, so that the next update moves it from the new value.

    Args:
        state: as of `ema_update`; its counts are those of all workers. Left as it is.
        points: (n_points, dim) float rows of this worker, may be none.
        pool: all workers.
        threshold: counts below it are dead.
        seed: of the draw.
        step: updates so far; another step draws other rows.

    Returns:
        The new state. With fewer rows than dead codes, the last dead codes stay as they are.

    Raises:
        SpecError: on all workers, as `ema_start`.

    Collective: all workers of `pool` call it.
    Numerics: order-free; rows are drawn by a hash of their global number.

    Example:
        >>> state = ema_start(torch.tensor([[0.0], [50.0]]), torch.zeros(4, 1))
        >>> restart_dead(state, torch.full((2, 1), 7.0))["codebook"].tolist()
        [[0.0], [7.0]]
    """
    source, rows = checked(points, pool)
    _same_dim(state["codebook"], rows.dim)
    dead = (state["counts"] < threshold).nonzero()[:, 0]
    dead = dead[: rows.n_points]
    state = {name: tensor.clone() for name, tensor in state.items()}
    if len(dead):
        picked = pick_smallest(draw_keys(rows.offset, rows.n_local, seed, 1000 + step), len(dead), pool)
        plain = source.mapped(lambda _, part: part.float())
        drawn = gather_rows(plain, picked, len(dead), rows.dim, pool, 1)
        count = max(threshold, 1.0)
        state["codebook"][dead] = drawn
        state["sums"][dead] = drawn.double() * count
        state["counts"][dead] = count
    return state


def _batch(codebook: Tensor, points: object, pool: Pool) -> tuple[Tensor, Tensor]:
    """Return float64 sums and counts of all workers' rows by their nearest code."""
    source, rows = checked(points, pool)
    _same_dim(codebook, rows.dim)
    sums = ExactSums(len(codebook), rows.dim, rows.max_abs, rows.n_points, 1)
    counts = torch.zeros(len(codebook), dtype=torch.int64)

    def add() -> None:
        for part in _parts(source):
            codes = kmeans.assign(part, codebook.detach())[0].numpy().astype(np.int32)
            sums.move(part, np.full(len(codes), -1, dtype=np.int32), codes, None, 0)
            counts.add_(torch.from_numpy(np.bincount(codes, minlength=len(codebook))))

    together(pool, add)
    return sums.total(pool), pool(counts).double()


def _parts(source: Points) -> Iterator[Tensor]:
    return (source.transformed(start, rows).float() for start, rows in source.pieces() if len(rows))


def _same_dim(codebook: Tensor, dim: int) -> None:
    if codebook.shape[1] != dim:
        raise SpecError(
            f"`points`: expected dim {codebook.shape[1]} as the codebook has, got {dim}.", name="points"
        )
