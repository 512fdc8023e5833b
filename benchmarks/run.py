"""All benchmarks in one run, and the table of what they found.

    python benchmarks/run.py            everything, into benchmarks/results/ (hours on a small machine)
    python benchmarks/run.py --quick    a little of each, into a folder of its own (under five minutes)
    python benchmarks/run.py --table    only write the table from the results that are there

Each figure is a ratio against a named peer, measured in the same run, in turn; see the head of each file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"

FULL: dict[str, list[str]] = {
    name: []
    for name in (
        "startup", "schedule", "momentum", "preview", "reduce", "step", "fingerprint", "start", "audit",
        "checkpoint", "kmeans", "invariance", "faults", "explain",
    )
}  # fmt: skip
QUICK = {
    "startup": ["--rounds", "3"],
    "schedule": ["--steps", "500", "--rounds", "3"],
    "momentum": ["--parameters", "10000000", "--rounds", "5"],
    "preview": ["--steps", "50000", "--rounds", "2"],
    "reduce": ["--megabytes", "1", "4", "--repeats", "5"],
    "step": ["--models", "MLP 1M", "--layouts", "2,2", "--seconds", "10", "--what", "times"],
    "fingerprint": ["--repeats", "5"],
    "audit": ["--quick"],
    "kmeans": ["--quick"],
}
WRITES = {
    "startup", "schedule", "momentum", "preview", "reduce", "step", "kmeans", "invariance", "fingerprint", "start",
    "audit", "checkpoint", "explain",
}  # fmt: skip


def rows(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield (claim, figure, bar, against, date) from the results in a folder."""
    for name, read in READERS.items():
        path = folder / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            yield from ((*row, found.get("date", "")) for row in read(found))


