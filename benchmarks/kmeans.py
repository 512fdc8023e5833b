"""k-means beside faiss-cpu, scikit-learn, superkmeans and vector-quantize-pytorch: ``python benchmarks/kmeans.py``.

Contenders take turns within each repeat, so that a change of the machine's load meets all of them; medians of
repeats are kept, and the inertia, computed in one way for all, stands beside every time.

    cells      `--iterations` Lloyd passes over all points from the same seeds, then the codes of all points;
               superkmeans takes no seeds and draws its own. samestep's time has its checks of the data in it.
    quality    seconds from raw points to centroids at least as good as each peer's, seeding included; as random
               seeds give or take more than a pass does, both inertias are means over the same number of seeds
    residual   three levels of 256 in 768 dimensions, to an error no larger than each peer's
    workers    two workers with a thread each beside one worker with two threads, in the same processes
    memory     peak memory beyond a memory-mapped table of 1,000,000 x 768, K = 4,096, in a process of its own
    growth     seconds of one pass against points, dimensions, centroids and workers

Parts may be run one at a time: rows of earlier runs stay in the file. ``--quick`` runs a little of each within a
minute, next to the results of full runs.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep import codebooks, kmeans, launch
from samestep.group import Group
from samestep.pooling import alone
from samestep.reduce import pool

RESULTS = Path(__file__).parent / "results"
ESCO = Path(__file__).parents[2] / "shared" / "data" / "esco_skills_minilm.npz"
N_POINTS = {(32, 256): 200_000, (32, 1024): 200_000, (32, 4096): 100_000,
            (128, 256): 200_000, (128, 1024): 100_000, (128, 4096): 100_000,
            (768, 256): 100_000, (768, 1024): 50_000, (768, 4096): 25_000}  # fmt: skip
PARTS = ("cells", "quality", "residual", "workers", "memory", "growth")
PACKAGES = ("torch", "numpy", "faiss-cpu", "scikit-learn", "superkmeans", "vector-quantize-pytorch")

Array = np.ndarray
Run = Callable[[Array, Array, int, int], Array]


def data(n_points: int, dim: int, seed: int = 0) -> Array:
    """Return clustered rows whose spectrum decays, as embeddings' does."""
    draw = np.random.default_rng(seed)
    scale = (1 + np.arange(dim)) ** -0.5
    centres = draw.standard_normal((500, dim), dtype=np.float32) * 1.5
    rows = centres[draw.integers(0, 500, n_points)] + draw.standard_normal((n_points, dim), dtype=np.float32)
    return (rows * scale).astype(np.float32)


def pick(points: Array, k: int, seed: int = 1) -> Array:
    chosen = np.random.default_rng(seed).choice(len(points), k, replace=False)
    return np.ascontiguousarray(points[chosen])


def inertia_of(points: Array, centroids: Array) -> float:
    _, gaps = kmeans.assign(points, torch.from_numpy(np.asarray(centroids, dtype=np.float32)))
    return float(gaps.double().sum())


def run_samestep(points: Array, seeds: Array, iterations: int, threads: int) -> Array:
    found = kmeans.fit(
        torch.from_numpy(points), len(seeds), seeding=torch.from_numpy(seeds), max_iterations=iterations,
        tolerance=0.0, empty="keep", n_threads=threads,
    )  # fmt: skip
    return found.centroids.numpy()


def run_faiss(
    points: Array, seeds: Array | None, iterations: int, threads: int, k: int = 0, seed: int = 1234
) -> Array:
    import faiss

    faiss.omp_set_num_threads(threads)
    k = k if seeds is None else len(seeds)
    peer = faiss.Kmeans(
        points.shape[1], k, niter=iterations, seed=seed, max_points_per_centroid=len(points),
        min_points_per_centroid=1,
    )  # fmt: skip
    peer.train(points, init_centroids=seeds)
    peer.index.search(points, 1)
    return peer.centroids


