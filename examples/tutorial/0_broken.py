"""Twenty lines that look right. Compare one worker with four: see docs/tutorial.md."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from samestep.compare import record

dist.init_process_group("gloo")
n_workers = dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(70, 6)
data = TensorDataset(inputs, (inputs[:, 0] > 0).long(), torch.arange(70))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=14 // n_workers, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 * n_workers, momentum=0.9)
record(0, ddp, optimizer)
step = 0
for _ in range(2):
    for rows, labels, ids in loader:
        loss = torch.nn.functional.cross_entropy(ddp(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        record(step, ddp, optimizer, loss=loss, samples=ids)
dist.destroy_process_group()
