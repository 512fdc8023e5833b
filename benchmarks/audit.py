"""What an audit costs beside the step it checks: ``python benchmarks/audit.py``.

A decoder of about the given number of parameters is trained with AdamW under TrainStep. After every update an audit
of everything (parameters, gradients, two moments, options, buffers) runs and is timed on its own, so that a busy
machine slows both; the figures are medians over the steps of rank 0. One JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import record
import torch
from torch import Tensor, nn

from samestep import launch
from samestep.audit import Audit
from samestep.group import Group
from samestep.step import TrainStep

N_TOKENS = 256  # of the vocabulary; small, so that the blocks hold nearly all parameters


class Decoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(N_TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, N_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def loss_sum(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), logits.shape[0]


def measure(group: Group, width: int, depth: int, sequences: int, length: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(width, depth).to(group.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    audit = Audit(group, every=1).watch(model, optimizer)
    audit.detach()  # called below, where it can be timed
    step = TrainStep(model, optimizer, group=group)
    generator = torch.Generator().manual_seed(group.rank)
    stepping: list[float] = []
    auditing: list[float] = []
    for _ in range(steps + 2):
        tokens = torch.randint(N_TOKENS, (sequences, length + 1), generator=generator).to(group.device)
        group.barrier()
        started = now(group)
        step.train_step([tokens], loss_sum)
        stepped = now(group)
        audit.after_step(step.step)
        stepping.append(stepped - started)
        auditing.append(now(group) - stepped)
    # The first steps create the optimizer's state, rebuild buckets and touch the memory.
    in_step, in_audit = statistics.median(stepping[2:]), statistics.median(auditing[2:])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": sum(1 for _ in model.parameters()),
        "world_size": group.world_size,
        "tokens_per_worker": sequences * length,
        "step_seconds": round(in_step, 5),
        "audit_seconds": round(in_audit, 5),
        "every_step_percent": round(100 * in_audit / in_step, 3),
        "every_100_steps_percent": round(in_audit / in_step, 4),
    }


def now(group: Group) -> float:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", nargs="+", default=["160x3", "320x5", "512x8"], help="width x depth")
    parser.add_argument("--sequences", type=int, default=16, help="per worker and step")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="the smallest model on 1 and 2 workers")
    record.add_out(parser, "audit")
    args = parser.parse_args()
    if args.quick:
        args.workers, args.sizes = [1, 2], args.sizes[:1]
    rows = []
    for size in args.sizes:
        width, depth = map(int, size.split("x"))
        for world_size in args.workers:
            results = launch.run(
                measure,
                world_size,
                width,
                depth,
                args.sequences,
                args.length,
                args.steps,
                timeout_seconds=1200,
            )
            rows.append(results[0])
            print(json.dumps(results[0]), flush=True)
    record.save(
        args.out,
        rows,
        lambda _, axes: plot(axes, rows),
        panels=2,
        bars_percent={"every step": 3, "every 100": 0.1},
    )


def plot(axes: Any, rows: list[dict[str, Any]]) -> None:
    for world_size in sorted({row["world_size"] for row in rows}):
        mine = [row for row in rows if row["world_size"] == world_size]
        millions = [row["parameters"] / 1e6 for row in mine]
        axes[0].plot(
            millions, [row["every_step_percent"] for row in mine], marker="o", label=f"N={world_size}"
        )
        axes[1].plot(
            millions, [1000 * row["audit_seconds"] for row in mine], marker="o", label=f"N={world_size}"
        )
    axes[0].axhline(3, color="black", linewidth=0.8)
    axes[0].set(
        xlabel="million parameters", ylabel="audit of every step, % of step time", xscale="log", ylim=0
    )
    axes[1].set(xlabel="million parameters", ylabel="an audit, ms", xscale="log", yscale="log")
    axes[0].legend()


if __name__ == "__main__":
    main()
