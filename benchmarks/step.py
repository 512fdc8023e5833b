"""What a `TrainStep` costs beside plain torch DDP with the same micro-batches: ``python benchmarks/step.py``.

The contenders take turns, step by step, in the same workers; a step's time is that of the slowest worker. Ratios
are medians of the ratios within a turn. Memory is what one worker holds at most, in a process of its own.
"""

from __future__ import annotations

import argparse
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

from samestep import launch
from samestep.group import Group
from samestep.reduce import reduce
from samestep.sharding import Shard, shard_range
from samestep.step import TrainStep

RESULTS = Path(__file__).parent / "results"
CLIP = 1.0


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


def contender(group: Group, name: str, model_name: str, n_shards: int) -> Callable[[], None]:
    """Return a function that takes one step."""
    make, n_samples = MODELS[model_name]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    block = shard_range(n_shards, group.world_size, group.rank)
    shards = [Shard(i, torch.arange(n_samples), batch(model, n_samples, i)) for i in block]
    if name != "DDP":
        step = TrainStep(model, optimizer, group=group, shards=n_shards, mode=name, clip_norm=CLIP)  # type: ignore[arg-type]
        return lambda: (step.train_step(shards, loss_fn), None)[1]
    count = sum(shard.batch[1].numel() for shard in shards)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if group.world_size > 1 else model

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for shard in shards:
            last = shard is shards[-1] or group.world_size == 1
            with nullcontext() if last else wrapped.no_sync():
                loss = (
                    loss_sum(wrapped, *shard.batch) / count
                )  # right, since all workers hold as many samples
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return plain


def times(group: Group, model_name: str, n_shards: int, repeats: int, warm: int = 3) -> dict[str, Any]:
    jobs = {name: contender(group, name, model_name, n_shards) for name in ("DDP", "fast", "exact")}
    turns = []
    for turn in range(repeats + warm):
        seconds = []
        # Each starts a turn as often as the others: what ran before leaves its traces in the caches.
        order = sorted(range(3), key=lambda place: (place + turn) % 3)
        found = {}
        for place in order:
            job = list(jobs.values())[place]
            group.barrier()
            start = time.perf_counter()
            job()
            found[place] = time.perf_counter() - start
        seconds = [found[place] for place in range(3)]
        if turn >= warm:
            turns.append(reduce(torch.tensor(seconds, dtype=torch.float64), group, "max").tolist())
    row: dict[str, Any] = {
        "model": model_name,
        "parameters": sum(p.numel() for p in MODELS[model_name][0]().parameters()),
        "world_size": group.world_size,
        "shards": n_shards,
    }
    for place, name in enumerate(jobs):
        row[f"{name}_ms"] = round(1000 * statistics.median(turn[place] for turn in turns), 2)
    for place, name in ((1, "fast"), (2, "exact")):
        row[f"{name}_ratio"] = round(statistics.median(turn[place] / turn[0] for turn in turns), 3)
    return row


def memory(group: Group, name: str, model_name: str, n_shards: int) -> float:
    """Return the peak of this worker in MB, beyond what it had before the first step."""
    step = contender(group, name, model_name, n_shards)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4))
    labels = [f"{row['model']}\nN={row['world_size']} S={row['shards']}" for row in rows]
    for shift, name in ((-0.2, "fast"), (0.2, "exact")):
        axes.bar(
            [i + shift for i in range(len(rows))], [row[f"{name}_ratio"] for row in rows], 0.4, label=name
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), labels, fontsize=6, rotation=45)
    axes.set_ylabel("step time / plain DDP")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=["2,2", "1,8", "2,8", "4,8", "4,4"], help="N,S")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for layout in args.layouts:
            world_size, n_shards = map(int, layout.split(","))
            row = launch.run(times, world_size, model, n_shards, args.repeats, timeout_seconds=3600)[0]
            if not args.no_memory:
                for name in ("DDP", "fast", "exact"):
                    peaks = launch.run(memory, world_size, name, model, n_shards, timeout_seconds=3600)
                    row[f"{name}_peak_mb"] = round(max(peaks), 1)
            rows.append(row)
            print(row, flush=True)
    found = {
        "command": "python benchmarks/step.py",
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "backend": "gloo",
        "threads": 1,
        "repeats": args.repeats,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    plot(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
