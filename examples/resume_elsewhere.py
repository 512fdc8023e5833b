"""Stop a run, go on with another number of workers, end with the same bits.

    torchrun --nproc-per-node 2 examples/resume_elsewhere.py runs/moved --stop-after 7
    torchrun --nproc-per-node 3 examples/resume_elsewhere.py runs/moved

The global batch is cut into six shards whatever the number of workers, so any of 1 to 6 will do. The line that
it prints ends in a digest of the model: it is that of a run that was never stopped.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from samestep import fingerprint, schedules, start
from samestep.checkpoint import Checkpointer
from samestep.group import Group
from samestep.scheduler import LRScheduler
from samestep.sharding import ShardLoader
from samestep.step import TrainStep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop-after", type=int, default=20)
    options = parser.parse_args()
    with Group.from_env() as group:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
        model.to(group.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        start.broadcast(model, optimizer, group=group)
        scheduler = LRScheduler(optimizer, schedules.cosine(20) * schedules.linear_warmup(5), group=group)
        inputs = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
        dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
        loader = ShardLoader(dataset, global_batch_size=24, shards=6, group=group, seed=3)
        step = TrainStep(model, optimizer, group=group, shards=6, mode="exact", scheduler=scheduler, seed=3)
        things = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
            "step": step,
        }

        def loss_fn(model: torch.nn.Module, shard):
            batch, targets = (part.to(group.device) for part in shard.batch)
            return (model(batch) - targets).square().sum(), len(batch)

        checkpointer = Checkpointer(options.folder, group=group)
        checkpointer.restore(**things)
        shards = loader.steps()
        while step.step < options.stop_after:
            step.train_step(next(shards), loss_fn)
        checkpointer.save(step.step, **things)
        if group.is_main:
            print(f"step {step.step} on {group.world_size} workers: {fingerprint.word(model):016x}")


if __name__ == "__main__":
    main()
