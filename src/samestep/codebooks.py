"""Residual codebooks: each level quantizes by k-means what the levels before it left over.

::

    points - offset ── level 0 ── residual ── level 1 ── residual ── level 2 ── what is lost
                          │                     │                      │
    codes of a row:       17                    3                     201

``fit`` learns the levels over the rows of all workers, with the same bits however the rows are split; ``encode``
gives rows their codes, and ``decode`` gives codes their rows back, up to what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.kmeans._assign import check_centroids, thread_count
from samestep.kmeans._fit import KMeans, Seeding, Settings, fit_codes
from samestep.kmeans._frame import Survey, rounding_term, survey
from samestep.kmeans._lloyd import Acceleration, Empty
from samestep.kmeans._points import Points, as_points, each_piece, together
from samestep.kmeans._residual import Chain, keep_small, remover, square_norms
from samestep.kmeans._select import draw_keys, gather_local, pick_smallest
from samestep.kmeans._update import exact_total, pool_exact
from samestep.pooling import Pool, alone

__all__ = ["Codebooks", "decode", "encode", "fit"]

_SAMPLE = 101
_LEVEL_SEED = 1_000_003


@dataclass(frozen=True)
class Codebooks:
    """Learned levels and how well they do; equal bit for bit on all workers.

    Attributes:
        levels: one (n_centroids, dim) float32 tensor for each level.
        offset: (dim,) float32, taken from the points before level 0; zeros without centring.
        normalize_residuals: whether each level saw its input divided by its norm.
        fits: the k-means of each level, over the rows it was fitted on.
        relative_errors: for each level, sum |x - decoded|^2 over sum |x - mean|^2, over all rows of all workers.
            With normalized residuals, which have no decoded point: what the level left of its own input.
        n_sampled: rows the levels were fitted on.
    """

    levels: tuple[Tensor, ...]
    offset: Tensor
    normalize_residuals: bool = False
    fits: tuple[KMeans, ...] = ()
    relative_errors: tuple[float, ...] = ()
    n_sampled: int = 0


def fit(
    points: object,
    n_centroids: Sequence[int],
    *,
    seeding: Seeding = "k-means++",
    weights: Tensor | None = None,
    max_iterations: int = 25,
    tolerance: float = 1e-4,
    seed: int = 0,
    pool: Pool = alone,
    balanced: bool = False,
    empty: Empty = "farthest",
    acceleration: Acceleration = "none",
    center: bool = True,
    normalize_residuals: bool = False,
    sample_size: int | None = None,
    n_threads: int | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    seed_scale: float = 0.25,
) -> Codebooks:
    """Return codebooks fitted level by level over the rows of all workers.

    Args:
        points: (n_points, dim) float rows on this worker, in any form that `kmeans.fit` takes.
        n_centroids: cells of each level, for example ``[256, 256, 256]``.
        seeding: "k-means++", "random" or "k-means||", on every level.
        weights: (n_points,) non-negative weights of this worker's rows; all workers or none.
        max_iterations: passes at most, on every level.
        tolerance: relative descent in one pass below which a level stops.
        seed: of all draws; levels draw differently.
        pool: all workers; `reduce.pool(group)`, or `alone`.
        balanced: cells of equal size while fitting; `encode` takes the nearest centroid all the same.
        empty: rule for centroids without points, see `kmeans.fit`.
        acceleration: see `kmeans.fit`.
        center: take the mean of all rows off first, and keep it as `offset`.
        normalize_residuals: divide each level's input by its norm; `decode` is then refused.
        sample_size: fit on this many rows, drawn evenly over all workers; all rows by default. Rows drawn are
            copied. The errors are always those of all rows.
        n_threads: threads on this worker; torch's number by default.
        progress: called on the main worker with (level, iterations, inertia) after each pass.
        seed_scale: of the levels behind the first, see `kmeans.fit`; 1.0 leaves seeds where they were drawn.

    Raises:
        SpecError: on all workers alike, see `kmeans.fit`.
        ValueError: when a setting is out of range.

    Collective: all workers of `pool` call it, with the same settings.
    Numerics: order-free; see `kmeans.fit`.

    Example:
        >>> books = fit(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), [2, 2])
        >>> decode(encode(torch.tensor([[10.0]]), books), books).tolist(), books.relative_errors[1]
        ([[10.0]], 0.0)

    Reference: Juang & Gray, Multiple stage vector quantization for speech coding, 1982.
    """
    if len(n_centroids) == 0:
        raise ValueError("`n_centroids`: expected one number for each level, got none.")
    if isinstance(seeding, Tensor):
        raise TypeError(
            "`seeding`: expected the name of a rule, got a tensor. Levels have seeds of their own."
        )
    settings = [
        Settings(k, seeding, weights, max_iterations, tolerance, seed + _LEVEL_SEED * level, False, balanced, empty,
                 acceleration, n_threads, _level_progress(progress, level), seed_scale if level else 1.0)
        for level, k in enumerate(n_centroids)
    ]  # fmt: skip
    source, n = as_points(points), thread_count(n_threads)
    rows = survey(source, _float64(weights), pool, n)
    offset = rows.mean.float() if center else torch.zeros(rows.dim)
    books = Codebooks((), offset, normalize_residuals)
    if sample_size is not None:
        inner, n_local, settings = _sample(source, rows, sample_size, settings, seed, pool, n)
        n_sampled = min(sample_size, rows.n_points)
    else:
        inner, n_local, n_sampled = source, rows.n_local, rows.n_points
    books = _fit_levels(inner, n_local, books, settings, pool, n)
    errors = _errors(source, books, rows, _float64(weights), pool, n)
    return replace(books, relative_errors=errors, n_sampled=n_sampled)


def encode(
    points: object, codebooks: Codebooks | Sequence[Tensor], *, n_threads: int | None = None
) -> Tensor:
    """Return the codes of rows, level by level the nearest centroid of what is left.

    A row's codes depend on that row and on the codebooks only. Ties go to the lowest index.

    Args:
        points: (n_points, dim) float rows, in any form that `kmeans.fit` takes.
        codebooks: from `fit`, or a list of (n_centroids, dim) tensors.
        n_threads: threads to use; torch's number by default.

    Returns:
        (n_points, n_levels) int64.

    Raises:
        ValueError: when shapes do not fit or a row is not finite; names it.

    Numerics: each row alone, float32.

    Example:
        >>> encode(torch.tensor([[9.0]]), [torch.tensor([[0.0], [10.0]]), torch.tensor([[-1.0], [1.0]])])
        tensor([[1, 0]])
    """
    books = _books(codebooks)
    chain = Chain(books.levels, books.offset, books.normalize_residuals, thread_count(n_threads))
    found: list[tuple[int, npt.NDArray[np.int64]]] = []

    def work(thread: int, start: int, rows: Tensor) -> None:
        codes = [level for level, _, _ in chain.walk(rows, start, thread)]
        found.append((start, np.stack(codes, axis=1).astype(np.int64)))

    each_piece(as_points(points), work, thread_count(n_threads))
    found.sort(key=lambda item: item[0])
    parts = [codes for _, codes in found] or [np.empty((0, len(books.levels)), dtype=np.int64)]
    return torch.from_numpy(np.concatenate(parts))


def decode(codes: Tensor, codebooks: Codebooks | Sequence[Tensor]) -> Tensor:
    """Return the points that codes stand for: the offset plus one centroid of each level.

    Args:
        codes: (n_points, n_levels) integers; fewer columns than levels decode from those levels alone.
        codebooks: from `fit`, or a list of (n_centroids, dim) tensors.

    Returns:
        (n_points, dim) float32.

    Raises:
        ValueError: when codes do not fit the codebooks, or residuals were normalized, which loses the norms.

    Numerics: adds in float64, rounds once.

    Example:
        >>> decode(torch.tensor([[1, 0]]), [torch.tensor([[0.0], [10.0]]), torch.tensor([[-1.0], [1.0]])])
        tensor([[9.]])
    """
    books = _books(codebooks)
    if books.normalize_residuals:
        raise ValueError(
            "`codebooks`: expected plain residuals, got normalized ones, whose lengths are lost."
        )
    if codes.ndim != 2 or codes.is_floating_point() or not 1 <= codes.shape[1] <= len(books.levels):
        shape, n_levels = tuple(codes.shape), len(books.levels)
        raise ValueError(f"`codes`: expected integers (n_points, {n_levels}), got {shape} {codes.dtype}.")
    total = books.offset.double().repeat(codes.shape[0], 1)
    for level, (column, table) in enumerate(zip(codes.long().cpu().unbind(1), books.levels)):
        if column.numel() and not 0 <= int(column.min()) <= int(column.max()) < table.shape[0]:
            low, high = int(column.min()), int(column.max())
            raise ValueError(
                f"`codes`: expected 0 to {table.shape[0] - 1} on level {level}, got {low} to {high}."
            )
        total += table[column].double()
    return total.float()


def _fit_levels(
    source: Points, n_local: int, books: Codebooks, settings: list[Settings], pool: Pool, n_threads: int
) -> Codebooks:
    dim = books.offset.shape[0]
    base = Chain((), books.offset, books.normalize_residuals, 1).base
    level = source.mapped(lambda _, rows: base(rows))
    for setting in settings:
        level = keep_small(level, n_local, dim, pool, n_threads)
        found, codes = fit_codes(level, setting, pool)
        books = replace(books, levels=(*books.levels, found.centroids), fits=(*books.fits, found))
        level = level.mapped(remover(found.centroids, codes.numpy(), books.normalize_residuals))
    return books


def _sample(
    source: Points, rows: Survey, size: int, settings: list[Settings], seed: int, pool: Pool, n_threads: int
) -> tuple[Points, int, list[Settings]]:
    largest = max(setting.n_centroids for setting in settings)
    if size < largest:
        raise ValueError(f"`sample_size`: expected at least n_centroids={largest}, got {size}.")
    if size >= rows.n_points:
        return source, rows.n_local, settings
    keys = draw_keys(rows.offset, rows.n_local, seed, _SAMPLE)
    picked = pick_smallest(keys, size, pool)
    drawn: list[Tensor] = []
    together(pool, lambda: drawn.append(gather_local(source, picked, rows.dim, rows.dtype, n_threads)))
    given = settings[0].weights
    if given is not None:
        settings = [replace(setting, weights=given[torch.from_numpy(picked)]) for setting in settings]
    return as_points(drawn[0]), len(picked), settings


def _errors(
    source: Points, books: Codebooks, rows: Survey, weights: Tensor | None, pool: Pool, n_threads: int
) -> tuple[float, ...]:
    """Measure all rows of all workers: what each level leaves, over what there was."""
    n_levels = len(books.levels)
    squares = torch.zeros(rows.n_local, 2 * n_levels, dtype=torch.float64)
    chain = Chain(books.levels, books.offset, books.normalize_residuals, n_threads)

    def work(thread: int, start: int, part: Tensor) -> None:
        here = slice(start, start + part.shape[0])
        for level, (_, given, rest) in enumerate(chain.walk(part, start, thread)):
            squares[here, level] = square_norms(rest)
            if books.normalize_residuals:
                squares[here, n_levels + level] = square_norms(given)

    together(pool, lambda: each_piece(source, work, n_threads))
    if weights is not None:
        squares.mul_(weights.unsqueeze(1))
    largest = pool(squares.amax(0) if len(squares) else torch.zeros(2 * n_levels).double(), "max")
    totals = []
    for column, most in zip(squares.unbind(1), largest.tolist()):
        term = rounding_term(most, rows.n_points)
        totals.append(float(pool_exact(exact_total(column, term), term, pool)[0]))
    given = totals[n_levels:] if books.normalize_residuals else [rows.spread] * n_levels
    return tuple(left / whole if whole > 0 else 0.0 for left, whole in zip(totals, given))


def _books(codebooks: Codebooks | Sequence[Tensor]) -> Codebooks:
    if isinstance(codebooks, Codebooks):
        return codebooks
    levels = tuple(check_centroids(table, f"codebooks[{i}]") for i, table in enumerate(codebooks))
    if not levels or len({table.shape[1] for table in levels}) != 1:
        raise ValueError(f"`codebooks`: expected levels of one dim, got {[tuple(t.shape) for t in levels]}.")
    return Codebooks(levels, torch.zeros(levels[0].shape[1]))


def _float64(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.detach().cpu().double()


def _level_progress(
    progress: Callable[[int, int, float], None] | None, level: int
) -> Callable[[int, float], None] | None:
    return None if progress is None else lambda iteration, inertia: progress(level, iteration, inertia)
