"""What a `TrainStep` costs beside plain torch DDP with the same micro-batches: ``python benchmarks/step.py``.

The contenders take turns, step by step, in the same workers; a step's time is that of the slowest worker. Ratios
are medians of the ratios within a turn. Memory is what one worker holds at most, the model with it, in a process of
its own. Rows are kept by model and layout, so that a run may be made in slices; table and plot are of all rows.

`hook` is a plain DDP loop with `hooks.weighted_mean`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from samestep import environment, hooks, launch
from samestep.group import Group
from samestep.reduce import reduce
from samestep.sharding import Shard, shard_range
from samestep.step import TrainStep

RESULTS = Path(__file__).parent / "results"
CLIP = 1.0
NAMES = ("DDP", "fast", "exact", "hook")


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, n_tokens: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, 1000)
        self.n_tokens = n_tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.embedding(x)))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000)
    )


# Name: how to make it, and the samples of a shard.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP 1M": (lambda: mlp(480), 64),
    "transformer 1M": (lambda: Transformer(96, 7), 4),
    "MLP 25M": (lambda: mlp(4400), 64),
    "transformer 25M": (lambda: Transformer(512, 7), 4),
}


def batch(model: nn.Module, n_samples: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    if isinstance(model, Transformer):
        x = torch.randint(0, 1000, (n_samples, model.n_tokens), generator=generator)
        return x, x.flip(1)
    return torch.randn(n_samples, 256, generator=generator), torch.randint(
        0, 1000, (n_samples,), generator=generator
    )


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")


def loss_fn(model: nn.Module, shard: Shard) -> tuple[Tensor, int]:
    x, y = shard.batch
    return loss_sum(model, x, y), y.numel()


def contender(
    group: Group, name: str, model_name: str, n_shards: int, lean: bool = False
) -> Callable[[], None]:
    """Return a function that takes one step; `lean` with an optimizer that takes no memory of its own."""
    make, n_samples = MODELS[model_name]
    torch.manual_seed(0)
    model = make()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if lean:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    block = shard_range(n_shards, group.world_size, group.rank)
    shards = [Shard(i, torch.arange(n_samples), batch(model, n_samples, i)) for i in block]
    if name in ("fast", "exact"):
        step = TrainStep(model, optimizer, group=group, shards=n_shards, mode=name, clip_norm=CLIP)  # type: ignore[arg-type]
        return lambda: (step.train_step(shards, loss_fn), None)[1]
    count = sum(shard.batch[1].numel() for shard in shards)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if group.world_size > 1 else model
    weights = (
        hooks.register(wrapped, hooks.weighted_mean, group)
        if wrapped is not model and name == "hook"
        else None
    )

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for shard in shards:
            last = shard is shards[-1] or group.world_size == 1
            with nullcontext() if last else wrapped.no_sync():
                loss = loss_sum(wrapped, *shard.batch)
                if weights is None:
                    loss = loss / count  # right, since all workers hold as many samples
                else:
                    weights.add(shard.batch[1].numel())
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return plain


def times(group: Group, model_name: str, n_shards: int, budget: float, warm: int = 3) -> dict[str, Any]:
    names = NAMES if group.world_size > 1 else NAMES[:3]
    jobs = [contender(group, name, model_name, n_shards) for name in names]
    turns: list[list[float]] = []
    spent = 0.0
    while len(turns) < warm + 5 or (spent < budget and len(turns) < 200):
        found = {}
        # Each starts a turn as often as the others: what ran before leaves its traces in the caches.
        for place in sorted(range(len(jobs)), key=lambda place: (place + len(turns)) % len(jobs)):
            group.barrier()
            start = time.perf_counter()
            jobs[place]()
            found[place] = time.perf_counter() - start
        seconds = torch.tensor([found[place] for place in range(len(jobs))], dtype=torch.float64)
        turns.append(reduce(seconds, group, "max").tolist())
        spent += sum(turns[-1])
    turns = turns[warm:]
    row: dict[str, Any] = {"turns": len(turns)}
    for place, name in enumerate(names):
        row[f"{name}_ms"] = round(1000 * statistics.median(turn[place] for turn in turns), 2)
        if place:
            ratios = sorted(turn[place] / turn[0] for turn in turns)
            row[f"{name}_ratio"] = round(statistics.median(ratios), 3)
            row[f"{name}_quartiles"] = [round(ratios[len(ratios) * q // 4], 3) for q in (1, 3)]
    return row


def memory(group: Group, name: str, model_name: str, n_shards: int) -> float:
    """Return the peak of this worker in bytes per byte of parameters, beyond what it had before the first step."""
    size = sum(p.nbytes for p in MODELS[model_name][0]().parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = contender(group, name, model_name, n_shards, lean=True)
    for _ in range(2):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / size


def table(found: dict[str, Any]) -> str:
    lines = [
        "# What a step costs beside plain torch DDP with the same micro-batches",
        "",
        f"{' and '.join(f'`{found[key]}`' for key in ('command', 'memory_command') if key in found)}, "
        f"torch {found['environment']['torch']}, gloo, 1 thread per worker, "
        f"{found['machine']} with {found['environment']['cpu_capability']}, {found['date']}. Time: medians of the "
        "ratios within a turn, and their quartiles. Memory: peak over the parameters' bytes; DDP's own (with the "
        "model), and what is held beyond it. `hook` is plain DDP with `hooks.weighted_mean`.",
        "",
        "| model | parameters | N | S | turns | DDP, ms | fast | exact | hook | memory of DDP | fast | exact |",
        f"|{'---|' * 12}",
    ]
    for row in found["rows"]:
        cells = [
            row["model"],
            f"{row['parameters']:,}",
            row["world_size"],
            row["shards"],
            row.get("turns", ""),
            row.get("DDP_ms", ""),
        ]
        for name in NAMES[1:]:
            low, high = row.get(f"{name}_quartiles", (0, 0))
            cells.append(
                f"{row[f'{name}_ratio']:.3f} ({low:.2f}-{high:.2f})" if f"{name}_ratio" in row else ""
            )
        peaks = row.get("memory")
        cells += (
            [f"{peaks['DDP']:.2f}", *(f"{peaks[n] - peaks['DDP']:+.2f}" for n in ("fast", "exact"))]
            if peaks
            else [""] * 3
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    timed = [row for row in rows if "DDP_ms" in row]
    measured = [row for row in rows if "memory" in row]
    for axes, chosen in ((left, timed), (right, measured)):
        labels = [f"{row['model']}\nN={row['world_size']} S={row['shards']}" for row in chosen]
        axes.set_xticks(range(len(chosen)), labels, fontsize=6, rotation=60)
    for shift, name in ((-0.2, "fast"), (0.2, "exact")):
        left.bar(
            [i + shift for i in range(len(timed))], [row[f"{name}_ratio"] for row in timed], 0.4, label=name
        )
        beyond = [row["memory"][name] - row["memory"]["DDP"] for row in measured]
        right.bar([i + shift for i in range(len(measured))], beyond, 0.4, label=name)
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_ylim(0.8)
    left.set_ylabel("step time / plain DDP")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set_ylabel("peak memory beyond plain DDP / parameters")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=["2,2", "1,8", "2,8", "4,8", "4,4"], help="N,S")
    parser.add_argument("--seconds", type=float, default=60, help="of each row, beside the warm-up")
    parser.add_argument("--what", choices=["times", "memory", "both"], default="both")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    rows = {(row["model"], row["world_size"], row["shards"]): row for row in found["rows"]}
    for model in args.models:
        for layout in args.layouts:
            world_size, n_shards = map(int, layout.split(","))
            row = rows.setdefault((model, world_size, n_shards), {})
            row |= {
                "model": model,
                "parameters": sum(p.numel() for p in MODELS[model][0]().parameters()),
                "world_size": world_size,
                "shards": n_shards,
            }
            if args.what != "memory":
                row |= launch.run(times, world_size, model, n_shards, args.seconds, timeout_seconds=3600)[0]
            if args.what != "times":
                row["memory"] = {
                    name: round(
                        max(launch.run(memory, world_size, name, model, n_shards, timeout_seconds=3600)), 3
                    )
                    for name in NAMES[:3]
                }
            print(row, flush=True)
    if args.what == "memory":
        found["memory_command"] = "python benchmarks/step.py --what memory"
    else:
        found["command"] = f"python benchmarks/step.py --seconds {args.seconds:g}"
    found |= {
        "machine": platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "environment": environment.fingerprint(),
        "rows": sorted(rows.values(), key=lambda row: (row["parameters"], row["world_size"], row["shards"])),
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(found))
    plot(found["rows"], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
