"""Large-minibatch SGD on Fashion-MNIST: batch 1,024 against batch 64, with and without scaling and warm-up.

The recipe image-classification as people run it, with an MLP on all 60,000 images; same epochs, momentum, decay and
cosine everywhere. Four settings, three seeds each:

    small           batch 64 at the reference rate
    scaled, warm    batch 1,024 at 16 times the rate, reached from the reference rate over 4 epochs
    scaled, cold    the same without warm-up
    not scaled      batch 1,024 at the reference rate

A run that diverges counts as what guessing gives. The claim: "scaled, warm" is within 0.5 points of "small" in the
mean over the seeds, and the other two are not. Runs that are in the file already are not repeated, so that it can
be filled in slices:

    OMP_NUM_THREADS=1 python benchmarks/large_batch.py --data DIR --out benchmarks/results/large_batch.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

BAR = 0.5
SEEDS = (0, 1, 2)
GUESSING = 10.0
COMMON = {
    "model": "mlp", "hidden": [256, 256, 256], "epochs": 12, "reference_lr": 0.02, "reference_batch_size": 64,
    "warmup_epochs": 4, "nesterov": False, "weight_decay": 5e-4, "audit_every": 0, "shards": 1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "small": {"global_batch_size": 64},
    "scaled, warm": {"global_batch_size": 1024},
    "scaled, cold": {"global_batch_size": 1024, "warmup_epochs": 0},
    "not scaled": {"global_batch_size": 1024, "scaling_rule": "constant"},
}


def train(data: Path, variant: str, seed: int) -> dict[str, Any]:
    """Run the recipe in a process of its own and return its curve and figures."""
    settings = {**COMMON, **VARIANTS[variant], "seed": seed, "data": str(data)}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = [
            sys.executable,
            "-m",
            "samestep",
            "train",
            "image-classification",
            *words,
            "--out",
            str(folder),
        ]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        diverged = done.returncode != 0 and "finite" in done.stderr
        if done.returncode and not diverged:
            raise RuntimeError(done.stderr)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        quality = {} if diverged else json.loads((folder / "quality.json").read_text())
    curve = [100 * row["test_accuracy"] for row in rows if "test_accuracy" in row]
    return {
        "variant": variant,
        "seed": seed,
        "accuracy": GUESSING if diverged else 100 * quality["test_accuracy"],
        "diverged": diverged,
        "steps": rows[-1]["step"],
        "accuracy_by_epoch": curve,
        "seconds": round(seconds, 1),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    means = {
        variant: statistics.mean(run["accuracy"] for run in runs if run["variant"] == variant)
        for variant in VARIANTS
    }
    below = {
        variant: round(means["small"] - mean, 3) for variant, mean in means.items() if variant != "small"
    }
    holds = below["scaled, warm"] <= BAR and all(below[v] > BAR for v in ("scaled, cold", "not scaled"))
    return {
        "mean_accuracy": {variant: round(mean, 3) for variant, mean in means.items()},
        "points_below_small": below,
        "bar_points": BAR,
        "holds": holds,
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "samestep"
    figure, axes = plt.subplots(figsize=(7, 4))
    texts = {
        "small": "batch 64",
        "scaled, warm": "batch 1,024, rate x 16, warm-up",
        "scaled, cold": "batch 1,024, rate x 16, no warm-up",
        "not scaled": "batch 1,024, rate not scaled",
    }
    for color, variant in zip(("#2459c4", "#2b7d57", "#b12a65", "#927009"), VARIANTS):
        mine = [run for run in runs if run["variant"] == variant]
        n_lost = sum(run["diverged"] for run in mine)
        mean = statistics.mean(run["accuracy"] for run in mine)
        label = f"{texts[variant]}: {mean:.2f} %" + (f" ({n_lost} of {len(mine)} diverged)" if n_lost else "")
        for i, run in enumerate(mine):
            curve = run["accuracy_by_epoch"]
            axes.plot(range(1, len(curve) + 1), curve, color=color, lw=1.3, label=label if i == 0 else None)
    axes.set(
        xlabel="epochs", ylabel="test accuracy, %", ylim=(70, 91), title="Fashion-MNIST, MLP, 3 seeds each"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with the four IDX files of Fashion-MNIST"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; filled up where it is there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after so long")
    parser.add_argument("--plot", type=Path, help="picture of the accuracy by epoch")
    arguments = parser.parse_args()
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    begun = time.perf_counter()
    for seed in SEEDS:
        for variant in VARIANTS:
            if any((run["variant"], run["seed"]) == (variant, seed) for run in runs):
                continue
            if time.perf_counter() - begun > arguments.seconds:
                print(f"{len(runs)} runs so far; go on with the same command")
                return
            runs.append(train(arguments.data, variant, seed))
            print(
                f"{variant:14s} seed {seed}: {runs[-1]['accuracy']:.2f} %, {runs[-1]['seconds']} s",
                flush=True,
            )
            write(arguments.out, runs)
    if arguments.plot:
        draw(runs, arguments.plot)
    print(json.dumps(json.loads(arguments.out.read_text())["summary"], indent=2))


def write(path: Path, runs: list[dict[str, Any]]) -> None:
    complete = len(runs) == len(SEEDS) * len(VARIANTS)
    report = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/large_batch.py --data fashion_mnist --out FILE",
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "data": "Fashion-MNIST, all 60,000 training and 10,000 test images",
        "common": COMMON,
        "variants": VARIANTS,
        "summary": summary(runs) if complete else None,
        "runs": runs,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
