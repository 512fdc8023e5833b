"""Hugging Face Trainers that tests/test_accelerate_trainer.py starts under torchrun; one JSON object per rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from accelerate_jobs import RANK, WORLD, main, net
from samestep import schedules
from samestep.accelerate import SamestepTrainerCallback
from samestep.scheduler import LRScheduler
from workers import digest

CASES: dict[str, Callable[[Path], Any]] = {}
N, STEPS, MICRO, ACCUMULATE = (
    29,
    6,
    3,
    2,
)  # the last window of an epoch is short, and so is its last micro-batch
SCHEDULE = schedules.cosine(STEPS) * schedules.linear_warmup(3, 0.2)


def case(fn: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[fn.__name__] = fn
    return fn


class Rows(torch.utils.data.Dataset):
    """Inputs with a target, a number of tokens and an id; ids tell the test which rows went where."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(N, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + torch.randn(N, 1, generator=generator)
        self.tokens = torch.randint(1, 9, (N, 1), generator=generator)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"inputs": self.inputs[index], "labels": self.targets[index], "tokens": self.tokens[index]}
        return {**row, "ids": index}


class Model(nn.Module):
    """Returns a mean over the tokens of a micro-batch, and remembers which rows it saw."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = net(dropout)
        self.seen: list[list[int]] = []

    def forward(self, inputs: Tensor, labels: Tensor, tokens: Tensor, ids: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(ids.tolist())
        output = self.net(inputs)
        return {"loss": ((output - labels) ** 2 * tokens).sum() / tokens.sum(), "logits": output}


class Lrs(TrainerCallback):
    def __init__(self) -> None:
        self.lrs: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lrs.append(kwargs["optimizer"].param_groups[0]["lr"])


class Planted(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and RANK == WORLD - 1:
            with torch.no_grad():
                kwargs["model"].net[0].weight[0, 0] += 1e-6


def arguments(out: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        per_device_train_batch_size=MICRO * (1 if WORLD > 1 else 2),
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=options.pop("max_steps", STEPS),
        report_to=[],
        save_strategy=options.pop("save_strategy", "no"),
        disable_tqdm=True,
        logging_steps=1000,
        max_grad_norm=options.pop("max_grad_norm", 0.5),
        seed=3,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        **options,
    )


def run(out: Path, *callbacks: TrainerCallback, model: Any = None, **options: Any) -> dict[str, Any]:
    model = model or Model()
    ours = options.pop("ours", {"audit": 1, "exact_mean": lambda batch: batch["tokens"].sum()})
    resume = options.pop("resume", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = LRScheduler(optimizer, SCHEDULE)
    kept = Lrs()
    trainer = Trainer(
        model,
        arguments(out, **options),
        train_dataset=Rows(),
        optimizers=(optimizer, schedule),
        callbacks=[kept, *callbacks],
    )
    trainer.add_callback(SamestepTrainerCallback(trainer, **ours))
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"weights": weights.tolist(), "digest": digest([weights]), "lrs": kept.lrs, "seen": model.seen}


@case
def exact_mean(out: Path) -> Any:
    return run(out)


@case
def without(out: Path) -> Any:
    return run(out, ours={"audit": 1})


@case
def resumed(out: Path) -> Any:
    """The Trainer's own checkpoint carries the schedule's clock."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    ours = {"audit": 1, "exact_mean": lambda batch: batch["tokens"].sum(), "ordered": True}
    whole = run(out, ours=ours, **options)
    again = run(out, ours=ours, resume=str(out / "checkpoint-4"), **options)
    return {"whole": whole["digest"], "again": again["digest"], "lrs": again["lrs"]}


@case
def planted(out: Path) -> Any:
    return run(out, Planted())


@case
def bad_count(out: Path) -> Any:
    def count(batch: dict[str, Tensor]) -> float:
        return float(batch["tokens"].sum()) if RANK == 0 else float("nan")

    return run(out, ours={"exact_mean": count})


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(8) * (index + 1) % 31
        return {"input_ids": ids, "labels": ids}


def gpt2(out: Path, ours: dict[str, Any], n_steps: int = 4) -> dict[str, Any]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model,
        arguments(out, max_steps=n_steps),
        train_dataset=Sentences(),
        optimizers=(optimizer, LRScheduler(optimizer, schedules.cosine(n_steps))),
    )
    trainer.add_callback(SamestepTrainerCallback(trainer, **ours))
    trainer.train()
    return {"digest": digest(model.parameters())}


@case
def own_mean(out: Path) -> Any:
    """A causal LM of transformers: the Trainer normalises by tokens itself, and two owners are one too many."""
    return gpt2(out, {"exact_mean": True})


@case
def long(out: Path) -> Any:
    """A transformers model with dropout, 300 updates, a look at each."""
    return gpt2(out, {"audit": 1}, 300)


if __name__ == "__main__":
    main(CASES)
