"""The audit finds every planted fault, names tensor, phase and ranks, and stays silent on good programs.

Every fault is planted on the last rank: with 4 workers the others are the majority, with 2 it is one against one.
"""

import contextlib
import importlib.util
import json
import logging
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from samestep import launch, schedules, start
from samestep.audit import Audit
from samestep.errors import ReplicaMismatchError, SpecError
from samestep.group import Group
from samestep.recipes.semantic_ids.model import RQVAE, loss_sums
from samestep.reduce import gather_parts, ordered_sum
from samestep.scheduler import LRScheduler
from samestep.sharding import Shard, ShardLoader
from samestep.step import TrainStep

STEPS = 4


class Net(nn.Module):
    """A linear layer, BatchNorm and a buffer of its own."""

    def __init__(self, batch_norm=True):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6) if batch_norm else nn.Identity()
        self.last = nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.scale


def inputs(group, step, n=4):
    generator = torch.Generator().manual_seed(1000 * step + group.rank)
    return torch.randn(n, 4, generator=generator)


def flip(tensor):
    """Flip the lowest mantissa bit of a float32 tensor's first element."""
    tensor.detach().view(torch.int32).view(-1)[:1].bitwise_xor_(1)


def is_last(group):
    return group.rank == group.world_size - 1


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def made(group, optimizer=adamw, **kwargs):
    torch.manual_seed(0)
    model = Net(**kwargs)
    return model, optimizer(model)


def loss_sum(model, x):
    return model(x).square().sum(), len(x)


# -- faults under TrainStep: the plant comes between the update and the look ------------------------------------


def with_train_step(group, plant, at=2, optimizer=adamw, every=1, **watched):
    model, optimizer = made(group, optimizer)
    audit = Audit(group, every=every).watch(
        model, optimizer, **{name: make(optimizer) for name, make in watched.items()}
    )
    step = TrainStep(model, optimizer, group=group, shards=group.world_size, mode="exact", audit=audit)

    def planted(*_):
        if is_last(group) and step.step + 1 == at:
            plant(SimpleNamespace(model=model, optimizer=optimizer, audit=audit))

    optimizer.register_step_post_hook(planted)
    for number in range(STEPS):
        step.train_step([inputs(group, number)], loss_sum)


def parameter_bit(group):
    with_train_step(group, lambda run: flip(run.model.last.weight))


def moment_bit(group):
    with_train_step(group, lambda run: flip(run.optimizer.state[run.model.last.weight]["exp_avg"]))


def velocity_bit(group):
    def plant(run):
        flip(run.optimizer.state[run.model.first.bias]["momentum_buffer"])

    with_train_step(group, plant, optimizer=sgd)


def buffer_bit(group):
    with_train_step(group, lambda run: flip(run.model.scale))


def gradient_bit(group):
    with_train_step(group, lambda run: flip(run.model.first.weight.grad))


def lr_of_one_rank(group):
    with_train_step(group, lambda run: run.optimizer.param_groups[0].update(lr=0.02))


def option_of_one_rank(group):
    with_train_step(group, lambda run: run.optimizer.param_groups[0].update(weight_decay=0.5))


def scaler_of_one_rank(group):
    model, optimizer = made(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 if is_last(group) else 2.0)
    scaler.scale(torch.ones(()))
    Audit(group).watch(model, optimizer, scaler=scaler).check(2)


def moment_bit_a_step_before(group):
    """Planted after the second look: at the third, the parameter differs as well."""
    model, optimizer = made(group)
    audit = Audit(group, every=1).watch(model, optimizer)
    step = TrainStep(model, optimizer, group=group, audit=audit)
    for number in range(STEPS):
        step.train_step([inputs(group, number)], loss_sum)
        if number == 1 and is_last(group):
            optimizer.state[model.last.weight]["exp_avg"].view(-1)[0] += 1e-3


