"""Small training jobs of every kind, at any number of workers: for the tests and the benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from samestep import schedules
from samestep.group import Group
from samestep.recipes.semantic_ids.model import RQVAE, loss_sums
from samestep.scheduler import LRScheduler
from samestep.sharding import Shard, ShardLoader
from samestep.step import TrainStep
from workers import digest, state_digest

SHARDS = 8
GLOBAL_BATCH = 40
N_SAMPLES = 203  # the last batch of an epoch has 3 samples: most shards are empty
TOTAL_STEPS = 400


class Samples(Dataset[Any]):
    """Samples that depend on their number alone."""

    def __init__(self, make: Callable[[torch.Generator, int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(torch.Generator().manual_seed(index), index)


def vector(generator: torch.Generator, index: int) -> tuple[Tensor, int]:
    return torch.randn(20, generator=generator) + index % 5, index % 5


def image(generator: torch.Generator, index: int) -> tuple[Tensor, int]:
    return torch.randn(1, 10, 10, generator=generator) * (1 + index % 3), index % 4


def sentence(generator: torch.Generator, index: int) -> Tensor:
    """Between 2 and 23 tokens, padded with -1 to 24."""
    length = 2 + index * 7 % 22
    tokens = (torch.randint(0, 30, (length,), generator=generator) + torch.arange(length)) % 30
    return functional.pad(tokens, (0, 24 - length), value=-1)


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Transformer(nn.Module):
    """Two layers, dropout, and an output that shares the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.place = nn.Parameter(torch.randn(24, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 31, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.out(self.layers(self.embedding(tokens) + self.place[:n], mask=mask, is_causal=True))


def class_loss(model: nn.Module, shard: Shard) -> tuple[Tensor, int, dict[str, Any]]:
    x, y = shard.batch
    scores = model(x)
    return (
        functional.cross_entropy(scores, y, reduction="sum"),
        len(y),
        {"right": (scores.argmax(1) == y).sum()},
    )


def token_loss(model: nn.Module, shard: Shard) -> tuple[Tensor, Tensor]:
    tokens = shard.batch
    scores = model(tokens[:, :-1].clamp(min=0))
    loss = functional.cross_entropy(
        scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1, reduction="sum"
    )
    return loss, (tokens[:, 1:] >= 0).sum()


def vq_loss(model: nn.Module, shard: Shard) -> Any:
    return loss_sums(model, shard.batch[0])


MODELS: dict[str, Any] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)), vector, class_loss),
    "convnet with BatchNorm": (Convnet, image, class_loss),
    "transformer": (Transformer, sentence, token_loss),
    "RQ-VAE": (lambda: RQVAE(20, (8, 8), 4, (16,)), vector, vq_loss),
}


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    model: str
    optimizer: str = "AdamW"
    bf16: bool = False
    mode: str = "exact"

    def __str__(self) -> str:
        return f"{self.model}, {self.optimizer}, {'bf16 autocast' if self.bf16 else 'fp32'}"


JOBS = [
    Job(model, optimizer, bf16)
    for model in MODELS
    for optimizer in ("SGD", "AdamW")
    for bf16 in (False, True)
]


def train(
    group: Group,
    job: Job,
    steps: int,
    state: dict[str, Any] | None = None,
    *,
    num_workers: int = 0,
    bucket_cap_mb: float | None = None,
) -> dict[str, Any]:
    """Train some steps from scratch or from `state`; return a digest of everything, and the state."""
    make, sample, loss = MODELS[job.model]
    torch.manual_seed(1)
    model = make()
    optimizer: torch.optim.Optimizer
    if job.optimizer == "SGD":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    clock = LRScheduler(optimizer, schedules.linear_warmup(5, 0.1) * schedules.cosine(TOTAL_STEPS))
    loader = ShardLoader(
        Samples(sample), GLOBAL_BATCH, SHARDS, group=group, seed=3, num_workers=num_workers, drop_last=False
    )
    step = TrainStep(
        model, optimizer, group=group, shards=SHARDS, mode=job.mode, scheduler=clock, clip_norm=1.0, seed=7,
        autocast=(lambda: torch.autocast("cpu", torch.bfloat16)) if job.bf16 else nullcontext,
        bucket_cap_mb=bucket_cap_mb,
    )  # fmt: skip
    parts = {"model": model, "optimizer": optimizer, "clock": clock, "loader": loader, "step": step}
    for name, part in parts.items() if state else ():
        part.load_state_dict(state[name])
    log = state["log"] if state else ""
    losses = []
    for shards in loader.steps(steps):
        result = step.train_step(shards, loss)
        losses.append(result.loss)
        log += repr((result.loss, result.grad_norm, result.lr, result.sums))
    held = {name: part.state_dict() for name, part in parts.items()}
    return {
        "digest": f"{state_digest(model, optimizer)} {hashlib.blake2b(log.encode(), digest_size=8).hexdigest()}",
        "parameters": digest(model.parameters()),
        "losses": (losses[0], losses[-1]),
        "state": {**held, "log": log} if group.is_main else None,
    }
