"""300 steps of every kind of job at 1, 2, 3, 4 and 8 workers: one digest each. ``python benchmarks/invariance.py``.

A digest covers parameters, buffers, optimizer state, and the loss, norm, rate and further sums of every step.
Results are kept in a JSON file, job by job, so that a long campaign may be run in slices (``--jobs``,
``--seconds``); the table beside it is written from all that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pickle
import platform
import sys
import time
from pathlib import Path
from typing import Any

from samestep import environment, launch
from samestep.group import Group

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from workloads import JOBS, SHARDS, Job, train

RESULTS = Path(__file__).parent / "results"
ALONE = "N = 1"


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


def runs(number: int, job: Job, steps: int) -> dict[str, Any]:
    """Return what is run of a job: a function that makes each result, by the name of the layout."""
    found: dict[str, Any] = {f"N = {n}": lambda n=n: at(n, job, steps) for n in (1, 2, 3, 4, 8)}
    found["N = 4, 1, 3, 2 in turn"] = lambda: changing(job, steps)
    if number % 4 == 0:
        found["N = 2, 2 loader processes"] = lambda: at(2, job, steps, num_workers=2)
    if number % 4 == 1:
        found["N = 4, buckets of 1 kB"] = lambda: at(4, job, steps, bucket_cap_mb=0.001)
    if number == 2:
        found["N = 5"] = lambda: at(5, job, steps)
    return found


def table(found: dict[str, Any]) -> str:
    names = [ALONE, *(f"N = {n}" for n in (2, 3, 4, 8)), "N = 4, 1, 3, 2 in turn"]
    lines = [
        f"# The same bits at any number of workers: {found['steps']} steps, {SHARDS} shards",
        "",
        f"`{found['command']}`, torch {found['environment']['torch']}, gloo, 1 thread per worker, "
        f"{found['machine']} with {found['environment']['cpu_capability']}, {found['date']}. The first digest is "
        "that of parameters, buffers and optimizer state, the second that of all logged figures. Equal to one "
        "worker's: `=`.",
        "",
        f"| job | {' | '.join(names)} | others | loss, first and last |",
        f"|{'---|' * (len(names) + 3)}",
    ]
    for job, rows in found["jobs"].items():
        right = rows.get(ALONE, {}).get("digest")

        def cell(row: dict[str, Any] | None, right: str | None = right) -> str:
            if row is None:
                return "not run"
            return "=" if row["digest"] == right else f"`{row['digest']}`"

        cells = [f"`{right}`", *(cell(rows.get(name)) for name in names[1:])]
        others = "; ".join(f"{name}: {cell(row)}" for name, row in rows.items() if name not in names)
        first, last = rows.get(ALONE, {}).get("losses", (float("nan"),) * 2)
        lines.append(f"| {job} | {' | '.join(cells)} | {others} | {first:.4f}, {last:.4f} |")
    every = [
        (rows.get(ALONE, {}).get("digest"), row["digest"])
        for rows in found["jobs"].values()
        for row in rows.values()
    ]
    lines += [
        "",
        f"Runs: {len(every)}. Digests that differ from one worker's: {sum(a != b for a, b in every)}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, nargs="*", default=list(range(len(JOBS))), help="by number")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further run after that")
    parser.add_argument("--out", type=Path, default=RESULTS / "invariance.json")
    args = parser.parse_args()
    began = time.monotonic()
    found = json.loads(args.out.read_text()) if args.out.exists() else {"jobs": {}}
    found |= {
        "command": f"python benchmarks/invariance.py --steps {args.steps}",
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "steps": args.steps,
        "environment": environment.fingerprint(),
    }
    args.out.parent.mkdir(exist_ok=True)
    for number in args.jobs:
        rows = found["jobs"].setdefault(str(JOBS[number]), {})
        for name, run in runs(number, JOBS[number], args.steps).items():
            if name in rows or time.monotonic() - began > args.seconds:
                continue
            result = run()
            rows[name] = {"digest": result["digest"], "losses": result["losses"]}
            print(JOBS[number], name, rows[name], flush=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(found))
    return int(
        any(
            row["digest"] != rows[ALONE]["digest"] for rows in found["jobs"].values() for row in rows.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
