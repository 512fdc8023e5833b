"""Lightning with the exact mean, an audit, a schedule in updates and a resume in mid-epoch.

    python examples/lightning_exact.py --workers 2          (Lightning starts the second process itself)
    torchrun --nproc-per-node 2 examples/lightning_exact.py --workers 2

The epoch has 50 samples and an update 12, so the last one is short; each worker takes its four shards of an update
one by one. The run is stopped in the middle of its second epoch and goes on from Lightning's checkpoint.
"""

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss

from samestep import schedules
from samestep.lightning import SamestepCallback, ShardDataLoader, ddp_strategy
from samestep.scheduler import LRScheduler


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def training_step(self, batch):
        inputs, targets = batch
        return mse_loss(self.net(inputs), targets)

    def train_dataloader(self):
        inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
        dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return ShardDataLoader(dataset, global_batch_size=12, shards=8, trainer=self.trainer, drop_last=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = schedules.linear_warmup(3) * schedules.cosine(12)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LRScheduler(optimizer, schedule), "interval": "step"},
        }


def fit(workers: int, folder: Path, steps: int = -1, resume: Path | None = None) -> pl.Trainer:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=ddp_strategy() if workers > 1 else "auto",
        max_epochs=3,
        max_steps=steps,
        accumulate_grad_batches=8 // workers,
        gradient_clip_val=1.0,
        callbacks=[SamestepCallback(audit=2, exact_mean=True, ordered=True, seed=7), saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), ckpt_path=resume)
    return trainer


def weights(trainer: pl.Trainer) -> list[float]:
    return trainer.lightning_module.net[2].weight.detach().flatten().tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    workers = parser.parse_args().workers
    with tempfile.TemporaryDirectory() as name:
        trainer = fit(workers, Path(name) / "stopped", steps=7)
        saved = Path(trainer.strategy.broadcast(name)) / "stopped" / "step=6.ckpt"  # rank 0 has the file
        resumed = weights(fit(workers, Path(name) / "resumed", resume=saved))
        whole = weights(fit(workers, Path(name) / "whole"))
        trainer.strategy.barrier()
    if trainer.is_global_zero:
        print(f"weights {whole}")
        print(f"resumed run equal: {resumed == whole}")


if __name__ == "__main__":
    main()
