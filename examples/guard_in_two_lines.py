"""The guard in two lines: it names the tensor, the ranks and the phase in which replicas part.

    torchrun --nproc-per-node 2 examples/guard_in_two_lines.py
    torchrun --nproc-per-node 2 examples/guard_in_two_lines.py --break

An ordinary DDP loop. With --break, a "warm restart" that only rank 1 believes in halves one bias there, after step
25: the loss goes on falling, and nothing else would say a word.
"""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError
from samestep.group import Group


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--break", dest="fault", action="store_true", help="let rank 1 go its own way")
    fault = parser.parse_args().fault
    with Group.from_env() as group:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        model.to(group.device)
        ddp = DistributedDataParallel(model) if group.world_size > 1 else model
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

        audit = Audit(group, every=10)  # line one
        audit.watch(ddp, optimizer)  # line two

        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(group.rank)).to(group.device)
        targets = inputs.square().mean(1, keepdim=True)
        try:
            for step in range(50):
                if fault and step == 25 and group.rank == 1:
                    model[2].bias.data.mul_(0.5)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
                optimizer.step()
            audit.check(step=50)
        except ReplicaMismatchError as error:  # raised on every rank; the whole report is its text
            if group.is_main:
                print(f"caught: {error.name} parted, rank {error.rank}\n{error}")
            return
        if group.is_main:
            print("agree: 50 steps, every replica bit for bit the same")


if __name__ == "__main__":
    main()
