"""How often `explain` cries wolf, and what it says of planted faults: ``python benchmarks/explain.py``.

64 clean comparisons: 4 kinds of model (one with a bias before a BatchNorm), SGD and AdamW, even and uneven batches,
fresh and after 50 steps, on 2 and on 4 workers. Then every planted fault of ``tests/test_explain.py`` on 4 workers.
It counts; the seconds are what all comparisons of a row took together.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import record
from rich.progress import track

from samestep import explain

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import test_explain as known

KINDS = ["MLP", "GroupNorm", "bias before BatchNorm", "transformer"]


def clean(world_size: int, kind: int, cases: list[Any]) -> dict[str, Any]:
    start = time.perf_counter()
    found = explain.many(cases, world_size, timeout_seconds=1200)
    return {
        "what": f"clean: {KINDS[kind]}",
        "workers": world_size,
        "comparisons": len(found),
        "false_alarms": sum(not one.same for one in found),
        "largest_difference": max(one.size for one in found),
        "seconds": round(time.perf_counter() - start, 1),
    }


def planted(names: list[str]) -> dict[str, Any]:
    start = time.perf_counter()
    found = explain.many([known.FAULTS[name][0] for name in names], 4, timeout_seconds=1200)
    right = 0
    for name, one in zip(names, found, strict=True):
        _, place, fragments = known.FAULTS[name]
        said = (one.stage, one.tensor, one.ranks, one.cause) == place
        right += said and all(fragment in one.sentence for fragment in fragments)
    return {
        "what": "planted faults",
        "workers": 4,
        "comparisons": len(found),
        "named_rightly": right,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model kind, a few faults")
    record.add_out(parser, "explain")
    args = parser.parse_args()
    size = len(known.CLEAN) // len(KINDS)
    jobs = [(world_size, kind) for world_size in (2, 4) for kind in range(1 if args.quick else len(KINDS))]
    rows = [
        clean(world_size, kind, known.CLEAN[kind * size : (kind + 1) * size])
        for world_size, kind in track(jobs, description="clean comparisons")
    ]
    rows.append(planted(list(known.FAULTS)[: 6 if args.quick else None]))
    record.save(args.out, rows, bar_false_alarms=0)


if __name__ == "__main__":
    main()