def run_sklearn(points: Array, seeds: Array, iterations: int, threads: int) -> Array:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = KMeans(len(seeds), init=seeds, n_init=1, max_iter=iterations, tol=0.0, algorithm="lloyd")
        peer.fit(points)
    return peer.cluster_centers_


def super_train(points: Array, k: int, threads: int, **options: Any) -> Array:
    from superkmeans import SuperKMeans

    peer = SuperKMeans(n_clusters=k, dimensionality=points.shape[1], n_threads=threads, **options)
    return np.asarray(peer.train(points))


def run_super(points: Array, seeds: Array, iterations: int, threads: int) -> Array:
    from superkmeans import SuperKMeans

    peer = SuperKMeans(
        n_clusters=len(seeds), dimensionality=points.shape[1], n_threads=threads, iters=iterations,
        hierarchical=False, sampling_fraction=1.0, max_points_per_cluster=len(points), early_termination=False,
    )  # fmt: skip
    centroids = np.asarray(peer.train(points))
    peer.assign(points, centroids)
    return centroids


def run_vq(points: Array, seeds: Array, iterations: int, threads: int) -> Array:
    from vector_quantize_pytorch.vector_quantize_pytorch import kmeans as peer

    torch.set_num_threads(threads)
    table, first = torch.from_numpy(points).unsqueeze(0), torch.from_numpy(seeds).unsqueeze(0)
    means, _ = peer(table, len(seeds), num_iters=iterations, sample_fn=lambda *_: first)
    torch.cdist(table, means).argmin(-1)
    return means[0].numpy()


RUNS: dict[str, Run] = {
    "samestep": run_samestep,
    "faiss": run_faiss,
    "sklearn": run_sklearn,
    "superkmeans": run_super,
    "vector-quantize": run_vq,
}


def take_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return each contender's median seconds, and what it gave."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    given: dict[str, Any] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            given[name] = run()
            seconds[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(times), 4) for name, times in seconds.items()}, given


