"""Set parameters and buffers that are computed from data, once, on all workers alike."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import fingerprint
from samestep.bulk import broadcast_tensors
from samestep.errors import AgreementError, GroupError, SamestepError, SpecError
from samestep.group import Group
from samestep.reduce import broadcast_object, gather_parts, reduce
from samestep.start._broadcast import prove
from samestep.start._gradient import check_gradient_way, step_to
from samestep.start._mark import MARK, mark_of, needs_initialization
from samestep.start._reset import forget, replaced_rows
from samestep.start._structure import check_structure, rank_list, unwrap
from samestep.start._targets import Compute, cast_targets, run_compute, slots_of

__all__ = ["initialize"]


def initialize(
    module: nn.Module,
    compute: Compute,
    group: Group,
    by: Literal["broadcast", "gradient"] = "broadcast",
    optimizer: Optimizer | None = None,
    *,
    collective: bool = False,
    source_rank: int = 0,
    once: bool = True,
) -> bool:
    """Set parameters and buffers to values computed from data, in place, on all workers, bit for bit alike.

    By broadcast, no optimizer, loss or gradient takes part: the values before, precision, learning rate, clipping,
    scalers and hooks do not matter. A module that carries the mark of an earlier call, also one that was loaded
    from a checkpoint, is left alone, and `compute` does not run.

    Args:
        module: one that `mark` was called on; DDP and compiled wrappers are looked through, here and in names.
        compute: ``compute(module) -> {name: tensor}``, given the unwrapped module, without autograd. Values are
            rounded to a tensor's own floating dtype; any other cast must keep them. It returns values and changes
            nothing itself.
        group: the workers.
        by: "broadcast", exact; or "gradient", one step of plain SGD as in `initialization_loss`: trainable
            parameters only, up to rounding, and only from replicas that agree.
        optimizer: its state of the replaced rows is dropped (the moments of torch's SGD, Adam and their kin row by
            row, any other state whole), so that no momentum of the old values remains, and rows whose values are
            what they were keep theirs. By gradient, it takes the step and must be ``torch.optim.SGD`` with lr 0.5;
            None makes one.
        collective: False runs `compute` on the source rank alone, which sees that worker's data only. True runs it
            on all workers: it may then call collectives (k-means over all data), and must return equal values.
        source_rank: whose values count.
        once: False runs even if the mark is set, and without a mark.

    Returns:
        Whether the values were set now; the same on all workers.

    Raises:
        AgreementError: on all workers, when `compute` raised on one of them, with that worker's traceback; when
            marks or structures differ; when a collective `compute` returned different values.
        SpecError: on all workers, when the result does not fit: unknown name, shape, lossy cast, not finite.
        ReplicaMismatchError: on all workers, when the values differ afterwards.
        WorkerError: when a worker is gone; also on the others when one worker alone raised inside a collective
            `compute`, with its traceback.

    Collective: all ranks of `group`.

    Example:
        >>> from samestep import start
        >>> layer = start.mark(nn.Linear(2, 1, bias=False))
        >>> start.initialize(layer, lambda layer: {"weight": torch.ones(1, 2)}, Group.single())
        True
        >>> start.initialize(layer, lambda layer: {"weight": torch.zeros(1, 2)}, Group.single())
        False
    """
    inner = _check_call(module, by, optimizer, group, once)
    if once and not _still_needed(inner, group):
        return False
    if by == "gradient":
        check_gradient_way(module, optimizer or torch.optim.SGD(inner.parameters(), lr=0.5), group)
    check_structure([inner], group, source_rank, materialise=False)
    targets = _agreed_targets(inner, compute, group, collective, source_rank)
    if by == "gradient":
        step_to(inner, targets, group, optimizer, source_rank)
    else:
        _set(slots_of(inner), targets, group, collective, source_rank, optimizer)
    if (found := mark_of(inner)) is not None:
        found.fill_(1)
    return True


def _check_call(
    module: nn.Module, by: str, optimizer: Optimizer | None, group: Group, once: bool
) -> nn.Module:
    problem = ""
    if not isinstance(module, nn.Module):
        problem = f"`module`: expected a torch module, got {type(module).__name__}."
    elif by not in ("broadcast", "gradient"):
        problem = f"`by`: expected 'broadcast' or 'gradient', got {by!r}."
    elif optimizer is not None and not isinstance(optimizer, Optimizer):
        problem = f"`optimizer`: expected a torch optimizer, got {type(optimizer).__name__}."
    elif once and mark_of(module) is None:
        try:
            needs_initialization(module)
        except SpecError as error:
            problem = f"{error} Or pass once=False to set the values at every call."
    group.agree(not problem, problem, SpecError)
    return unwrap(module)


def _still_needed(module: nn.Module, group: Group) -> bool:
    """Return whether the mark is unset, which all workers must see alike."""
    marks = [int(part) for part in gather_parts(torch.tensor([int(not needs_initialization(module))]), group)]
    if len(set(marks)) == 1:
        return not marks[0]
    done = [rank for rank, value in enumerate(marks) if value]
    raise AgreementError(
        f"`{MARK}`: expected the same on all workers, got a module that is initialized on "
        f"{rank_list(done, group.world_size)} only. Load the checkpoint on every worker, or call start.broadcast "
        "after loading.",
        rank=marks.index(0 if marks[0] else 1),
        name=MARK,
    )


def _agreed_targets(
    module: nn.Module, compute: Compute, group: Group, collective: bool, source_rank: int
) -> dict[str, Tensor]:
    """Run `compute` where it runs and return its checked values; workers where it does not run get none."""
    given: object = None
    raised: BaseException | None = None
    runs = collective or group.rank == source_rank
    before = fingerprint.word(module) if runs and not collective else 0
    if runs:
        given, raised = run_compute(compute, module)
    if collective and raised is not None:
        _leave(raised, group)
    is_spec = isinstance(raised, SpecError)
    group.agree(raised is None or is_spec, "" if raised is None else _told(raised), AgreementError)
    targets: dict[str, Tensor] = {}
    problem = str(raised) if is_spec else ""
    if runs and not problem:
        try:
            if not collective and fingerprint.word(module) != before:
                raise SpecError(
                    "`compute`: expected it to leave the module as it is, got one that it changed, on the source "
                    "rank only. Return the values instead, and keep BatchNorm in eval mode while you compute."
                )
            targets = cast_targets(given, slots_of(module))
        except SpecError as error:
            problem = str(error)
    group.agree(not problem, problem, SpecError)
    if collective:
        prove([targets], group, AgreementError, "A collective compute must return equal values everywhere.")
    return targets


def _leave(raised: BaseException, group: Group) -> NoReturn:
    """Raise on this worker alone, such that the others, perhaps inside a collective of `compute`, learn why.

    Asking them here would pair up with whatever collective they are in.
    """
    if isinstance(raised, GroupError):
        raise raised
    group.abandon(_told(raised))
    if isinstance(raised, SamestepError):  # found in common, by `agree`: the others raise it too
        raise raised
    rank, world_size = group.rank, group.world_size
    group.close()
    raise AgreementError(f"rank {rank} of {world_size}: {_told(raised)}", rank=rank) from raised


def _told(raised: BaseException) -> str:
    return "compute failed:\n" + "".join(traceback.format_exception(raised)).rstrip()


def _set(
    slots: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: Group,
    collective: bool,
    source_rank: int,
    optimizer: Optimizer | None,
) -> None:
    """Write the targets in place on all workers, prove that they agree, and let the optimizer forget the old."""
    names = list(targets) if collective else broadcast_object(list(targets), group, source_rank)
    changed = {name: slots[name] for name in names}
    forgets = bool(reduce(torch.tensor([int(optimizer is not None)]), group, "max")[0])
    before = {name: tensor.detach().clone() for name, tensor in changed.items()} if forgets else {}
    with torch.no_grad():
        for name, value in targets.items():
            changed[name].copy_(value)
    if not collective:
        broadcast_tensors(list(changed.values()), group, source_rank)
    prove([changed], group)
    rows = replaced_rows(before, changed, group) if forgets else {}
    for name, tensor in changed.items():
        if optimizer is not None:
            forget(optimizer, tensor, rows[name])
