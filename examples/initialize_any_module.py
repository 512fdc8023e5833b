"""Data-dependent initialization of any module, over all workers' data: an activation normaliser set before step 0.

    torchrun --nproc-per-node 2 examples/initialize_any_module.py

The rows are sorted, so the workers see different data: statistics of rank 0 alone would be wrong. `compute` reduces
its sums over all workers; `initialize` sets the values on every replica, proves that they agree, and marks the
module, so that a resumed run does not do it again.
"""

import torch
from torch import Tensor, nn

from samestep import reduce, start
from samestep.group import Group


class ScaledInput(nn.Module):
    """Brings every feature to mean 0 and variance 1, with values that training then goes on from."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((dim,), 7.0))  # whatever stood there does no harm
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.shift) * self.scale


def main() -> None:
    with Group.from_env() as group:
        everything = torch.linspace(-1.0, 9.0, 1000, dtype=torch.float64).unsqueeze(1) * torch.tensor(
            [1.0, 3.0]
        )
        rows = everything.tensor_split(group.world_size)[group.rank].to(
            group.device
        )  # this worker's part, sorted
        pool = reduce.pool(group)

        def compute(module: nn.Module) -> dict[str, Tensor]:
            count, total = pool(torch.tensor([len(rows)])), pool(rows.sum(0))
            mean = total / count
            variance = pool((rows - mean).square().sum(0)) / count
            return {"shift": mean.float(), "scale": variance.rsqrt().float()}

        model = start.mark(ScaledInput(2).to(group.device))
        start.initialize(model, compute, group, collective=True)
        outputs = model(rows.float()).double()
        mean = pool(outputs.sum(0)) / pool(torch.tensor([len(rows)]))
        if group.is_main:
            print(f"shift {model.shift.tolist()}, mean afterwards {mean.abs().max():.0e}")
            print(f"needs it again: {start.needs_initialization(model)}")


if __name__ == "__main__":
    main()
