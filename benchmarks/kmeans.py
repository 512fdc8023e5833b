"""Lloyd iterations from the same seeds: samestep, faiss-cpu and scikit-learn, inertia beside every time.

Each contender does the same work: `--iterations` passes over all points from the same first centroids, then the
codes of all points under its last centroids. Contenders take turns within each repeat, so that a change of the
machine's load meets all of them; the median over repeats is reported, and the inertia is computed in one way for
all. samestep's time includes its checks of the data and its final figures.

    python benchmarks/kmeans.py --scale 1 --repeats 5 --threads 1 2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from samestep import kmeans

N_POINTS = {(32, 256): 200_000, (32, 1024): 200_000, (32, 4096): 100_000,
            (128, 256): 200_000, (128, 1024): 100_000, (128, 4096): 100_000,
            (768, 256): 100_000, (768, 1024): 50_000, (768, 4096): 25_000}  # fmt: skip

Run = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


def data(n_points: int, dim: int, seed: int = 0) -> np.ndarray:
    """Return clustered rows whose spectrum decays, as embeddings' does."""
    draw = np.random.default_rng(seed)
    scale = (1 + np.arange(dim)) ** -0.5
    centres = draw.standard_normal((500, dim), dtype=np.float32) * 1.5
    rows = centres[draw.integers(0, 500, n_points)] + draw.standard_normal((n_points, dim), dtype=np.float32)
    return (rows * scale).astype(np.float32)


def run_samestep(points: np.ndarray, seeds: np.ndarray, iterations: int, threads: int) -> np.ndarray:
    table = torch.from_numpy(points)
    found = kmeans.fit(
        table, len(seeds), seeding=torch.from_numpy(seeds), max_iterations=iterations, tolerance=0.0, empty="keep",
        n_threads=threads,
    )  # fmt: skip
    return found.centroids.numpy()


def run_overrelaxed(points: np.ndarray, seeds: np.ndarray, iterations: int, threads: int) -> np.ndarray:
    table = torch.from_numpy(points)
    found = kmeans.fit(
        table, len(seeds), seeding=torch.from_numpy(seeds), max_iterations=iterations, tolerance=0.0, empty="keep",
        n_threads=threads, acceleration="overrelaxed",
    )  # fmt: skip
    return found.centroids.numpy()


def run_faiss(points: np.ndarray, seeds: np.ndarray, iterations: int, threads: int) -> np.ndarray:
    import faiss

    faiss.omp_set_num_threads(threads)
    peer = faiss.Kmeans(points.shape[1], len(seeds), niter=iterations, max_points_per_centroid=len(points))
    peer.train(points, init_centroids=seeds)
    peer.index.search(points, 1)
    return peer.centroids


def run_sklearn(points: np.ndarray, seeds: np.ndarray, iterations: int, threads: int) -> np.ndarray:
    import warnings

    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = KMeans(len(seeds), init=seeds, n_init=1, max_iter=iterations, tol=0.0, algorithm="lloyd")
        peer.fit(points)
    return peer.cluster_centers_


RUNS: dict[str, Run] = {
    "samestep": run_samestep,
    "samestep overrelaxed": run_overrelaxed,
    "faiss": run_faiss,
    "sklearn": run_sklearn,
}


def measure(dim: int, k: int, n_points: int, threads: int, options: argparse.Namespace) -> dict[str, object]:
    """Return the median seconds and the inertia of each contender in one cell."""
    points = data(n_points, dim)
    seeds = np.ascontiguousarray(points[np.random.default_rng(1).choice(n_points, k, replace=False)])
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {name: [] for name in options.contenders}
    inertia: dict[str, float] = {}
    for repeat in range(options.repeats):
        for name in options.contenders:
            start = time.perf_counter()
            centroids = RUNS[name](points, seeds, options.iterations, threads)
            seconds[name].append(time.perf_counter() - start)
            if repeat == 0:
                _, gaps = kmeans.assign(points, torch.from_numpy(np.asarray(centroids, dtype=np.float32)))
                inertia[name] = float(gaps.double().sum())
    rows = {
        name: {"seconds": statistics.median(times), "all_seconds": times, "inertia": inertia[name]}
        for name, times in seconds.items()
    }
    return {"n_points": n_points, "dim": dim, "n_centroids": k, "threads": threads, "contenders": rows}


def show(cell: dict[str, object]) -> None:
    contenders: dict[str, dict[str, float]] = cell["contenders"]  # type: ignore[assignment]
    head = f"n {cell['n_points']:>7} d {cell['dim']:>4} k {cell['n_centroids']:>5} threads {cell['threads']}"
    parts = [
        f"{name} {row['seconds']:.3f} s (inertia {row['inertia']:.6g})" for name, row in contenders.items()
    ]
    if {"samestep", "faiss"} <= set(contenders):
        parts.append(f"{contenders['faiss']['seconds'] / contenders['samestep']['seconds']:.2f}x faiss")
    print(head, "|", " | ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of each cell's points")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 128, 768])
    parser.add_argument("--centroids", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument(
        "--contenders", nargs="+", default=["samestep", "faiss", "sklearn"], choices=list(RUNS)
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kmeans.json")
    options = parser.parse_args()
    cells = []
    for threads in options.threads:
        for dim in options.dims:
            for k in options.centroids:
                n_points = max(int(N_POINTS[dim, k] * options.scale), 2 * k)
                cells.append(measure(dim, k, n_points, threads, options))
                show(cells[-1])
    record = {
        "command": " ".join(["python", "benchmarks/kmeans.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()} {platform.system()}, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {name: version(name) for name in ("torch", "numpy", "faiss-cpu", "scikit-learn")},
        "iterations": options.iterations,
        "repeats": options.repeats,
        "cells": cells,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