def _kmeans(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for threads in (1, 2):
        cells = [cell for cell in found["cells"].values() if cell["threads"] == threads]
        for peer in ("faiss", "sklearn", "superkmeans"):
            times = [cell["times_faster"][peer] for cell in cells if peer in cell["times_faster"]]
            if times:
                label = f"k-means, equal passes, {len(times)} cells, {threads} thread{'s' * (threads > 1)}"
                spread = f"{min(times):.2f} to {max(times):.2f} times faster"
                yield label, spread, "1.0; 1.2 at d <= 128" if peer == "faiss" else "", peer
    for name, cell in found.get("quality", {}).items():
        for peer, row in cell["peers"].items():
            if row.get("times_faster"):
                bar = "2.5" if peer.startswith("faiss") else ""
                yield (
                    f"k-means to equal inertia, {name}",
                    f"{row['times_faster']:.2f} times faster",
                    bar,
                    peer,
                )


def _step(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        if (row["world_size"], row["shards"]) == (2, 2):
            for mode, bar in (("fast", "1.02"), ("exact", "1.10")):
                yield (
                    f"step, {mode}, {row['model']}, 2 workers",
                    f"{row[mode + '_ratio']:.3f}",
                    bar,
                    "torch DDP",
                )


def _reduce(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for n in sorted({row["world_size"] for row in found["rows"]}):
        ratios = [row["tree_sum_ratio"] for row in found["rows"] if row["world_size"] == n]
        yield (
            f"ordered sum, {n} workers, median of {len(ratios)} sizes",
            f"{statistics.median(ratios):.2f}",
            "1.1",
            "dist.all_reduce",
        )


def _startup(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    seconds = {row["command"]: row["seconds"] for row in found["rows"]}
    added = seconds["import torch, samestep"] - seconds["import torch"]
    yield "import samestep, added to import torch", f"{1000 * added:.0f} ms", "50 ms", "import torch alone"
    yield (
        "samestep --help",
        f"{seconds['samestep --help']:.2f} s",
        "0.5 s",
        f"torchrun --help: {seconds['torchrun --help']:.2f} s",
    )


def _schedule(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        label = f"scheduler, {row['param_groups']} param groups, LR changes {row['lr_changes']}"
        yield label, f"{row['ratio']:.2f}", "", "LambdaLR"


def _momentum(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        label = f"momentum rescale of {row['n_parameters'] / 1e6:.0f} M elements"
        bar = "1.1" if row["n_parameters"] >= 1e8 else ""
        yield label, f"{row['ratio']:.2f}", bar, "one foreach pass"


def _preview(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    slowest = max(row["seconds"] for row in found["rows"] if row["steps"] == 50_000)
    yield "samestep schedule, 50,000 steps with picture", f"{slowest:.2f} s", "1 s", "none"


def _checkpoint(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        size = f"{row['million_parameters']} M parameters with AdamW"
        for what in ("save", "restore"):
            key = next((k for k in row if k.startswith(f"{what}_ratio")), None)
            if key and isinstance(row[key], int | float):
                yield (
                    f"checkpoint {what}, {size}",
                    f"{row[key]:.2f}",
                    "1.2",
                    "the faster of torch.save and DCP",
                )


def _fingerprint(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        yield f"fingerprint, {row['state']}", f"{row['ratio_to_sum']:.2f} of its speed", "0.6", "a plain sum"


def _audit(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        label = f"{row['parameters'] / 1e6:.0f} M parameters, {row['world_size']} workers"
        yield f"audit of every step, {label}", f"{row['every_step_percent']:.2f} %", "3 %", "the step itself"


def _explain(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    clean = [row for row in found["rows"] if "false_alarms" in row]
    alarms, n = (sum(row[key] for row in clean) for key in ("false_alarms", "comparisons"))
    yield f"explain, {n} clean comparisons", f"{alarms} false alarms", "0", "float64, 1e-9"
    for row in found["rows"]:
        if "named_rightly" in row:
            told = f"{row['named_rightly']} of {row['comparisons']} named rightly"
            yield "explain, planted faults", told, "all", "stage, tensor, ranks, cause, sentence"


def _start(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in found["rows"]:
        size = f"{row['n_parameters'] / 1e6:.0f} M parameters in {row['n_tensors']} tensors"
        for name in ("broadcast", "verified"):
            words = "start.broadcast" + (" with its proof" if name == "verified" else "")
            yield f"{words}, {size}", f"{row[name + '_ratio']:.2f}", "1.1", "one flat broadcast"


def _faults(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    yield (
        f"runs killed and moved ({found['faults']} faults)",
        f"{found['identical']} of {found['runs']} identical",
        "all",
        "the undisturbed run",
    )


def _invariance(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    jobs = found["jobs"]
    runs = sum(len(job) for job in jobs.values())
    yield (
        f"{found['steps']} steps, {len(jobs)} jobs, {runs} layouts",
        "one digest per job",
        "all",
        "one worker",
    )


READERS = {
    "step": _step, "reduce": _reduce, "kmeans": _kmeans, "checkpoint": _checkpoint, "schedule": _schedule,
    "momentum": _momentum, "preview": _preview,
    "fingerprint": _fingerprint, "audit": _audit, "start": _start, "startup": _startup, "faults": _faults,
    "invariance": _invariance, "explain": _explain,
}  # fmt: skip


def table(folder: Path) -> str:
    lines = ["| claim | figure | bar | against | date |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows(folder)]
    return "\n".join(lines) + "\n"


def run(quick: bool, folder: Path) -> None:
    for name, options in (QUICK if quick else FULL).items():
        begin = time.perf_counter()
        out = ["--out", str(folder / f"{name}.json")] if name in WRITES else []
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options, *out], check=False)
        print(f"   {time.perf_counter() - begin:.0f} s, exit code {done.returncode}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a little of each")
    parser.add_argument("--table", action="store_true", help="only the table")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="samestep-bench-")) if options.quick else RESULTS
    if not options.table:
        run(options.quick, folder)
    text = (
        "# What was measured\n\nBy `benchmarks/run.py`; conditions are in each JSON file beside.\n\n"
        + table(folder)
    )
    (folder / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