def cell(dim: int, k: int, n_points: int, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare fixed passes from the same seeds."""
    points = data(n_points, dim)
    seeds = pick(points, k)
    torch.set_num_threads(threads)
    names = [
        name
        for name in options.contenders
        # It holds several N x K tables.
        if name != "vector-quantize" or n_points * k <= 2**26
    ]
    runs = {name: functools.partial(RUNS[name], points, seeds, options.iterations, threads) for name in names}
    seconds, given = take_turns(runs, options.repeats)
    return {
        "n_points": n_points, "dim": dim, "n_centroids": k, "threads": threads, "iterations": options.iterations,
        "repeats": options.repeats, "seconds": seconds,
        "inertia": {name: inertia_of(points, table) for name, table in given.items()},
        "times_faster": {name: round(t / seconds["samestep"], 2) for name, t in seconds.items()},
    }  # fmt: skip


def fewest(reach: Callable[[int], float], goal: float, most: int = 40) -> int | None:
    """Return the fewest passes that reach a goal, by halving; None when `most` do not."""
    if reach(most) > goal:
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if reach(middle) <= goal:
            high = middle
        else:
            low = middle + 1
    return high


def quality(name: str, points: Array, k: int, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the time to centroids as good as each peer's, seeding included."""
    torch.set_num_threads(threads)
    table, n = torch.from_numpy(points), len(points)

    def ours(passes: int, seed: int) -> Array:
        found = kmeans.fit(
            table, k, seeding="random", seed=seed, max_iterations=passes, tolerance=0.0,
            acceleration="overrelaxed", n_threads=threads,
        )  # fmt: skip
        return found.centroids.numpy()

    def mean(train: Callable[[int], Array]) -> float:
        return statistics.mean(inertia_of(points, train(seed)) for seed in range(1, options.seeds + 1))

    reach = functools.cache(lambda passes: mean(lambda seed: ours(passes, seed)))
    full = {"sampling_fraction": 1.0, "max_points_per_cluster": n, "early_termination": False, "iters": 25}
    peers: dict[str, Callable[[int], Array]] = {
        "faiss 25": lambda seed: run_faiss(points, None, 25, threads, k, seed),
        "superkmeans full 25": lambda seed: super_train(
            points, k, threads, seed=seed, hierarchical=False, **full
        ),
        "superkmeans flat": lambda seed: super_train(points, k, threads, seed=seed, hierarchical=False),
        "superkmeans hierarchical": lambda seed: super_train(
            points, k, threads, seed=seed, hierarchical=True
        ),
    }
    rows: dict[str, dict[str, Any]] = {}
    for peer, train in peers.items():
        goal = mean(train)
        passes = fewest(reach, goal)
        rows[peer] = {"inertia": goal, "passes": passes}
        if passes is not None:
            turns = {peer: functools.partial(train, 1), "samestep": functools.partial(ours, passes, 1)}
            seconds, _ = take_turns(turns, options.repeats)
            rows[peer] |= {
                "samestep_inertia": reach(passes), "seconds": seconds[peer],
                "samestep_seconds": seconds["samestep"],
                "times_faster": round(seconds[peer] / seconds["samestep"], 2),
            }  # fmt: skip
    return {
        "data": name, "n_points": n, "dim": points.shape[1], "n_centroids": k, "threads": threads,
        "seeds": options.seeds, "repeats": options.repeats, "peers": rows,
    }  # fmt: skip


def peer_levels(points: Array, train: Callable[[Array], Array]) -> list[torch.Tensor]:
    """Return three levels by a peer's k-means; what a level leaves is found by samestep, fast."""
    left, levels = points, []
    for _ in range(3):
        centroids = np.asarray(train(left), dtype=np.float32)
        levels.append(torch.from_numpy(centroids))
        codes, _ = kmeans.assign(left, levels[-1])
        left = left - centroids[codes.numpy()]
    return levels


def run_grid(points: Array, k: int, threads: int, batches: int = 30, batch_rows: int = 2048) -> Array:
    """Train as snap-research/GRID does on one process: k-means++ on a buffer, then batches with running counts."""
    torch.set_num_threads(threads)
    rows, draw = torch.from_numpy(points), torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows), generator=draw)
    buffer = rows[order[:3072]]
    centroids = buffer[:1].clone()
    for _ in range(k - 1):
        closest = torch.cdist(buffer, centroids).square().amin(1)
        centroids = torch.cat([centroids, buffer[torch.multinomial(closest, 1, generator=draw)]])
    seen = torch.zeros(k)
    for number in range(batches):
        begin = number * batch_rows % max(len(rows) - batch_rows, 1)
        batch = rows[order[begin : begin + batch_rows]]
        codes = torch.cdist(batch, centroids).argmin(1)
        counts = torch.bincount(codes, minlength=k).float()
        sums = torch.zeros_like(centroids).index_add_(0, codes, batch)
        seen += counts
        share = (counts / seen.clamp_min(1)).unsqueeze(1)
        centroids = centroids + share * (sums / counts.clamp_min(1).unsqueeze(1) - centroids)
    return centroids.numpy()


