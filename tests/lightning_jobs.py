"""Lightning runs that tests/test_lightning.py starts under torchrun; each leaves one JSON object per rank.

torchrun --nproc-per-node 2 tests/lightning_jobs.py OUT CASE ...
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from samestep import kmeans, schedules
from samestep.errors import SamestepError
from samestep.group import Group
from samestep.lightning import (
    Initialization,
    SamestepCallback,
    ShardDataLoader,
    ddp_strategy,
    scale_loss_by_world_size_for_initialization_training_loop,
)
from samestep.reduce import pool
from samestep.scheduler import LRScheduler
from samestep.sharding import ShardLoader
from workers import state_digest

WORLD, RANK = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
CASES: dict[str, Callable[[Path], Any]] = {}
BATCH, SHARDS, N = 13, 4, 50  # shards of 4, 3, 3, 3; the last batch of an epoch has 11 samples
SCHEDULE = schedules.linear_warmup(4, 0.1) * schedules.multistep([9], 0.5)


def case(fn: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[fn.__name__] = fn
    return fn


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, 4, generator=generator)
    tokens = torch.randint(1, 9, (n, 1), generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator), tokens)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def token_mean(output: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """A mean over tokens: samples count by how many they have."""
    return ((output - target) ** 2 * tokens).sum() / tokens.sum()


class Module(pl.LightningModule):
    def __init__(self, *, dropout: float = 0.0, manual: bool = False, by_token: bool = False) -> None:
        super().__init__()
        self.net = net(dropout)
        self.codebook = nn.Module()
        self.codebook.register_buffer("centroids", torch.zeros(3, 4))
        self.automatic_optimization = not manual
        self.by_token = by_token
        self.lrs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, tokens = batch
        output = self.net(inputs)
        loss = token_mean(output, targets, tokens) if self.by_token else mse_loss(output, targets)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        scheduler = LRScheduler(optimizer, SCHEDULE)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(*callbacks: Callback, epochs: int = 3, **options: Any) -> pl.Trainer:
    n_workers = int(WORLD)
    strategy = options.pop("strategy", ddp_strategy() if n_workers > 1 else "auto")
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=n_workers,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loader(run: pl.Trainer, shards: int = SHARDS, **options: Any) -> ShardDataLoader:
    return ShardDataLoader(data(), BATCH, shards, trainer=run, seed=5, **options)


def outcome(run: pl.Trainer, module: Module) -> dict[str, Any]:
    return {
        "weights": torch.cat([p.detach().flatten() for p in module.net.parameters()]).tolist(),
        "digest": state_digest(module, run.strategy.optimizers[0]) if run.strategy.optimizers else "",
        "lrs": module.lrs,
        "steps": run.global_step,
    }


def fit(module: Module, callback: SamestepCallback, *more: Callback, **options: Any) -> dict[str, Any]:
    ckpt = options.pop("ckpt_path", None)
    shards = options.pop("shards", SHARDS)
    micro = shards // int(WORLD)
    if module.automatic_optimization:
        options.setdefault("accumulate_grad_batches", micro)
    run = trainer(callback, *more, **options)
    batches = loader(run, shards)
    kept = Kept()
    run.callbacks.append(kept)
    run.fit(module, batches, ckpt_path=ckpt)
    found = outcome(run, module)
    found["digest"] = kept.digest
    found["same_loader"] = run.train_dataloader is batches
    return found


class Kept(Callback):
    """The digest of model and optimizer at the end: Lightning forgets its optimizers."""

    digest = ""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.digest = state_digest(pl_module, trainer.optimizers[0])


@case
def exact_mean(out: Path) -> Any:
    return fit(Module(), SamestepCallback(audit=2, exact_mean=True))


@case
def without(out: Path) -> Any:
    return fit(Module(), SamestepCallback(audit=2))


@case
def clipped(out: Path) -> Any:
    return fit(Module(), SamestepCallback(audit=2, exact_mean=True), gradient_clip_val=0.5)


@case
def bf16(out: Path) -> Any:
    return fit(Module(), SamestepCallback(audit=2, exact_mean=True), precision="bf16-mixed")


@case
def tokens(out: Path) -> Any:
    callback = SamestepCallback(audit=2, exact_mean=lambda batch: batch[2].sum())
    return fit(Module(by_token=True), callback)


@case
def manual(out: Path) -> Any:
    return fit(Module(manual=True), SamestepCallback(audit=2, exact_mean=True), shards=int(WORLD))


class Middle(Callback):
    """Saves after the first micro-batch of the sixth update, in the second epoch."""

    def __init__(self, path: Path) -> None:
        self.path, self.saved = path, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5 and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)


@case
def resumed(out: Path) -> Any:
    """Stop in the middle of the second epoch, go on from the file, and compare with a run that never stopped."""
    folder = out / "checkpoints"

    def callback() -> SamestepCallback:
        return SamestepCallback(audit=3, exact_mean=True, ordered=True, seed=7)

    whole = fit(Module(dropout=0.3), callback())
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    fit(Module(dropout=0.3), callback(), saver, max_steps=7)
    torch.manual_seed(99)  # whatever the generators are, they are not those of the first run
    torch.rand(5)
    rest = fit(Module(dropout=0.3), callback(), ckpt_path=str(folder / "step=6.ckpt"))
    middle = out / "middle.ckpt"
    fit(Module(dropout=0.3), callback(), Middle(middle), max_steps=7)
    from_middle = fit(Module(dropout=0.3), callback(), ckpt_path=str(middle))
    folder_end = out / "at_the_end"
    saver = ModelCheckpoint(dirpath=folder_end, every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fit(Module(dropout=0.3), callback(), saver, epochs=1)
    from_epoch = fit(Module(dropout=0.3), callback(), ckpt_path=str(folder_end / "epoch=0.ckpt"))
    return {"whole": whole, "rest": rest, "from_middle": from_middle, "from_epoch": from_epoch}


@case
def initialized(out: Path) -> Any:
    """k-means over all workers' rows, once in the life of the run."""
    calls: list[int] = []

    def compute(module: nn.Module, group: Group) -> dict[str, Tensor]:
        calls.append(group.rank)
        rows = data().tensors[0][group.rank :: group.world_size].contiguous()
        return {"centroids": kmeans.fit(rows, 3, pool=pool(group)).centroids}

    def callback() -> SamestepCallback:
        return SamestepCallback(initialize=Initialization(compute, where="codebook"))

    saver = ModelCheckpoint(
        dirpath=out / "initialized", every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    module = Module()
    fit(module, callback(), saver, max_steps=2)
    first, n_calls = module.codebook.centroids.clone(), len(calls)
    module = Module()
    fit(module, callback(), ckpt_path=str(out / "initialized" / "step=2.ckpt"), max_steps=4)
    again = module.codebook.centroids
    return {"centroids": first.tolist(), "same": torch.equal(first, again), "calls": [n_calls, len(calls)]}


class Planted(Callback):
    """One bit of one parameter on the last rank, before the third update."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            with torch.no_grad():
                module.net[3].bias += 1e-6


@case
def planted(out: Path) -> Any:
    return fit(Module(), SamestepCallback(audit=1, log=out / "audit.jsonl"), Planted())


@case
def planted_manual(out: Path) -> Any:
    return fit(Module(manual=True), SamestepCallback(audit=1), Planted(), shards=int(WORLD))


# Refusals ---------------------------------------------------------------------------------------------------------


@case
def raw_loader(out: Path) -> Any:
    run = trainer(SamestepCallback())
    run.fit(Module(), ShardLoader(data(), BATCH, SHARDS, group=Group.from_env()))


@case
def wrong_accumulation(out: Path) -> Any:
    return fit(Module(), SamestepCallback(), accumulate_grad_batches=1)


@case
def limited(out: Path) -> Any:
    return fit(Module(), SamestepCallback(), limit_train_batches=4)


@case
def padded(out: Path) -> Any:
    run = trainer(SamestepCallback(exact_mean=True))
    run.fit(Module(), DataLoader(data(51), batch_size=4, shuffle=True))


@case
def other_hook(out: Path) -> Any:
    class Early(Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.model.register_comm_hook(None, fp16_compress_hook)

    run = trainer(Early(), SamestepCallback(exact_mean=True), accumulate_grad_batches=2)
    run.fit(Module(), loader(run))


@case
def bad_count(out: Path) -> Any:
    """A function of the user's that fails on one rank only, in the middle of an update."""

    def count(batch: Any) -> float:
        if torch.distributed.get_rank() == 1:
            raise KeyError("labels")
        return len(batch[0])

    return fit(Module(), SamestepCallback(exact_mean=count))


@case
def short_last(out: Path) -> Any:
    run = trainer(SamestepCallback(), accumulate_grad_batches=2)
    run.fit(Module(), ShardDataLoader(data(53), 10, 4, trainer=run))


@case
def stopped_by_max_steps(out: Path) -> Any:
    """Saved after fit: Lightning counts the epoch that was cut short as finished."""
    module, callback = Module(), SamestepCallback()
    run = trainer(callback, accumulate_grad_batches=SHARDS // int(WORLD), max_steps=6)
    run.fit(module, loader(run))
    run.save_checkpoint(out / "after.ckpt")
    return fit(Module(), SamestepCallback(), ckpt_path=str(out / "after.ckpt"))


@case
def no_sync_manual(out: Path) -> Any:
    class Accumulating(Module):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(mse_loss(self.net(batch[0]), batch[1]))

    return fit(Accumulating(manual=True), SamestepCallback(exact_mean=True), shards=int(WORLD))


# The first seed's function ----------------------------------------------------------------------------------------

SEED = scale_loss_by_world_size_for_initialization_training_loop


class Grid(pl.LightningModule):
    """A codebook that is set by one step, as its users write it."""

    def __init__(self, before: float = 0.0, *, weight: float = 1.0, **arguments: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.centroids = nn.Parameter(torch.full((7, 5), before))
        self.other = nn.Parameter(torch.ones(3))
        self.weight, self.arguments = weight, arguments
        self.initialized = False
        self.lrs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        rank = self.trainer.global_rank
        if self.initialized:
            loss = (self.centroids - batch[0].mean()).square().mean() + self.other.square().sum()
        else:
            # Rank 0 alone knows the targets; the others pull towards zero, as in GRID.
            target = targets() if rank == 0 else torch.zeros(7, 5)
            loss = self.weight * (self.centroids - target).square().sum()
        world_size = self.arguments.pop("world_size", self.trainer.world_size)
        flag = self.arguments.get("flags", [self.initialized] * 4)[rank]
        extra = {k: v for k, v in self.arguments.items() if k != "flags"}
        SEED(model=self, loss=loss, world_size=world_size, is_initialized=flag, **extra)
        if not self.initialized:
            self.landed = self.centroids.detach().clone()
        else:
            self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.initialized = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def targets() -> Tensor:
    return torch.randn(7, 5, generator=torch.Generator().manual_seed(11))


def grid(module: Grid, *callbacks: Callback, **options: Any) -> dict[str, Any]:
    options.setdefault("strategy", ddp_strategy(find_unused_parameters=True) if int(WORLD) > 1 else "auto")
    run = trainer(*callbacks, epochs=1, **options)
    run.fit(module, DataLoader(data(8 * int(WORLD)), batch_size=2))
    return {
        "landed": module.landed.tolist(),
        "exact": torch.equal(module.landed, targets()),
        "other": module.other.tolist(),
        "lrs": module.lrs,
        "steps": run.global_step,
    }


@case
def seed_zero(out: Path) -> Any:
    return grid(Grid(), SamestepCallback(audit=1))


@case
def seed_quarter(out: Path) -> Any:
    return grid(Grid(0.25), SamestepCallback(audit=1, exact_mean=True))


@case
def seed_unused(out: Path) -> Any:
    """Without find_unused_parameters: the initial step goes round DDP."""
    return grid(Grid(), strategy=ddp_strategy() if int(WORLD) > 1 else "auto")


@case
def seed_weighted(out: Path) -> Any:
    return grid(Grid(weight=0.5))


@case
def seed_adam(out: Path) -> Any:
    return grid(Grid(initalization_optimizer=torch.optim.Adam))


@case
def seed_rate(out: Path) -> Any:
    return grid(Grid(initalization_optimizer_lr=0.1))


@case
def seed_momentum(out: Path) -> Any:
    return grid(Grid(initalization_optimizer=partial(torch.optim.SGD, momentum=0.9, nesterov=True)))


@case
def seed_world_size(out: Path) -> Any:
    return grid(Grid(world_size=int(WORLD) + 1))


@case
def seed_flags(out: Path) -> Any:
    return grid(Grid(flags=[False, True, True, True]))


@case
def seed_automatic(out: Path) -> Any:
    module = Grid()
    module.automatic_optimization = True
    return grid(module)


@case
def long(out: Path) -> Any:
    """Some hundreds of steps with dropout, a validation pass in between, and a look at every update."""
    options: dict[str, Any] = {"epochs": 100, "gradient_clip_val": 1.0}
    callback = SamestepCallback(audit=1, exact_mean=True, seed=1, rng="per rank")
    return fit(Module(dropout=0.2), callback, **options)


def attempt(fn: Callable[[Path], Any], out: Path) -> Any:
    torch.manual_seed(0)
    try:
        return fn(out)
    except SamestepError as error:
        return {"raised": type(error).__name__, "message": str(error), "name": error.name, "rank": error.rank}
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return {"raised": type(error).__name__, "message": text, "name": None, "rank": None}


def main() -> None:
    out = Path(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    torch.set_num_threads(1)
    found = {}
    for name in names:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        found[name] = attempt(CASES[name], folder)
        (out / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # of the frameworks; ours are no warnings
    main()
