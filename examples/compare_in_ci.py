"""A training script that a CI step compares: 1, 2 and 4 workers must train the same model.

    samestep compare --workers 1,2,4 --steps 20 --junit compare.xml -- examples/compare_in_ci.py
    samestep compare --workers 1,2,4 --steps 20 -- examples/compare_in_ci.py --mean-of-means

The batch of 30 rows does not divide by 4. With --mean-of-means the script does what plain DDP does; the comparison
ends with exit code 1 and names the first tensor that parts.
"""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep import hooks
from samestep.compare import record
from samestep.group import Group


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mean-of-means", action="store_true", help="leave out the weighted mean")
    plain = parser.parse_args().mean_of_means
    with Group.from_env() as group:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        model.to(group.device)
        ddp, weights = model, None
        if group.world_size > 1:
            ddp = DistributedDataParallel(model)
            weights = None if plain else hooks.register(ddp, hooks.weighted_mean, group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        rows = torch.randn(600, 6, generator=torch.Generator().manual_seed(1))
        record(0, ddp, optimizer, group=group)
        for step in range(20):
            ids = torch.arange(30 * step, 30 * step + 30).tensor_split(group.world_size)[group.rank]
            inputs = rows[ids].to(group.device)
            optimizer.zero_grad()
            loss = (ddp(inputs) - inputs[:, :2].square()).square().mean()
            (weights.weigh(loss, len(ids)) if weights else loss).backward()
            optimizer.step()
            record(step + 1, ddp, optimizer, loss=loss, samples=ids, group=group)


if __name__ == "__main__":
    main()
