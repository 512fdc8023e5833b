"""Residual codebooks in a LightningModule: the way of GRID beside k-means over all workers' rows.

    python examples/grid_residual_quantization.py --workers 2 --rows 4000

Each worker holds other kinds of items, as with files sorted by category. The old way computes each level's codebook
from rank 0's rows and sends it to the others through one optimizer step; the new way computes it over all rows and
sets it before the first step. Both are judged on all rows: relative error, distinct ids, use of the first level.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from samestep import codebooks, kmeans, reduce
from samestep.group import Group
from samestep.lightning import (
    Initialization,
    SamestepCallback,
    ddp_strategy,
    scale_loss_by_world_size_for_initialization_training_loop,
)

LEVELS, CODES = 3, 64
DATA = Path(__file__).parent / "data" / "esco_skills_minilm.npz"


def embeddings(n_rows: int) -> Tensor:
    """Return real embeddings, sorted by kind: neighbours along their strongest direction."""
    rows = torch.from_numpy(np.load(DATA)["embeddings"][:n_rows].astype(np.float32))
    rows = rows - rows.mean(0)
    direction = torch.linalg.svd(rows[:1000], full_matrices=False).Vh[0]
    return rows[(rows @ direction).argsort(stable=True)].contiguous()


class ResidualQuantization(pl.LightningModule):
    """Level after level of centroids; a step moves the chosen ones towards the rows of its batch."""

    def __init__(self, rows: Tensor, old_way: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rows, self.old_way = rows, old_way
        self.levels = nn.ParameterList(torch.zeros(CODES, rows.shape[1]) for _ in range(LEVELS))
        self.n_set = 0

    def mine(self) -> Tensor:
        """Return the rows that this worker holds."""
        return self.rows.tensor_split(self.trainer.world_size)[self.trainer.global_rank]

    def residual(self, rows: Tensor, level: int) -> Tensor:
        for centroids in list(self.levels)[:level]:
            codes, _ = kmeans.assign(rows, centroids.detach())
            rows = rows - centroids.detach()[codes]
        return rows

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        ready = not self.old_way or self.n_set == LEVELS
        loss = self.quantization_loss(batch[0]) if ready else self.initial_loss()
        scale_loss_by_world_size_for_initialization_training_loop(
            self, loss, self.trainer.world_size, is_initialized=ready
        )

    def initial_loss(self) -> Tensor:
        """Return the distance of the next level from k-means over rank 0's rows; others' losses do not count."""
        centroids = self.levels[self.n_set]
        target = torch.zeros_like(centroids)
        if self.trainer.is_global_zero:
            target = kmeans.fit(self.residual(self.mine(), self.n_set), CODES).centroids
        self.n_set += 1
        return (centroids - target).square().sum()

    def quantization_loss(self, rows: Tensor) -> Tensor:
        loss = rows.new_zeros(())
        for level, centroids in enumerate(self.levels):
            residual = self.residual(rows, level)
            codes, _ = kmeans.assign(residual, centroids.detach())
            loss = loss + (centroids[codes] - residual).square().sum(1).mean()
        return loss

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        dataset = torch.utils.data.TensorDataset(self.mine())
        return torch.utils.data.DataLoader(dataset, batch_size=256, drop_last=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def from_all_rows(module: ResidualQuantization, group: Group) -> dict[str, Tensor]:
    """Return every level's centroids, from the rows of all workers: the same as from one process with all rows."""
    books = codebooks.fit(module.mine(), [CODES] * LEVELS, pool=reduce.pool(group), center=False)
    return {f"levels.{level}": book for level, book in enumerate(books.levels)}


def judge(module: ResidualQuantization) -> str:
    rows, codes = module.rows, []
    for level, centroids in enumerate(module.levels):
        codes.append(kmeans.assign(module.residual(rows, level), centroids.detach())[0])
    error = module.residual(rows, LEVELS).square().sum() / rows.square().sum()
    distinct = len(torch.stack(codes, 1).unique(dim=0)) / len(rows)
    share = codes[0].bincount(minlength=CODES).double() / len(rows)
    perplexity = torch.special.entr(share).sum().exp()
    return f"relative error {error:.3f}, distinct ids {distinct:.1%}, perplexity of level 1 {perplexity:.1f}"


def run(rows: Tensor, workers: int, old_way: bool) -> tuple[ResidualQuantization, bool]:
    module = ResidualQuantization(rows, old_way)
    initialize = None if old_way else Initialization(from_all_rows)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=ddp_strategy(find_unused_parameters=True) if workers > 1 else "auto",
        use_distributed_sampler=False,  # each worker keeps the rows that it holds
        max_steps=5,
        callbacks=[SamestepCallback(audit=1, initialize=initialize)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module, trainer.is_global_zero


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=13939)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = embeddings(options.rows)
    for name, old_way in (("old way", True), ("new way", False)):
        module, is_main = run(rows, options.workers, old_way)
        if is_main:
            print(f"{name}: {judge(module)}")


if __name__ == "__main__":
    main()