def residual(n_points: int, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare the time to residual codebooks of no larger error."""
    torch.set_num_threads(threads)
    points = data(n_points, 768)
    spread = float(np.square(points - points.mean(0), dtype=np.float64).sum())

    def error(levels: list[torch.Tensor]) -> float:
        decoded = codebooks.decode(codebooks.encode(points, levels), levels).numpy()
        return float(np.square(points - decoded, dtype=np.float64).sum()) / spread

    def ours(passes: int) -> codebooks.Codebooks:
        return codebooks.fit(
            torch.from_numpy(points), [256] * 3, max_iterations=passes, tolerance=0.0,
            acceleration="overrelaxed", n_threads=threads,
        )  # fmt: skip

    reach = functools.cache(lambda passes: ours(passes).relative_errors[-1])
    peers = {
        f"faiss {options.residual_iterations}": lambda: peer_levels(
            points, lambda left: run_faiss(left, None, options.residual_iterations, threads, 256)
        ),
        "superkmeans flat": lambda: peer_levels(
            points, lambda left: super_train(left, 256, threads, hierarchical=False)
        ),
        "vector-quantize 10": lambda: peer_levels(
            points, lambda left: run_vq(left, pick(left, 256), 10, threads)
        ),
        "GRID-style batches": lambda: peer_levels(points, lambda left: run_grid(left, 256, threads)),
    }
    rows = {}
    for peer, train in peers.items():
        goal = error(train())
        passes = fewest(reach, goal)
        if passes is None:
            rows[peer] = {"error": goal, "passes": None}
            continue
        turns = {peer: train, "samestep": functools.partial(ours, passes)}
        seconds, given = take_turns(turns, options.repeats)
        rows[peer] = {
            "passes": passes, "seconds": seconds[peer], "samestep_seconds": seconds["samestep"],
            "error": error(given[peer]), "samestep_error": given["samestep"].relative_errors[-1],
            "times_faster": round(seconds[peer] / seconds["samestep"], 2),
        }  # fmt: skip
    return {"n_points": n_points, "dim": 768, "threads": threads, "repeats": options.repeats, "peers": rows}


def in_workers(
    group: Group, n_points: int, dim: int, k: int, iterations: int, repeats: int
) -> dict[str, Any]:
    """Time the workers together, each with its share, then the main one with all rows and as many threads."""
    points = torch.from_numpy(data(n_points, dim))
    share = points.chunk(group.world_size)[group.rank]
    seeds = points[:k].clone()
    together, single, bits = [], [], torch.empty(0)
    for _ in range(repeats):
        for times, whole in ((together, False), (single, True)):
            group.barrier()
            start = time.perf_counter()
            if not whole or group.is_main:
                found = kmeans.fit(
                    points if whole else share, k, seeding=seeds, max_iterations=iterations, tolerance=0.0,
                    empty="keep", pool=alone if whole else pool(group), n_threads=group.world_size if whole else 1,
                )  # fmt: skip
                times.append(time.perf_counter() - start)
                if not whole:
                    bits = found.centroids
                elif not torch.equal(bits, found.centroids):
                    raise RuntimeError("the split of the rows changed the centroids")
    group.barrier()
    if not group.is_main:
        return {}
    apart, joined = statistics.median(single), statistics.median(together)
    return {
        "n_points": n_points, "dim": dim, "n_centroids": k, "iterations": iterations, "repeats": repeats,
        "workers_seconds": round(joined, 4), "threads_seconds": round(apart, 4), "ratio": round(joined / apart, 3),
    }  # fmt: skip


def peak(path: str, n_points: int, dim: int, k: int, iterations: int, threads: int) -> dict[str, Any]:
    """Return the memory that a fit takes beside the mapped file, in MB, by the kernel's private pages."""
    status = Path("/proc/self/status")

    def private() -> int:
        found = re.search(r"RssAnon:\s+(\d+)", status.read_text())
        return int(found.group(1)) if found else 0

    torch.set_num_threads(threads)
    small = torch.zeros(64, dim)
    kmeans.fit(small, 2, max_iterations=1, n_threads=threads)  # what loads once is not the fit's
    before, most, done = private(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    points = np.memmap(path, dtype=np.float32, mode="r", shape=(n_points, dim))
    start = time.perf_counter()
    kmeans.fit(points, k, seeding="random", max_iterations=iterations, tolerance=0.0, n_threads=threads)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {
        "n_points": n_points, "dim": dim, "n_centroids": k, "iterations": iterations, "threads": threads,
        "peak_mb": round((most[0] - before) / 1024, 1), "seconds": round(seconds, 2),
    }  # fmt: skip


def memory(n_points: int, dim: int, k: int, iterations: int, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points.f32"
        draw = np.random.default_rng(0)
        with path.open("wb") as file:
            for begin in range(0, n_points, 20_000):
                draw.standard_normal((min(20_000, n_points - begin), dim), dtype=np.float32).tofile(file)
        values = f"{str(path)!r}, {n_points}, {dim}, {k}, {iterations}, {threads}"
        call = f"import kmeans; print(kmeans.json.dumps(kmeans.peak({values})))"
        out = subprocess.run(
            [sys.executable, "-c", call],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(out.stdout.splitlines()[-1])


def one_pass(n_points: int, dim: int, k: int, repeats: int) -> dict[str, float]:
    """Return seconds of one more Lloyd pass, by a fit of two passes beside a fit of seven."""
    points = data(n_points, dim)
    seeds = pick(points, k)
    torch.set_num_threads(1)
    runs = {
        f"{name} {passes}": functools.partial(RUNS[name], points, seeds, passes, 1)
        for name in ("samestep", "faiss")
        for passes in (2, 7)
    }
    seconds, _ = take_turns(runs, repeats)
    return {
        name: round((seconds[f"{name} 7"] - seconds[f"{name} 2"]) / 5, 5) for name in ("samestep", "faiss")
    }


def growing_workers(group: Group, n_points: int, repeats: int) -> float:
    points = torch.from_numpy(data(n_points, 128)).chunk(group.world_size)[group.rank]
    seeds = torch.from_numpy(data(1024, 128, seed=3))
    times = []
    for _ in range(repeats):
        group.barrier()
        start = time.perf_counter()
        kmeans.fit(
            points, 1024, seeding=seeds, max_iterations=5, tolerance=0.0, empty="keep", pool=pool(group),
            n_threads=1,
        )  # fmt: skip
        times.append(time.perf_counter() - start)
    return statistics.median(times) / 5


def growth(axis: str, quick: bool, repeats: int) -> dict[str, Any]:
    n, dim, k = (5_000, 64, 128) if quick else (40_000, 128, 512)
    steps = {
        "points": [n // 4, n // 2, n, 2 * n],
        "dim": [32, 64, 128, 256, 512],
        "centroids": [64, 256, 1024, 4096],
    }
    if axis == "workers":
        sizes = [1, 2] if quick else [1, 2, 4]
        rows = {
            size: {
                "samestep": round(launch.run(growing_workers, size, n, repeats, timeout_seconds=300)[0], 5)
            }
            for size in sizes
        }
        return {"axis": axis, "fixed": {"points": n, "dim": 128, "centroids": 1024}, "rows": rows}
    sizes = steps[axis][:3] if quick else steps[axis]
    base = {"points": n, "dim": dim, "centroids": k}
    rows = {size: one_pass(*(base | {axis: size}).values(), repeats) for size in sizes}
    return {"axis": axis, "fixed": base, "rows": rows}


def plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(14, 8))
    rows = list(record["cells"].values())
    peers = ("faiss", "sklearn", "superkmeans", "vector-quantize")
    for i, peer in enumerate(peers):
        at = [j + 0.2 * (i - 1.5) for j, row in enumerate(rows) if peer in row["times_faster"]]
        axes[0, 0].bar(
            at, [row["times_faster"][peer] for row in rows if peer in row["times_faster"]], 0.2, label=peer
        )
    labels = [f"d{row['dim']} K{row['n_centroids']} t{row['threads']}" for row in rows]
    axes[0, 0].set_xticks(range(len(rows)), labels, rotation=90, fontsize=6)
    axes[0, 0].set(
        yscale="log", ylabel="peer's seconds / samestep's", title="the same passes from the same seeds"
    )
    bars = [
        (f"{row['data']} K{row['n_centroids']}\n{peer}", found["times_faster"])
        for row in record["quality"].values()
        for peer, found in row["peers"].items()
        if found["passes"]
    ]
    axes[0, 1].barh([name for name, _ in bars], [value for _, value in bars])
    axes[0, 1].tick_params(axis="y", labelsize=5)
    axes[0, 1].set(xlabel="peer's seconds / samestep's", title="to equal inertia, seeding included")
    for axis in (axes[0, 0].axhline, axes[0, 1].axvline):
        axis(1.0, color="black", linewidth=0.8)
    places = {"points": axes[0, 2], "dim": axes[1, 0], "centroids": axes[1, 1], "workers": axes[1, 2]}
    for name, place in places.items():
        found = record["growth"].get(name, {"rows": {}})["rows"]
        for peer in ("samestep", "faiss"):
            line = [(int(size), row[peer]) for size, row in found.items() if peer in row]
            if line:
                place.plot(*zip(*line), marker="o", label=peer)
                place.legend()
        place.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds of a pass")
    axes[0, 0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measure(options: argparse.Namespace, record: dict[str, Any], keep: Callable[[], None]) -> None:
    quick = options.quick

    def put(part: str, name: str, row: dict[str, Any]) -> None:
        record[part][name] = row
        print(part, name, json.dumps(row), flush=True)
        keep()

    for threads in options.threads:
        for (dim, k), n in N_POINTS.items():
            if "cells" in options.parts and dim in options.dims and k in options.centroids:
                n_points = max(int(n * options.scale), 2 * k)
                put("cells", f"d{dim} K{k} threads {threads}", cell(dim, k, n_points, threads, options))
        sets: list[tuple[str, Callable[[], Array]]] = [
            ("synthetic", lambda: data(max(int(100_000 * options.scale), 15_000), 128))
        ]
        if ESCO.exists():
            sets.insert(0, ("ESCO", lambda: np.load(ESCO)["embeddings"].astype(np.float32)))
        for name, load in [pair for pair in sets if pair[0] in options.sets and "quality" in options.parts]:
            for k in [k for k in ((256,) if quick else (256, 1024)) if k in options.centroids]:
                put("quality", f"{name} K{k} threads {threads}", quality(name, load(), k, threads, options))
        if "residual" in options.parts:
            put("residual", f"threads {threads}", residual(int(50_000 * options.scale), threads, options))
    if "workers" in options.parts:
        for dim, k, n in ((32, 1024, 100_000), (128, 256, 100_000), (768, 1024, 20_000)):
            arguments = (int(n * options.scale) + k, dim, k, 5, options.repeats + 2)
            put("workers", f"d{dim} K{k}", launch.run(in_workers, 2, *arguments, timeout_seconds=600)[0])
    if "memory" in options.parts:
        shape = (20_000, 128, 256, 2) if quick else (1_000_000, 768, 4096, 1)
        put("memory", "x".join(map(str, shape[:3])), memory(*shape, threads=max(options.threads)))
    if "growth" in options.parts:
        for axis in ("points", "dim", "centroids", "workers"):
            put("growth", axis, growth(axis, quick, options.repeats))


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a little of everything, within a minute")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of each part's points")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--residual-iterations", type=int, default=25, help="of faiss, on each level")
    parser.add_argument("--seeds", type=int, default=3, help="of each contender of quality")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 128, 768])
    parser.add_argument("--centroids", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--sets", nargs="+", default=["ESCO", "synthetic"])
    parser.add_argument("--contenders", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.scale, options.repeats, options.iterations, options.residual_iterations = 0.03, 1, 3, 5
        options.threads, options.centroids, options.seeds = [1], [256, 1024], 1
    options.out = options.out or RESULTS / ("kmeans_quick.json" if options.quick else "kmeans.json")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    record: dict[str, Any] = {part: {} for part in PARTS}
    if options.out.exists():
        record |= json.loads(options.out.read_text())
    record |= {
        "command": "python benchmarks/kmeans.py "
        + ("--quick" if options.quick else "--parts <part>, some with --scale"),
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
    }

    def keep() -> None:
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")

    measure(options, record, keep)
    keep()
    plot(record, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
