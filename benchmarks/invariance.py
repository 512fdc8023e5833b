"""300 steps of every kind of job at 1, 2, 3, 4 and 8 workers: one digest each. ``python benchmarks/invariance.py``.

A digest covers parameters, buffers, optimizer state, and the loss, norm, rate and further sums of every step.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from samestep import launch
from samestep.group import Group

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from workloads import JOBS, SHARDS, Job, train

RESULTS = Path(__file__).parent / "results"


def run_job(group: Group, job: Job, steps: int, saved: bytes, options: dict[str, Any]) -> dict[str, Any]:
    found = train(group, job, steps, pickle.loads(saved), **options)
    return {**found, "state": pickle.dumps(found["state"])}


def at(
    world_size: int, job: Job, steps: int, saved: bytes = pickle.dumps(None), **options: Any
) -> dict[str, Any]:
    results = launch.run(run_job, world_size, job, steps, saved, options, timeout_seconds=3600)
    assert len({result["digest"] for result in results}) == 1
    return results[0]


def changing(job: Job, steps: int) -> dict[str, Any]:
    """Stop and go on at other numbers of workers: 4, 1, 3, 2."""
    saved, result = pickle.dumps(None), {}
    for place, world_size in enumerate((4, 1, 3, 2)):
        part = steps // 4 if place < 3 else steps - 3 * (steps // 4)
        result = at(world_size, job, part, saved)
        saved = result["state"]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--out", type=Path, default=RESULTS / "invariance.md")
    args = parser.parse_args()
    columns = [f"N = {n}" for n in args.world_sizes]
    lines = [
        f"# The same bits at any number of workers: {args.steps} steps, {SHARDS} shards",
        "",
        f"`python benchmarks/invariance.py --steps {args.steps}`, torch {torch.__version__}, gloo, 1 thread per "
        f"worker, {platform.processor() or platform.machine()}. The first digest is that of parameters, buffers "
        "and optimizer state, the second that of all logged figures. Equal to the first column: `=`.",
        "",
        f"| job | {' | '.join(columns)} | 4, 1, 3, 2 in turn | others | loss, first and last |",
        f"|{'---|' * (len(columns) + 4)}",
    ]
    parted = 0
    for number, job in enumerate(JOBS):
        results = [at(n, job, args.steps) for n in args.world_sizes]
        results.append(changing(job, args.steps))
        others = (
            {"2 loader processes, N = 2": at(2, job, args.steps, num_workers=2)} if number % 4 == 0 else {}
        )
        if number % 4 == 1:
            others["buckets of 1 kB, N = 4"] = at(4, job, args.steps, bucket_cap_mb=0.001)
        if number == 2:
            others["N = 5"] = at(5, job, args.steps)
        right = results[0]["digest"]
        parted += sum(result["digest"] != right for result in [*results, *others.values()])
        cells = [f"`{right}`", *("=" if r["digest"] == right else f"`{r['digest']}`" for r in results[1:])]
        rest = "; ".join(
            f"{name}: {'=' if r['digest'] == right else r['digest']}" for name, r in others.items()
        )
        first, last = results[0]["losses"]
        lines.append(f"| {job} | {' | '.join(cells)} | {rest} | {first:.4f}, {last:.4f} |")
        print(lines[-1], flush=True)
    lines += ["", f"Digests that differ from one worker's: {parted}."]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")
    return int(parted > 0)


if __name__ == "__main__":
    sys.exit(main())
