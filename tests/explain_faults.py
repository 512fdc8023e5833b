"""Small training programs, right ones and ones with a planted fault, for `explain` to look at.

``program(...)`` is the builder: right by default, on any number of workers. Every fault is one deviation from it.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from samestep.explain import Program, by_train_step


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm2d(nn.Module):
    """Batch statistics over all ranks' samples, as torch's own does on CUDA."""

    def __init__(self, channels, synchronised=True):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.synchronised = synchronised

    def forward(self, x):
        sums = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), x.new_tensor([x.numel() / x.shape[1]])])
        sums = _Sum.apply(sums) if self.synchronised else sums
        mean, square = (sums[:-1] / sums[-1].detach()).chunk(2)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        shape = (1, -1, 1, 1)
        y = (x - mean.view(shape)) * (square - mean * mean + 1e-5).rsqrt().view(shape)
        return y * self.weight.view(shape) + self.bias.view(shape)


class Mlp(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, outputs)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class Conv(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv1, self.n1 = nn.Conv2d(2, 4, 3, padding=1), norm(4)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        y = F.max_pool2d(self.act(self.n1(self.conv1(x))), 2)
        return self.head(y.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.head(self.block(self.inp(x)).mean(1))


class Ema(Mlp):
    """Keeps a running mean of what it sees, of this rank only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codebook", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.codebook.lerp_(x.mean(0), 0.1)
        return super().forward(x)


class Unused(Mlp):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 3)


class Noisy(Mlp):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


MODELS = {
    "mlp": Mlp,
    "groupnorm": lambda: Conv(partial(nn.GroupNorm, 2)),
    "batchnorm": lambda: Conv(SyncBatchNorm2d),
    "transformer": Transformer,
    "local batchnorm": lambda: Conv(nn.BatchNorm2d),
    "ema": Ema,
    "unused": Unused,
    "noisy": Noisy,
    "tokens": lambda: Mlp(outputs=3),
}


def batch(model="mlp", n_samples=24, seed=5):
    make = torch.Generator().manual_seed(seed)
    shape = {"transformer": (5, 4), "tokens": (5, 6)}.get(model, (6,))
    if model in ("groupnorm", "batchnorm", "local batchnorm"):
        shape = (2, 6, 6)
    x = torch.randn(n_samples, *shape, generator=make)
    y = torch.randint(3, (n_samples, 5) if model == "tokens" else (n_samples,), generator=make)
    if model != "tokens":
        return x, y
    lengths = torch.randint(1, 6, (n_samples,), generator=make)
    return x, y.masked_fill(torch.arange(5) >= lengths.unsqueeze(1), -100)


def total(number):
    value = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(value)
    return value.item()


def mean_loss(model, part):
    x, y = part
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def right_loss(model, part):
    """The mean over the global batch, times the world size, for DDP to average."""
    x, y = part
    n = int((y != -100).sum())
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
    return loss * (dist.get_world_size() / total(n))


def plain_loss(model, part, factor=1.0):
    """The mean over the global batch as a sum of shares, for a reduction by sum."""
    return right_loss(model, part) / dist.get_world_size() * factor


def scaled_loss(model, part, factor, rank=None):
    here = dist.get_world_size() > 1 and rank in (None, dist.get_rank())
    return right_loss(model, part) * (factor if here else 1.0)


def contrastive_loss(model, part):
    """Each sample against all samples of this rank: the others are its negatives."""
    one, two = F.normalize(model(part[0]), dim=1), F.normalize(model(part[0] + 0.1), dim=1)
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)))


def reduce_by_hand(model, loss_fn, part, skip=(), op="mean", before=None, parts=1):
    """Backward over some micro-batches, then one all-reduce per parameter."""
    for x, y in zip(part[0].chunk(parts), part[1].chunk(parts)):
        loss_fn(model, (x, y)).backward()
    if before is not None and dist.get_world_size() > 1:
        before(model)
    for name, p in model.named_parameters():
        if name not in skip and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() if op == "mean" else 1


def accumulate(model, loss_fn, part, parts=2, divide=False, sync=(-1,)):
    """Accumulation under DDP; `sync` says which micro-batches are reduced, the last one if it is right."""
    pieces = list(zip(part[0].chunk(parts), part[1].chunk(parts)))
    synced = {i % parts for i in sync}
    for i, piece in enumerate(pieces):
        model.require_backward_grad_sync = i in synced
        (loss_fn(model, piece) / (parts if divide else 1)).backward()
    model.require_backward_grad_sync = True


def forward_without_sync(model, loss_fn, part):
    with model.no_sync():
        loss = loss_fn(model, part)
    loss.backward()


