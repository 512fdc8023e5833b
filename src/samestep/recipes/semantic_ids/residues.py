"""What the levels leave of the rows: the squared error after each level, over that of guessing the mean.

Rows are rounded to a grid and added as integers, so that the figures do not depend on who holds which row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samestep import codebooks
from samestep.pooling import Pool
from samestep.recipes.semantic_ids.data import Items
from samestep.recipes.semantic_ids.model import RQVAE

__all__ = ["of_books", "of_model"]

_BLOCK_ROWS = 1024


def of_books(part: Items, codes: Tensor, books: codebooks.Codebooks, pool: Pool) -> list[float]:
    """Return, after each level, the squared error of all rows over that of their mean.

    Args:
        part: this worker's rows.
        codes: (n_items, n_levels) of these rows.
        books: what the codes were made with.
        pool: all workers.

    Collective: all workers of `pool` call it.
    Numerics: order-free; a row's error is rounded to 2**-32 of the largest squared distance from the mean.
    """
    n_levels = codes.shape[1]
    errors = torch.zeros(len(part), n_levels + 1, dtype=torch.float64)
    for first in range(0, len(part), _BLOCK_ROWS):
        here = slice(first, first + _BLOCK_ROWS)
        rows = _rows(part, first)
        guesses = [codebooks.decode(codes[here, : level + 1], books) for level in range(n_levels)]
        for place, guess in enumerate([*guesses, books.offset]):
            errors[here, place] = (rows - guess.double()).square().sum(1)
    largest = errors.max().reshape(1) if len(part) else torch.zeros(1, dtype=torch.float64)
    unit = 2.0**32 / max(float(pool(largest, "max")[0]), 1e-300)
    sums = pool((errors * unit).round().long().sum(0))
    return [int(total) / max(int(sums[-1]), 1) for total in sums[:-1]]


def of_model(part: Items, codes: Tensor, model: RQVAE, pool: Pool) -> list[float]:
    """Return, after each level, the squared error of what the levels so far decode to, over that of the mean.

    Args:
        part: this worker's rows.
        codes: (n_items, n_levels) of these rows.
        model: what the codes were made with.
        pool: all workers.

    Collective: all workers of `pool` call it.
    Numerics: order-free; a row's error is rounded to 2**-32 of the mean squared distance from the mean.
    """
    n_levels, device = codes.shape[1], model.center.device
    center = model.center.double().cpu()
    mean_energy = model.dim / float(model.scale) ** 2  # squared distance of a row from the mean, on average
    unit = 2.0**32 / mean_energy
    sums = torch.zeros(n_levels + 1, dtype=torch.int64)
    for first in range(0, len(codes), _BLOCK_ROWS):
        rows = _rows(part, first)
        # Padded to one shape: a matrix product may add in another order when its shape changes.
        block = torch.zeros(_BLOCK_ROWS, n_levels, dtype=torch.int64)
        block[: len(rows)] = codes[first : first + _BLOCK_ROWS]
        decoded = [model.decode(block[:, : level + 1].to(device)) for level in range(n_levels)]
        guesses = [guess[: len(rows)].double().cpu() for guess in decoded] + [center]
        for place, guess in enumerate(guesses):
            sums[place] += ((rows - guess).square().sum(1) * unit).round().long().sum()
    total = pool(sums)
    return [int(total[level]) / int(total[n_levels]) for level in range(n_levels)]


def _rows(part: Items, first: int) -> Tensor:
    return torch.from_numpy(np.array(part.embeddings[first : first + _BLOCK_ROWS], dtype=np.float64))
