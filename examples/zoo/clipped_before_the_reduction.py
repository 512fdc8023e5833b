"""Each worker clips its own gradient, then they are averaged.

The norm of a local gradient is not the norm of the mean. Workers with a large gradient lose their say.

Reports: modelscope/twinkle#290; modelscope/ms-swift#8341
"""

import torch

from samestep import explain

global_batch = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def gradients(model, loss_fn, part):
    loss_fn(model, part).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def build():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    many = torch.distributed.get_world_size() > 1
    clip = None if many else (lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.05))
    return explain.Program(model, optimizer, loss_fn, gradients if many else None, clip)


if __name__ == "__main__":
    print(explain.one_step(build, global_batch, world_size=4).sentence)