def last_microbatch(model, loss_fn, part):
    for x, y in zip(part[0].chunk(2), part[1].chunk(2)):
        model.zero_grad()
        loss_fn(model, (x, y)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def zeros_for_none(model, loss_fn, part):
    reduce_by_hand(model, loss_fn, part)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def duplicated(whole, rank, world_size, padded_to=24):
    """DistributedSampler's padding: repeats the first samples until the ranks have the same number."""
    n = len(whole[0])
    index = [*range(n), *range(padded_to - n)][rank::world_size]
    return tuple(t[index] for t in whole)


def interleaved(whole, rank, world_size):
    return tuple(t[rank::world_size] for t in whole)


def same_for_all(whole, rank, world_size):
    return tuple(t[: len(t) // world_size] for t in whole)


def in_bf16(state, bucket):
    """torch's bf16_compress_hook, which itself wants CUDA."""
    narrow = (bucket.buffer() / dist.get_world_size()).bfloat16()
    future = dist.all_reduce(narrow, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def clip(parameters, bound=0.05):
    nn.utils.clip_grad_norm_(list(parameters), bound)


def norm_summed_again(parameters, bound=0.05):
    square = torch.stack([p.grad.norm() for p in parameters]).square().sum()
    dist.all_reduce(square)
    for p in parameters:
        p.grad *= bound / (square.sqrt() + 1e-6)


def not_clipped(parameters):
    if dist.get_world_size() == 1:
        clip(parameters)


def whole_step(model, optimizer, loss_fn, part, bound=0.05):
    optimizer.zero_grad()
    loss_fn(model, part).backward()
    if bound is not None:
        clip(model.parameters(), bound)
    optimizer.step()


def optimizer_for(model, kind, lr=0.05, weight_decay=0.01):
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)


def program(
    model="mlp",
    optimizer="sgd",
    after=0,
    wrapped=True,
    loss=right_loss,
    gradients=None,
    fault="",
    clip=None,
    split=None,
    train_step=None,
):
    """A right program by default; `fault` names a deviation that is none of the other arguments'."""
    many, rank = dist.get_world_size() > 1, dist.get_rank()
    torch.manual_seed(3)
    net = MODELS[model]()
    if fault == "explicit float32":
        net.fc1.bias = nn.Parameter(torch.zeros(8, dtype=torch.float32))
    norms = [m for m in net.modules() if isinstance(m, SyncBatchNorm2d)]
    optim = optimizer_for(net, optimizer)
    for m in norms:
        m.synchronised = False
    for step in range(after):
        optim.zero_grad()
        x, y = batch(model, 8, seed=step)
        dtype = torch.get_default_dtype()
        mean_loss(net, (x.to(dtype), y)).backward()
        optim.step()
    for m in norms:
        m.synchronised = True
    optim.zero_grad()
    if many and fault == "init" and rank == 1:
        with torch.no_grad():
            net.fc1.weight[0, 0] += 1e-7
    if many and fault == "structure" and rank == 1:
        net.fc2.bias = nn.Parameter(torch.zeros(4))
    if many and fault == "optimizer state" and rank:
        optim.state.clear()
    options = optim.param_groups[0]
    if many and fault == "lr":
        options["lr"] *= dist.get_world_size()
    if many and fault == "lr on rank 0" and rank:
        options["lr"] = 0.1
    if many and fault == "weight decay":
        options["weight_decay"] = 0.0
    if many and fault == "not in the optimizer":
        options["params"] = [p for p in options["params"] if p is not net.fc2.bias]
    wrapper = DDP(net) if wrapped else net
    if fault == "late":
        net.register_parameter("late", nn.Parameter(torch.full((6,), 0.5)))
        optim.add_param_group({"params": [net.late]})
        net.fc1.register_forward_pre_hook(lambda module, inputs: (inputs[0] * net.late,))
    if many and fault == "bf16":
        wrapper.register_comm_hook(None, in_bf16)
    return Program(wrapper, optim, loss, gradients, clip, split, train_step)


def bypassed(model, part, loss=right_loss):
    return loss(model.module if isinstance(model, DDP) else model, part)


def clipped_before(**kwargs):
    many = dist.get_world_size() > 1
    local = lambda model: clip(model.parameters())  # noqa: E731
    return program(
        wrapped=False,
        gradients=partial(reduce_by_hand, before=local),
        clip=None if many else clip,
        **kwargs,
    )


def minimal():
    """DESIGN's form: model, optimizer, loss function."""
    torch.manual_seed(3)
    net = Mlp()
    return DDP(net), optimizer_for(net, "sgd"), mean_loss


def sum_and_count(model, part):
    """The form of TrainStep's loss functions."""
    x, y = part
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum")
    return loss, int((y != -100).sum())


def clip_exactly(parameters, bound=0.05):
    """As TrainStep: torch's own rule adds 1e-6 to the norm."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    for p in parameters:
        p.grad *= min(1.0, bound / norm)


def sum_times_world_size(model, part):
    loss, count = sum_and_count(model, part)
    return loss * dist.get_world_size(), count


def own_step(mode, clip_norm=0.05, clip=clip_exactly, loss=sum_and_count):
    step = by_train_step(mode=mode, clip_norm=clip_norm)
    return program("tokens", wrapped=False, loss=loss, clip=clip, train_step=step)


def constant(model, part):
    return (model(part[0]) * 0).sum() + 1


def independent(model, part):
    return part[0].sum()


def ordered(model, part):
    """Weights the samples by their places."""
    return (model(part[0]).square().mean(1) * torch.arange(len(part[0]))).sum()


def float_cast(model, part):
    """Casts in the way of mixed precision; rows of one sample only meet in the last mean."""
    return model(part[0].float()).float().square().mean()