def parameter_changed_that_reaches_its_own_velocity(group):
    """Weight decay that is added to the gradient carries the change into the velocity too."""
    model, _ = made(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    audit = Audit(group, every=1).watch(model, optimizer)
    step = TrainStep(model, optimizer, group=group, audit=audit)
    for number in range(STEPS):
        step.train_step([inputs(group, number)], loss_sum)
        if number == 1 and is_last(group):
            model.first.weight.detach()[0, 0] += 0.25


def skipped_under_train_step(group):
    model, optimizer = made(group)
    audit = Audit(group, every=1).watch(model, optimizer)
    step = TrainStep(model, optimizer, group=group, audit=audit)
    whole = optimizer.step
    for number in range(STEPS):
        optimizer.step = (lambda: None) if number == 1 and is_last(group) else whole
        step.train_step([inputs(group, number)], loss_sum)


def swapped_sample(group):
    """The first two samples change ranks: union, count and mean stay what they were."""
    with_loader(group, swap=True)


def repeated_sample(group):
    model, optimizer = made(group)
    audit = Audit(group, every=1).watch(model, optimizer)
    audit.samples([0, 1] if is_last(group) else [group.rank + 1])
    audit.check(2)


def missing_sample(group):
    model, optimizer = made(group)
    audit = Audit(group, every=1).watch(model, optimizer)
    audit.samples([group.rank], whole=range(group.world_size + 1))
    audit.check(2)


def count_off_by_one(group):
    model, optimizer = made(group)
    audit = Audit(group, every=1).watch(model, optimizer)
    audit.samples([group.rank], count=17 if is_last(group) else 16, expected_count=16)
    audit.check(2)


def with_loader(group, swap=False):
    model, optimizer = made(group)
    shards = group.world_size
    loader = ShardLoader(list(range(20)), 2 * shards, shards, group=group, seed=3)
    audit = Audit(group, every=1).watch(model, optimizer, loader=loader)
    step = TrainStep(model, optimizer, group=group, shards=shards, audit=audit)
    for number, mine in enumerate(loader.steps(STEPS)):
        every = gather_parts(mine[0].sample_ids, group)
        if swap and number == 1 and group.rank >= group.world_size - 2:
            # The first samples of the last two ranks change places.
            ids = every[group.rank].clone()
            ids[0] = every[group.world_size - 2 if is_last(group) else -1][0]
            mine = [Shard(mine[0].index, ids, mine[0].batch)]
        audit.samples(mine)
        step.train_step([inputs(group, int(shard.sample_ids.sum())) for shard in mine], loss_sum)


# -- faults in loops of the user's own, with DDP ----------------------------------------------------------------


def with_ddp(
    group, *, plant=None, at=2, every=1, forward=None, batch_norm=True, ready=None, ddp=None, **watched
):
    """A plain loop; `plant` comes on the last rank after update `at`, or `forward` replaces the pass."""
    torch.manual_seed(group.rank)
    model = Net(batch_norm)
    if ready is not None:
        ready(model, group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates the option, which people still use
        model = DistributedDataParallel(model, **(ddp or {}))
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    audit = Audit(group, every=every).watch(model, optimizer, scheduler=scheduler, **watched)
    run = SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, skip=False, group=group)
    for number in range(2 * every + STEPS):
        optimizer.zero_grad()
        x = inputs(group, number)
        if forward is None:
            model(x).square().mean().backward()
        else:
            forward(run, x)
        run.skip = False
        if plant is not None and number + 1 == at and is_last(group):
            plant(run)
        if not run.skip:
            optimizer.step()
        scheduler.step()
        after = getattr(run, "after", None)
        if after is not None:
            after()
            run.after = None
    audit.check(2 * every + STEPS)
    audit.detach()
    return audit


def ddp_skipped_update(group):
    with_ddp(group, plant=lambda run: setattr(run, "skip", True))


def ddp_skipped_update_between_looks(group):
    with_ddp(group, plant=lambda run: setattr(run, "skip", True), every=4)


def _later(change):
    def plant(run):
        run.after = lambda: change(run)

    return plant


def ddp_parameter_bit(group):
    with_ddp(group, plant=_later(lambda run: flip(run.model.module.last.bias)))


def ddp_moment_bit(group):
    def change(run):
        flip(run.optimizer.state[run.model.module.first.weight]["exp_avg_sq"])

    with_ddp(group, plant=_later(change))


def ddp_buffer_bit(group):
    with_ddp(group, plant=_later(lambda run: flip(run.model.module.scale)))


def ddp_gradient_changed_after_reduction(group):
    with_ddp(group, plant=lambda run: flip(run.model.module.last.weight.grad))


def ddp_scheduler_twice(group):
    with_ddp(group, plant=lambda run: run.scheduler.step())


def ddp_state_lost(group):
    with_ddp(group, plant=_later(lambda run: run.optimizer.state.clear()))


def ddp_forward_in_no_sync(group):
    def forward(run, x):
        with run.model.no_sync():
            out = run.model(x)
        out.square().mean().backward()

    with_ddp(group, forward=forward)


def ddp_last_microbatch_not_reduced(group):
    def forward(run, x):
        run.model(x).square().mean().backward()
        with run.model.no_sync():
            run.model(x).square().mean().backward()

    with_ddp(group, forward=forward)


def ddp_bypassed(group):
    with_ddp(group, forward=lambda run, x: run.model.module(x).square().mean().backward())


def ddp_bypassed_every_third(group):
    with_ddp(group, forward=lambda run, x: run.model.module(x).square().mean().backward(), every=3)


def ddp_parameter_added(group):
    def forward(run, x):
        inner = run.model.module
        if not hasattr(inner, "late"):
            inner.late = nn.Parameter(torch.zeros(2))
            run.optimizer.add_param_group({"params": [inner.late]})
        (run.model(x) + inner.late).square().mean().backward()

    with_ddp(group, forward=forward)


def ddp_buffers_not_copied(group):
    def ready(model, group):
        model.scale.normal_(generator=torch.Generator().manual_seed(group.rank // (group.world_size - 1)))

    with_ddp(group, ready=ready, ddp={"broadcast_buffers": False}, batch_norm=False)


def ddp_codebook_of_own_data(group):
    def forward(run, x):
        run.model(x).square().mean().backward()
        if is_last(run.group):
            run.model.module.scale.mul_(0.9).add_(0.1 * x.mean())

    with_ddp(group, forward=forward)


def ddp_inner_optimizer(group):
    def forward(run, x):
        run.model(x).square().mean().backward()
        if is_last(run.group):
            run.model.module.first.bias.data.sub_(0.1 * x.mean())

    with_ddp(group, forward=forward)


def ddp_lr_of_one_rank(group):
    with_ddp(group, ready=None, plant=_later(lambda run: run.optimizer.param_groups[0].update(lr=0.3)))


# -- faults without DDP ------------------------------------------------------------------------------------------


def by_hand(group, change=None, seed=0, reduced=True):
    torch.manual_seed(seed)
    model = Net(batch_norm=False)
    optimizer = sgd(model)
    audit = Audit(group, every=1).watch(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(inputs(group, number)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = (
                ordered_sum(parameter.grad, group) / group.world_size if reduced else parameter.grad
            )
        if change is not None and number == 1 and is_last(group):
            change(model)
        optimizer.step()
    audit.check(STEPS)
    audit.detach()


def seeds_differ(group):
    by_hand(group, seed=int(is_last(group)))


def gradient_absent(group):
    by_hand(group, lambda model: setattr(model.last.weight, "grad", None))


def no_gradients_on_one_rank(group):
    def forget(model):
        model.zero_grad()

    by_hand(group, forget)


def reduction_over_a_group_of_one(group):
    """Another kind of parallelism has shrunk the group, and its all-reduce does nothing."""
    by_hand(group, reduced=False)


def structure_differs(group):
    model, optimizer = made(group)
    if is_last(group):
        model.extra = nn.Linear(2, 2)
    Audit(group).watch(model, optimizer).check(0, "at start")


def lr_restored_on_one_rank(group):
    model, optimizer = made(group)
    if is_last(group):
        optimizer.param_groups[0]["lr"] = 0.5
    start.broadcast(model, group=group)
    Audit(group).watch(model, optimizer).check(0, "at start")


def schedule_restored_on_one_rank(group):
    model, optimizer = made(group)
    scheduler = LRScheduler(optimizer, schedules.constant())
    if is_last(group):
        scheduler.load_state_dict({**scheduler.state_dict(), "step": 7})
    Audit(group).watch(model, optimizer, scheduler=scheduler).check(0, "at start")


def epoch_not_set(group):
    data = TensorDataset(torch.arange(8.0))
    sampler = DistributedSampler(data, group.world_size, group.rank)
    if is_last(group):
        sampler.set_epoch(1)
    model, optimizer = made(group)
    loader = DataLoader(data, sampler=sampler)
    Audit(group).watch(model, optimizer, loader=loader).check(0, "at start")


def loader_behind(group):
    model, optimizer = made(group)
    loader = ShardLoader(list(range(20)), 8, 4, group=group)
    steps = loader.steps(2)
    next(steps)
    if is_last(group):
        next(steps)
    Audit(group).watch(model, optimizer, loader=loader).check(1)


def same_masks(group):
    model, optimizer = made(group)
    torch.manual_seed(0)
    Audit(group).watch(model, optimizer, rng="distinct").check(0, "at start")


def generator_of_a_peer(group):
    """Each rank's own generator was saved, and the last rank restored its neighbour's."""
    model, optimizer = made(group)
    torch.manual_seed(min(group.rank, group.world_size - 2))
    Audit(group).watch(model, optimizer, rng="distinct").check(0, "at start")


def generators_differ(group):
    model, optimizer = made(group)
    torch.manual_seed(int(is_last(group)))
    Audit(group).watch(model, optimizer, rng="same").check(0, "at start")


AFTER = "parameters after the step"
FAULTS = {
    # section 7 of the cases: single bits, a skipped step, a swapped sample, a count
    parameter_bit: (AFTER, "last.weight", 2),
    moment_bit: ("optimizer state", "state.last.weight.exp_avg", 2),
    velocity_bit: ("optimizer state", "state.first.bias.momentum_buffer", 2),
    moment_bit_a_step_before: ("optimizer state", "state.last.weight.exp_avg", 3),
    parameter_changed_that_reaches_its_own_velocity: (AFTER, "first.weight", 3),
    skipped_under_train_step: ("step count", "applied updates", 2),
    swapped_sample: ("data", "sample ids", 2),
    count_off_by_one: ("data", "count", 2),
    ddp_parameter_bit: (AFTER, "last.bias", 2),
    ddp_moment_bit: ("optimizer state", "state.first.weight.exp_avg_sq", 2),
    ddp_buffer_bit: ("buffers", "scale", 2),
    ddp_skipped_update: ("step count", "applied updates", 2),
    ddp_skipped_update_between_looks: ("step count", "applied updates", 4),
    # section 4
    gradient_bit: ("gradients after reduction", "first.weight", 2),
    lr_of_one_rank: ("LR", "options.0.lr", 2),
    option_of_one_rank: ("options", "options.0.weight_decay", 2),
    scaler_of_one_rank: ("scaler", "scaler.scale", 2),
    repeated_sample: ("data", "sample 1", 2),
    missing_sample: ("data", None, 2),
    ddp_gradient_changed_after_reduction: ("gradients after reduction", "last.weight", 2),
    ddp_scheduler_twice: ("LR", "options.0.lr", 2),
    ddp_lr_of_one_rank: ("LR", "options.0.lr", 2),
    ddp_state_lost: ("optimizer state", "state.first.weight.step", 2),
    ddp_forward_in_no_sync: ("gradients after reduction", "first.weight", 0),
    ddp_last_microbatch_not_reduced: ("gradients after reduction", "first.weight", 1),
    ddp_bypassed: ("gradients after reduction", "first.weight", 0),
    ddp_bypassed_every_third: ("gradients after reduction", "first.weight", 0),
    ddp_parameter_added: ("gradients after reduction", "late", 1),
    ddp_buffers_not_copied: ("buffers", "scale", 0),
    ddp_codebook_of_own_data: ("buffers", "scale", 1),
    ddp_inner_optimizer: (AFTER, "first.bias", 1),
    seeds_differ: ("parameters at start", "first.weight", 0),
    gradient_absent: ("gradients after reduction", "last.weight", 1),
    no_gradients_on_one_rank: ("gradients after reduction", "first.weight", 1),
    reduction_over_a_group_of_one: ("gradients after reduction", "first.weight", 0),
    structure_differs: ("parameters at start", "extra.weight", 0),
    lr_restored_on_one_rank: ("LR", "options.0.lr", 0),
    schedule_restored_on_one_rank: ("LR", "scheduler.step", 0),
    epoch_not_set: ("data", "loader.sampler.epoch", 0),
    loader_behind: ("data", "loader.samples_consumed", 1),
    same_masks: ("RNG", "generator.torch", 0),
    generator_of_a_peer: ("RNG", "generator.torch", 0),
    generators_differ: ("RNG", "generator.torch", 0),
}


# The odd one out is the last rank, but where every rank differs from the others (1 is the first after rank 0) or
# several are at fault.
ODD_RANK = {
    swapped_sample: lambda n: n - 2 if n > 2 else 0,
    repeated_sample: lambda n: 0,
    missing_sample: lambda n: 0,
    ddp_forward_in_no_sync: lambda n: 1,
    ddp_last_microbatch_not_reduced: lambda n: 1,
    ddp_bypassed: lambda n: 1,
    ddp_bypassed_every_third: lambda n: 1,
    ddp_parameter_added: lambda n: 1,
    reduction_over_a_group_of_one: lambda n: 1,
    same_masks: lambda n: 0,
    generator_of_a_peer: lambda n: n - 2,
}


def plant_all(group):
    found = {}
    for fault in FAULTS:
        try:
            fault(group)
            found[fault.__name__] = "nothing"
        except ReplicaMismatchError as error:
            found[fault.__name__] = (error.message, error.rank, error.step, error.name, error.common)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def planted(request):
    return request.param, launch.run(plant_all, request.param, timeout_seconds=150)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_alike_on_all_ranks(fault, planted):
    world_size, ranks = planted
    found = [rank[fault.__name__] for rank in ranks]
    phase, tensor, step = FAULTS[fault]
    assert all(rank == found[0] for rank in found)
    message, rank, at, name, common = found[0]
    assert (name, at, common) == (name if tensor is None else tensor, step, True), message
    assert f"({phase}, step {step})" in message
    assert rank == ODD_RANK.get(fault, lambda n: n - 1)(world_size), message


# -- good programs -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A small transformer with dropout, tied weights and an attention mask as a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.triu(torch.full((6, 6), -torch.inf), 1), persistent=False)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens), src_mask=self.mask))


def run_ddp(group, model, batch, loss, n_steps, every=1, accumulate=1, scaler=None, **watched):
    """A plain DDP loop with a torch scheduler, clipping and, at times, validation on rank 0 alone."""
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    audit = Audit(group, every=every).watch(model, optimizer, scheduler=scheduler, **watched)
    for number in range(n_steps):
        for micro in range(accumulate):
            ready = micro == accumulate - 1
            with contextlib.nullcontext() if ready else model.no_sync():
                loss(model, batch(group, number * accumulate + micro)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if number % 50 == 0 and group.is_main:
            model.eval()
            loss(model.module, batch(group, number))
            model.train()
    return audit.check(n_steps)


def good_mlp(group, n_steps):
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return run_ddp(group, model, inputs, lambda model, x: model(x).square().mean(), n_steps)


def good_batch_norm(group, n_steps):
    torch.manual_seed(0)
    return run_ddp(group, Net(), inputs, lambda model, x: model(x).square().mean(), n_steps, accumulate=2)


def good_transformer(group, n_steps):
    torch.manual_seed(0)
    model = Block()
    torch.manual_seed(group.rank)

    def batch(group, step):
        return torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1000 * step + group.rank))

    def loss(model, tokens):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return run_ddp(group, model, batch, loss, n_steps, every=2, rng="distinct")


def good_rqvae(group, n_steps, mode="exact"):
    torch.manual_seed(0)
    model = RQVAE(4, (4, 4), 3, [8], 0.25)
    optimizer = adamw(model)
    shards = 2 * group.world_size
    data = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    loader = ShardLoader(list(data), 5 * shards, shards, group=group, seed=1)
    scheduler = LRScheduler(optimizer, schedules.linear_warmup(10), group=group)
    audit = Audit(group, every=1).watch(model, optimizer, scheduler=scheduler, loader=loader)
    step = TrainStep(model, optimizer, group=group, shards=shards, mode=mode, clip_norm=1.0, audit=audit)
    for mine in loader.steps(n_steps):
        audit.samples(mine, count=sum(shard.n_samples for shard in mine))
        step.train_step(mine, rqvae_loss)
    return audit.check(n_steps)


def rqvae_loss(model, shard):
    return loss_sums(model, shard.batch)


def good_train_step_with_batch_norm(group, n_steps):
    model, optimizer = made(group)
    audit = Audit(group, every=1).watch(model, optimizer)
    step = TrainStep(model, optimizer, group=group, mode="fast", audit=audit)
    for number in range(n_steps):
        step.train_step([inputs(group, number)], loss_sum)
    record = audit.check(n_steps)
    assert "first.weight" not in str(record["left_out"])
    return record


GOOD = [good_mlp, good_batch_norm, good_transformer, good_rqvae, good_train_step_with_batch_norm]


def run_good(group, n_steps):
    return [program(group, n_steps)["verdict"] for program in GOOD]


def test_good_programs_give_no_alarm():
    assert launch.run(run_good, 2, 60, timeout_seconds=150) == [["agree"] * len(GOOD)] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", GOOD, ids=lambda program: program.__name__)
def test_good_programs_give_no_alarm_over_500_steps(program):
    assert {record["verdict"] for record in launch.run(program, 4, 500, timeout_seconds=600)} == {"agree"}


def under_torchrun(group):
    """Set what torchrun sets, so that frameworks find the process group that is there already."""
    place = {"RANK": group.rank, "LOCAL_RANK": group.rank, "WORLD_SIZE": group.world_size}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}


def framework_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
    return model, torch.randn(800, 4, generator=torch.Generator().manual_seed(1))


def with_accelerate(group, n_steps):
    from accelerate import Accelerator

    under_torchrun(group)
    torch.manual_seed(group.rank)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, data = framework_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    audit = Audit(group, every=1).watch(model, optimizer, scheduler=scheduler, loader=loader)
    while audit.state_dict()["updates"] < [n_steps]:
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return accelerator.num_processes, audit.check(n_steps)["verdict"]


def with_lightning(group, n_steps):
    import lightning

    under_torchrun(group)
    model, data = framework_model()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            optimizer = adamw(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    class Callback(lightning.Callback):
        def on_train_start(self, trainer, module):
            (scheduler,) = trainer.lr_scheduler_configs
            self.audit = Audit(group, every=1)
            self.audit.watch(trainer.strategy.model, trainer.optimizers[0], scheduler=scheduler.scheduler)

        def on_train_end(self, trainer, module):
            self.found = trainer.world_size, self.audit.check(trainer.global_step)["verdict"]

    callback = Callback()
    quiet = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings that do not matter here
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_steps=n_steps, callbacks=[callback], **quiet
        )
        trainer.fit(Module(), DataLoader(data, batch_size=4, shuffle=True))
    return callback.found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_frameworks_give_no_alarm_over_500_steps(framework):
    if importlib.util.find_spec(framework) is None:  # importing it would leave variables in this process
        pytest.skip(f"needs {framework}")
    program = {"accelerate": with_accelerate, "lightning": with_lightning}[framework]
    assert launch.run(program, 2, 500, timeout_seconds=240) == [(2, "agree")] * 2


# -- the record, the log, and what is left out -------------------------------------------------------------------


def audited(group, path):
    """One difference of a majority of two, logged and gone on from, then agreement again."""
    model, optimizer = made(group, sgd)
    audit = Audit(group, every=2, on_disagreement="log", log=path).watch(
        model, optimizer, per_rank="norm.bias"
    )
    step = TrainStep(model, optimizer, group=group, shards=6, audit=audit)
    for number in range(6):
        step.train_step([inputs(group, 10 * number + i) for i in range(6 // group.world_size)], loss_sum)
        if number == 2 and group.rank == 0:
            flip(model.scale)
            kept = model.scale.clone()
        if number == 3 and group.rank == 0:
            assert torch.equal(model.scale, kept), "the audit repaired something"
            flip(model.scale)
    return optimizer.param_groups[0]["lr"]


def test_log_has_one_line_per_look_and_a_difference_says_what_and_why(tmp_path):
    path = tmp_path / "not there yet" / "audit.jsonl"
    launch.run(audited, 3, path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["verdict"]) for r in records] == [
        (0, "agree"), (2, "agree"), (4, "differ"), (6, "agree"),
    ]  # fmt: skip
    assert [r["phase"] for r in records] == ["at start", "after the step", "buffers", "after the step"]
    differs = records[2]
    assert (differs["tensor"], differs["ranks"]) == ("scale", [[1, 2], [0]])
    assert len(differs["values"]) == 2
    assert differs["differing"] == {"buffers": 1}
    assert any("own data" in cause for cause in differs["causes"])
    for record in records:
        assert {"parameters", "LR", "step count"} <= set(record["words"])
        assert any("norm.bias" in names for names in record["left_out"].values())


def test_words_tell_states_apart_and_repeat():
    words = []
    for change in (False, False, True):
        model, _ = made(Group.single())
        if change:
            flip(model.last.weight)
        words.append(Audit(Group.single()).watch(model).check(0)["words"]["parameters"])
    assert words[0] == words[1] != words[2]


def log_in_the_way(group, path):
    model, optimizer = made(group)
    with pytest.raises(SpecError, match="log"):
        Audit(group, log=path / "file" / "audit.jsonl").watch(model, optimizer).check(0)
    return True


def test_a_log_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    assert launch.run(log_in_the_way, 2, tmp_path) == [True, True]


def own_state(group):
    """What is allowed to differ does differ here, and is listed."""
    torch.manual_seed(0)
    model = Net()
    model.register_buffer("seen", torch.zeros(1))
    model.register_buffer("kept", torch.zeros(1))
    model.buffer_rules = {"kept": "own"}
    ddp = DistributedDataParallel(model)
    optimizer = adamw(ddp)
    audit = Audit(group, every=1).watch(ddp, optimizer, per_rank=["see*"])
    for number in range(3):
        ddp(inputs(group, number)).square().mean().backward()
        optimizer.step()
        model.seen.add_(group.rank)
        model.kept.add_(group.rank)
    left_out = audit.check(3)["left_out"]
    return sorted(name for names in left_out.values() for name in names)


def test_state_of_each_rank_is_left_out_and_listed():
    expected = [
        "generators",
        "kept",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
        "seen",
    ]
    assert launch.run(own_state, 2) == [expected, expected]


def unreadable_on_one_rank(group):
    model, optimizer = made(group)
    if is_last(group):
        optimizer.param_groups[0]["callback"] = lambda: None
    with pytest.raises(SpecError, match="callback") as caught:
        Audit(group).watch(model, optimizer).check(0)
    return caught.value.rank


def test_state_that_cannot_be_read_is_an_error_on_all_ranks():
    assert launch.run(unreadable_on_one_rank, 2) == [1, 1]


# -- one process -------------------------------------------------------------------------------------------------


def looks(every, n_steps, driven, path, step_fn=None):
    model, optimizer = made(Group.single())
    audit = Audit(Group.single(), every=every, log=path).watch(model, optimizer)
    step = TrainStep(model, optimizer, group=Group.single(), audit=audit) if driven else None
    for number in range(n_steps):
        x = inputs(Group.single(), number)
        if step is not None:
            step.train_step([x], loss_sum)
        else:
            optimizer.zero_grad()
            loss_sum(model, x)[0].backward()
            optimizer.step()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("every", "driven", "expected"),
    [
        (1, True, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, True, [0, 3, 6]),
        (0, True, []),
        (1, False, [0, 1, 2, 3, 4, 5, 6]),
        (3, False, [0, 3, 6]),
        (0, False, []),
    ],
)
def test_each_step_is_looked_at_once(every, driven, expected, tmp_path):
    assert looks(every, 7, driven, tmp_path / "audit.jsonl") == expected


def test_updates_go_on_counting_after_a_resume():
    model, optimizer = made(Group.single())
    audit = Audit(Group.single()).watch(model, optimizer)
    for _ in range(3):
        loss_sum(model, inputs(Group.single(), 0))[0].backward()
        optimizer.step()
    assert audit.state_dict() == {"updates": [3]}
    again = Audit(Group.single()).watch(*made(Group.single()))
    again.load_state_dict(audit.state_dict())
    assert again.state_dict() == {"updates": [3]}


def test_detached_audit_listens_no_longer(tmp_path):
    model, optimizer = made(Group.single())
    audit = Audit(Group.single(), every=1, log=tmp_path / "audit.jsonl").watch(model, optimizer)
    audit.detach()
    loss_sum(model, inputs(Group.single(), 0))[0].backward()
    optimizer.step()
    assert not (tmp_path / "audit.jsonl").exists()


def test_sparse_gradients_are_covered():
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit = Audit(Group.single()).watch(model, optimizer)
    model(torch.tensor([1, 3])).sum().backward()
    assert "gradients" in audit.check(0, "after reduction")["words"]


def test_models_watched_together_have_names_of_their_own(tmp_path):
    first, first_optimizer = made(Group.single())
    second, second_optimizer = made(Group.single())
    audit = Audit(Group.single()).watch(first, first_optimizer)
    alone = audit.check(0)["words"]["parameters"]
    assert audit.watch(second, second_optimizer).check(0)["words"]["parameters"] != alone


def test_logging_speaks_on_the_main_rank(caplog):
    audit = Audit(Group.single(), on_disagreement="log").watch(*made(Group.single()))
    audit.samples([3, 3])
    with caplog.at_level(logging.WARNING, "samestep.audit"):
        assert audit.check(1)["verdict"] == "differ"
    assert "sample 3" in caplog.text


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [({"every": -1}, "every"), ({"every": 1.5}, "every"), ({"on_disagreement": "repair"}, "on_disagreement")],
)
def test_wrong_settings_are_refused(kwargs, name):
    with pytest.raises(SpecError) as caught:
        Audit(Group.single(), **kwargs)
    assert caught.value.name == name


def test_unknown_rng_policy_is_refused():
    with pytest.raises(SpecError, match="rng"):
        Audit(Group.single()).watch(nn.Linear(1, 1), rng="equal")


# -- sample ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n_samples", [17, 20])
def test_every_step_of_a_loader_is_as_planned(n_samples, drop_last):
    loader = ShardLoader(list(range(n_samples)), 5, 3, group=Group.single(), seed=2, drop_last=drop_last)
    audit = Audit(Group.single()).watch(nn.Linear(1, 1), loader=loader)
    for number, shards in enumerate(loader.steps(11)):
        audit.samples(shards)
        assert audit.check(number)["verdict"] == "agree"


def test_a_wrong_sample_is_remembered_until_the_next_look():
    loader = ShardLoader(list(range(20)), 4, 2, group=Group.single(), seed=2)
    audit = Audit(Group.single()).watch(nn.Linear(1, 1), loader=loader)
    for number, shards in enumerate(loader.steps(5)):
        if number == 1:
            shards = [Shard(0, shards[0].sample_ids.flip(0), None), shards[1]]
        audit.samples(shards)
    with pytest.raises(ReplicaMismatchError, match="in place of"):
        audit.check(5)
    assert audit.check(5)["verdict"] == "agree"


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"ids": [1, 2], "expected": [1, 3]}, "sample 2 in place of 3"),
        ({"ids": [1, 2], "expected": [1]}, "2 samples where 1 are planned"),
        ({"ids": torch.tensor([1, 2]), "count": 3}, "count 3 where its samples hold 2"),
        ({"ids": [1, 2], "whole": [1, 2, 5]}, "1 of 3 samples of the batch are read by no rank"),
        ({"ids": [1, 1]}, "read 2 times in one step"),
    ],
)
def test_wrong_ids_and_counts_are_named(kwargs, found):
    audit = Audit(Group.single()).watch(nn.Linear(1, 1))
    audit.samples(**kwargs)
    with pytest.raises(ReplicaMismatchError, match=found):
        audit.check(1)
