"""A Detectron recipe's schedule in torch.optim.SGD: the same rates, the same path of the weights.

    torchrun --nproc-per-node 2 examples/detectron_schedule.py

Detectron keeps the learning rate inside the momentum history and rescales it where the rate jumps by more than 1.1;
torch keeps it outside. The scheduler knows both forms, so torch's SGD follows the path of the original update.
"""

import tempfile
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import caffe2
from samestep.group import Group
from samestep.scheduler import LRScheduler

RECIPE = """
NUM_GPUS: 2
TRAIN: {IMS_PER_BATCH: 1}
SOLVER: {LR_POLICY: steps_with_decay, BASE_LR: 0.02, GAMMA: 0.1, STEPS: [0, 60, 80], MAX_ITER: 90,
         WARM_UP_ITERS: 10, WARM_UP_FACTOR: 0.3333, WEIGHT_DECAY: 0.0001, MOMENTUM: 0.9}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Group.from_env() as group:
        path = Path(folder, "recipe.yaml")
        path.write_text(RECIPE)
        recipe = caffe2.read_recipe(path)
        weights = {}
        for form in ("torch", "caffe2"):
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 1, dtype=torch.float64, device=group.device)
            if form == "torch":
                optimizer = torch.optim.SGD(
                    [
                        {"params": [model.weight], "weight_decay": recipe.param_groups.weight_decay},
                        {"params": [model.bias], "lr": 2 * recipe.base_lr},  # biases: rate x 2, no decay
                    ],
                    lr=recipe.base_lr,
                    momentum=recipe.sgd_momentum,
                )
                LRScheduler(optimizer, recipe.schedule, momentum=recipe.momentum, group=group)
            else:
                optimizer, _ = recipe.build(model)  # the original's own update
            ddp = DistributedDataParallel(model) if group.world_size > 1 else model
            rates = []
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            mine = inputs.tensor_split(group.world_size)[group.rank].to(group.device)
            for _ in range(recipe.total_steps):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                (ddp(mine) - mine.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
            weights[form] = model.weight.detach().clone()
        if group.is_main:
            print("rates", [round(rates[step], 6) for step in (0, 5, 10, 60, 80)])
            print(f"paths differ by {(weights['torch'] - weights['caffe2']).abs().max():.0e}")


if __name__ == "__main__":
    main()
