"""Loops on Accelerate, and Hugging Face Trainers, that tests/test_accelerate.py starts; one JSON object per rank.

accelerate launch --cpu --num_processes 2 tests/accelerate_jobs.py OUT CASE ...
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from samestep import schedules
from samestep.accelerate import ExactMean, check_schedulers, process_group, watch
from samestep.errors import SamestepError
from samestep.scheduler import LRScheduler
from workers import digest

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
CASES: dict[str, Callable[[Path], Any]] = {}
STEPS = 8
SCHEDULE = schedules.cosine(STEPS) * schedules.linear_warmup(3, 0.2)
# Samples by worker and micro-batch of an update; a worker may have none.
SIZES = [[[5, 1], [2, 3]], [[4, 4], [4, 2]], [[1, 6], [3, 0]]]


def case(fn: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[fn.__name__] = fn
    return fn


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def batch(step: int, worker: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + micro)
    inputs = torch.randn(size, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + worker + torch.randn(size, 1, generator=generator)


def my_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """This worker's micro-batches; a single process has both workers' of them."""
    sizes = SIZES[step % len(SIZES)]
    workers = [RANK] if WORLD > 1 else [0, 1]
    return [batch(step, w, m, sizes[w][m]) for w in workers for m in (0, 1)]


class Loop:
    """A plain loop on Accelerate."""

    def __init__(self, prepare_scheduler: bool = True, dropout: float = 0.0) -> None:
        n_micro = 2 if WORLD > 1 else 4
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=n_micro, kwargs_handlers=[process_group()]
        )
        model = net(dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = LRScheduler(optimizer, SCHEDULE)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.scheduler = self.accelerator.prepare(scheduler) if prepare_scheduler else scheduler
        self.exact: ExactMean | None = None
        self.lrs: list[float] = []

    def run(self, first: int, last: int, *, clip: float | None = None, weight: Any = None) -> None:
        accelerator = self.accelerator
        for step in range(first, last):
            for inputs, targets in my_batches(step):
                with accelerator.accumulate(self.model):
                    loss = mse_loss(self.model(inputs), targets)
                    if self.exact is None:
                        accelerator.backward(loss)
                    else:
                        self.exact.backward(loss, len(inputs) if weight is None else weight(step))
                    if accelerator.sync_gradients:
                        self.lrs.append(self.optimizer.param_groups[0]["lr"])
                        if clip is not None:
                            accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()

    def result(self) -> dict[str, Any]:
        plain = self.accelerator.unwrap_model(self.model)
        weights = torch.cat([p.detach().flatten() for p in plain.parameters()])
        return {"weights": weights.tolist(), "digest": digest([weights]), "lrs": self.lrs}


def exact_loop(**options: Any) -> Loop:
    ordered = options.pop("ordered", False)
    loop = Loop(**options)
    loop.exact = ExactMean(loop.accelerator, loop.model, loop.optimizer, ordered=ordered)
    return loop


@case
def exact_mean(out: Path) -> Any:
    loop = exact_loop()
    audit = watch(loop.accelerator, loop.model, loop.optimizer, loop.scheduler, every=1)
    loop.run(0, STEPS)
    audit.check(STEPS)
    return loop.result()


@case
def clipped(out: Path) -> Any:
    loop = exact_loop(prepare_scheduler=False)
    loop.run(0, STEPS, clip=0.5)
    return loop.result()


@case
def without(out: Path) -> Any:
    loop = Loop()
    loop.run(0, 2)  # the third update has a worker without samples, whose mean is NaN
    return loop.result()


@case
def resumed(out: Path) -> Any:
    """Accelerate's own save_state and load_state carry the schedule's clock."""
    loop = exact_loop(ordered=True)
    loop.run(0, 4)
    loop.accelerator.save_state(str(out / "state"))
    loop.run(4, STEPS)
    whole = loop.result()
    loop.accelerator.load_state(str(out / "state"))
    lr = loop.optimizer.param_groups[0]["lr"]
    loop.run(4, STEPS)
    return {"whole": whole["digest"], "again": loop.result()["digest"], "lr": lr}


@case
def planted(out: Path) -> Any:
    loop = exact_loop()
    watch(loop.accelerator, loop.model, loop.optimizer, loop.scheduler, every=1)
    loop.run(0, 2)
    if RANK == WORLD - 1:
        with torch.no_grad():
            loop.model.module[0].weight[0, 0] += 1e-6
    loop.run(2, 4)


@case
def bad_weight(out: Path) -> Any:
    loop = exact_loop()
    loop.run(0, 4, weight=lambda step: -1.0 if RANK == 1 and step == 2 else 4.0)


@case
def stepped_twice(out: Path) -> Any:
    """A torch scheduler that is prepared runs N times too fast, and is refused."""
    loop = Loop()
    torch_scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer.optimizer, 1)
    check_schedulers(loop.accelerator)
    check_schedulers(loop.accelerator, torch_scheduler)  # not prepared: stepped by hand
    loop.accelerator.prepare(torch_scheduler)
    watch(loop.accelerator, loop.model, loop.optimizer)


@case
def long(out: Path) -> Any:
    loop = exact_loop(dropout=0.2)
    audit = watch(loop.accelerator, loop.model, loop.optimizer, loop.scheduler, every=1)
    loop.run(0, 300)
    audit.check(300)
    return loop.result()


def attempt(fn: Callable[[Path], Any], out: Path) -> Any:
    torch.manual_seed(0)
    try:
        return fn(out)
    except SamestepError as error:
        return {"raised": type(error).__name__, "message": str(error), "name": error.name, "rank": error.rank}
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"raised": type(error).__name__, "message": text, "name": None, "rank": None}


def find(cases: dict[str, Callable[[Path], Any]], names: list[str], out: Path) -> dict[str, Any]:
    """Run cases, and return what each gave or raised."""
    warnings.filterwarnings("ignore")  # of the frameworks; ours are no warnings
    torch.set_num_threads(1)
    found = {}
    for name in names:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        found[name] = attempt(cases[name], folder)
    return found


def main(cases: dict[str, Callable[[Path], Any]]) -> None:
    out = Path(sys.argv[1])
    (out / f"rank{RANK}.json").write_text(json.dumps(find(cases, sys.argv[2:], out)))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(CASES)
