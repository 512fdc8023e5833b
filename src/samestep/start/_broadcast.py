"""Copy the source rank's models, optimizers and other state over everybody's, after a check, with a proof."""

from __future__ import annotations

import json
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep import fingerprint
from samestep.bulk import broadcast_tensors
from samestep.errors import AgreementError, ReplicaMismatchError, SamestepError, SpecError
from samestep.group import Group
from samestep.reduce import broadcast_object, reduce
from samestep.start._state import OptimizerPart, Part, parts_of
from samestep.start._structure import check_structure, rank_list

__all__ = ["broadcast", "prove"]

_HASHED_BYTES = 4 << 20  # hashed at once: few calls, and what has just landed is still in the cache


def broadcast(*things: object, group: Group, source_rank: int = 0, verify: bool = True) -> None:
    """Give every worker the source rank's values, bit for bit, so that all replicas start together.

    Modules: parameters and buffers, non-persistent ones and extra state too; what is shared travels once.
    Optimizers: options such as the learning rate, and state, also when only the source has any; the others' own
    state is dropped. Anything else needs ``state_dict`` and ``load_state_dict``. DDP and compiled wrappers are
    looked through. Values change in place: ``requires_grad``, hooks and the identity of parameters stay.

    Lazy and meta tensors are given memory where the source has values for them, on the group's device; on the
    source itself they are refused. Make an optimizer from such parameters before or after, both work, as long as it
    comes behind its module here.

    Args:
        *things: modules, optimizers, schedulers, scalers ...; the same ones in the same order on all workers.
        group: the workers.
        source_rank: whose values count.
        verify: compare fingerprints of everything afterwards.

    Raises:
        SpecError: on all workers, when something cannot travel; names it.
        AgreementError: on all workers, when structures differ (names, shapes, dtypes, kinds of device, shared
            storage); names the first entry that differs and the ranks on each side. Nothing was changed.
        ReplicaMismatchError: on all workers, when fingerprints differ afterwards; names the first tensor.
        WorkerError: when a worker is gone.

    Collective: all ranks of `group`. One copy of at most 32 MiB is held beside the model.

    Example:
        >>> broadcast(torch.nn.Linear(3, 2), group=Group.single())
    """
    structure = check_structure(things, group, source_rank)
    is_source = group.rank == source_rank
    tensors = list(structure.tensors.values())
    parts = list(parts_of(things, structure.tensors))
    sent: list[Tensor] = []
    trees = _take(parts, sent, group, is_source) if parts else []
    if parts:
        trees = broadcast_object(trees, group, source_rank)
    installs: list[Callable[[], None]] = []

    def receive() -> None:
        for part, tree in zip(parts, [] if is_source else trees):
            installs.append(part.receive(tree, group.device, sent))

    if parts:
        _attempt(receive, "making room for state", group)
    # A setter of somebody else's may still write to a module: then its tensors are hashed behind it.
    early = _Words(list(structure.tensors.items())) if verify and all(map(_keeps_off, parts)) else None
    broadcast_tensors(tensors + sent, group, source_rank, None if early is None else early.landed)
    if parts:
        _attempt(lambda: [install() for install in installs], "load_state_dict", group)
    if verify:
        named = [structure.tensors, *(part.named() for part in parts)]
        prove(named, group, words=None if early is None else [early.total, *map(fingerprint.word, named[1:])])


def prove(
    named: Sequence[Mapping[str, Tensor]],
    group: Group,
    error: type[SamestepError] = ReplicaMismatchError,
    advice: str = "See what else writes to it, or whether a load_state_dict leaves part of its state.",
    words: Sequence[int] | None = None,
) -> None:
    """Return when tensors by name are equal bit for bit on all workers; else raise the same error on all.

    Args:
        named: one mapping per thing; one word travels for each.
        group: the workers.
        error: what to raise.
        advice: what to do, for its message.
        words: `fingerprint.word` of each, where they are known already.

    Raises:
        ReplicaMismatchError: or `error`; names the first tensor that differs and the ranks on each side.

    Collective: all ranks of `group`.
    """
    if group.world_size == 1:
        return
    mine = list(map(fingerprint.word, named)) if words is None else words
    both = torch.tensor([*mine, *(-word for word in mine)], dtype=torch.int64)
    extremes = reduce(both, group, "max")
    if torch.equal(extremes[: len(mine)], -extremes[len(mine) :]):
        return
    digests_here = {name: digest for part in named for name, digest in fingerprint.state(part).items()}
    found = [json.loads(text) for text in group.gather_text(json.dumps(digests_here))]
    name = next(
        name
        for name in dict.fromkeys(key for digests in found for key in digests)
        if len({digests.get(name) for digests in found}) > 1
    )
    sides: dict[str, list[int]] = {}
    for rank, digests in enumerate(found):
        sides.setdefault(digests.get(name, "absent"), []).append(rank)
    told = "; ".join(
        f"{rank_list(ranks, group.world_size)}: {digest[:12]}" for digest, ranks in sides.items()
    )
    raise error(
        f"`{name}`: expected the same bits on all workers, got fingerprints {told}. {advice}",
        rank=min(min(ranks) for ranks in list(sides.values())[1:]),
        name=name,
    )


class _Words:
    """The word of a state, taken while its tensors land: the words of its parts add up to that of the whole."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._waiting: dict[str, Tensor] = {}
        self._n_bytes = 0
        self._n_left = len(named)
        self.total = 0

    def landed(self, number: int) -> None:
        """Count in a tensor; those behind the state's own are not of it."""
        if number >= len(self._named):
            return
        name, tensor = self._named[number]
        self._waiting[name] = tensor
        self._n_bytes += tensor.nbytes
        self._n_left -= 1
        if self._n_bytes >= _HASHED_BYTES or not self._n_left:
            self.total = (self.total + fingerprint.word(self._waiting)) & (2**63 - 1)
            self._waiting, self._n_bytes = {}, 0


def _keeps_off(part: Part) -> bool:
    """Tell whether putting this state in its place leaves the tensors of modules alone."""
    return isinstance(part, OptimizerPart)


def _take(parts: Sequence[Part], tensors: list[Tensor], group: Group, is_source: bool) -> list[Any]:
    """Take all parts apart on the source, and see there that they can travel and be compared."""
    trees: list[Any] = []
    problem = ""
    if is_source:
        for part in parts:
            try:
                part.named()
                trees.append(part.take(tensors))
                pickle.dumps(trees[-1])
            except Exception as error:
                problem = f"`{part.label}`: its state cannot travel: {type(error).__name__}: {error}"
                break
        problem = problem or next(
            (f"`{t.layout}`: dense state only" for t in tensors if t.layout is not torch.strided), ""
        )
    group.agree(not problem, problem, SpecError)
    return trees


def _attempt(action: Callable[[], object], what: str, group: Group) -> None:
    problem = ""
    try:
        action()
    except Exception:
        problem = f"{what} failed:\n{traceback.format_exc()}"
    group.agree(not problem, problem, AgreementError)
