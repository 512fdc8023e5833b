"""A loop on Accelerate with the exact mean under accumulation, an audit, and a schedule that steps once per update.

    torchrun --nproc-per-node 2 examples/accelerate_exact_mean.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_exact_mean.py    (on GPUs: no cpu=True)

Micro-batches hold 5, 1, 2 and 3 samples; every update is the mean over all 11, on one worker as on two.
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss

from samestep import schedules
from samestep.accelerate import ExactMean, process_group, watch
from samestep.scheduler import LRScheduler

SIZES = [5, 1, 2, 3]
STEPS = 20


def main() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[process_group()])
    n_workers, rank = accelerator.num_processes, accelerator.process_index
    per_worker = len(SIZES) // n_workers
    accelerator.gradient_accumulation_steps = per_worker

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LRScheduler(
        optimizer, schedules.cosine(STEPS)
    )  # follows the optimizer: nothing has to step it
    model, optimizer = accelerator.prepare(model, optimizer)
    exact = ExactMean(accelerator, model, optimizer)
    audit = watch(accelerator, model, optimizer, scheduler, every=5)

    inputs = torch.randn(sum(SIZES), 4, generator=torch.Generator().manual_seed(0))
    batches = list(inputs.split(SIZES))[rank * per_worker : (rank + 1) * per_worker]
    lrs = []
    for _ in range(STEPS):
        lrs.append(optimizer.param_groups[0]["lr"])
        for batch in batches:
            with accelerator.accumulate(model):
                loss = mse_loss(model(batch), batch.sum(1, keepdim=True))
                exact.backward(loss, n_samples=len(batch))
                optimizer.step()
                optimizer.zero_grad()
    audit.check(STEPS)
    if accelerator.is_main_process:
        print(f"rate at half time {lrs[STEPS // 2]:.3f}")
        print(f"weight {accelerator.unwrap_model(model).weight.detach().flatten().tolist()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
