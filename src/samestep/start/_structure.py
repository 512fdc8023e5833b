"""Do all workers hold the same structure? Names, shapes, dtypes, kinds of device, shared storage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from samestep.errors import AgreementError, SpecError
from samestep.group import Group
from samestep.reduce import broadcast_object, gather_parts

__all__ = ["Structure", "check_structure", "rank_list", "unwrap"]

Line = tuple[str, str]
Shape = tuple[int, ...]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and compiled wrappers, however nested."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


@dataclass
class Structure:
    """What one worker holds, read without changing it.

    Attributes:
        tensors: the modules' tensors by name, each storage once.
        lines: (name, description) of everything that must be equal on all workers, in order.
        unready: lazily built and meta tensors by name, which have no memory yet.
        problem: what cannot be broadcast at all, in words; empty when nothing is.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    unready: dict[str, Tensor] = field(default_factory=dict)
    problem: str = ""

    @classmethod
    def of(
        cls, things: Sequence[object], group: Group, given: Mapping[str, Shape] | None = None
    ) -> Structure:
        """Read the structure; `given` are the source's shapes, which stand in for those of unready tensors."""
        found = cls()
        names: dict[int, str] = {}
        is_first = True
        for i, thing in enumerate(things):
            prefix = f"things[{i}]."
            if isinstance(thing, nn.Module):
                found._add_module(unwrap(thing), "" if is_first else prefix, names, group, given)
                is_first = False
            elif isinstance(thing, Optimizer):
                found._add_optimizer(thing, prefix, names)
            elif callable(getattr(thing, "state_dict", None)) and callable(
                getattr(thing, "load_state_dict", None)
            ):
                found.lines.append((prefix[:-1], type(thing).__name__))
            else:
                found.problem = found.problem or (
                    f"`{prefix[:-1]}`: expected a module, an optimizer or an object with state_dict and "
                    f"load_state_dict, got {type(thing).__name__}. Use reduce.broadcast_tensor for a single tensor."
                )
        return found

    def _add_module(
        self,
        module: nn.Module,
        prefix: str,
        names: dict[int, str],
        group: Group,
        given: Mapping[str, Shape] | None,
    ) -> None:
        storages: dict[tuple[int, int] | None, str] = {}
        for kind, name, tensor in _all_tensors(module):
            label = prefix + name
            if id(tensor) in names:
                self.lines.append((label, f"{kind}, tied to `{names[id(tensor)]}`"))
                continue
            names[id(tensor)] = label
            if unready := is_lazy(tensor) or tensor.is_meta:
                self.unready[label] = tensor
            problem = _unfit(tensor)
            if problem:
                self.problem = self.problem or f"`{label}`: {problem}"
            shape = (given or {}).get(label, ()) if is_lazy(tensor) else tuple(tensor.shape)
            device = (group.device if tensor.is_meta else tensor.device).type
            tie = ""
            place: tuple[int, int] | None = None
            if not unready and not problem and tensor.numel():
                place = (
                    tensor.untyped_storage().data_ptr(),
                    int(tensor.storage_offset()) * tensor.element_size(),
                )
                tie = f", in the memory of `{storages[place]}`" if place in storages else ""
                tie += _expanded(tensor)
            is_alias = place in storages and _same_view(tensor, self.tensors[storages[place]])
            if not is_alias:
                self.tensors[label] = tensor
            if place is not None:
                storages.setdefault(place, label)
            self.lines.append((label, f"{kind} {shape} {tensor.dtype} on {device}{tie}"))

    def _add_optimizer(self, optimizer: Optimizer, prefix: str, names: Mapping[int, str]) -> None:
        n_groups = len(optimizer.param_groups)
        self.lines.append((prefix[:-1], f"{type(optimizer).__name__} with {n_groups} param groups"))
        for g, options in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(options["params"]):
                name = f"{prefix}options.{g}.params.{i}"
                if id(parameter) in names:
                    self.lines.append((name, f"`{names[id(parameter)]}`"))
                elif is_lazy(parameter) or parameter.is_meta:
                    self.problem = self.problem or (
                        f"`{name}`: expected a parameter with memory or of a module in `things`, got a lazy or "
                        "meta one. Pass its module too, in front of the optimizer."
                    )
                else:
                    self.lines.append((name, f"{tuple(parameter.shape)} {parameter.dtype}"))


def check_structure(
    things: Sequence[object], group: Group, source_rank: int, *, materialise: bool = True
) -> Structure:
    """Return this worker's structure when all workers hold the same one; else raise the same error on all.

    Lazy and meta tensors of workers other than the source are given memory once all else agrees.

    Raises:
        SpecError: something cannot be broadcast, or the source rank itself has lazy or meta tensors.
        AgreementError: names the first entry that differs and the ranks on each side.

    Collective: all ranks of `group`.
    """
    _check_source(things, group, source_rank)
    mine = Structure.of(things, group)
    problem = mine.problem
    if not problem and mine.unready and (group.rank == source_rank or not materialise):
        name, tensor = next(iter(mine.unready.items()))
        what = "a lazy tensor without shape" if is_lazy(tensor) else "a tensor on the meta device"
        problem = (
            f"`{name}`: expected values to {'send' if materialise else 'replace'}, got {what}. Run one batch "
            "through lazy modules, or module.to_empty and load, first."
        )
    group.agree(not problem, problem, SpecError)
    flags = gather_parts(torch.tensor([len(mine.unready)]), group)
    if any(int(flag) for flag in flags):
        shapes = broadcast_object({name: tuple(t.shape) for name, t in _shaped(mine)}, group, source_rank)
        mine = Structure.of(things, group, shapes)
        _compare(mine.lines, group)
        problem = _materialise(mine, shapes, group)
        group.agree(not problem, problem, SpecError)
        mine = Structure.of(things, group)
    _compare(mine.lines, group)
    return mine


def rank_list(ranks: Sequence[int], world_size: int) -> str:
    """Return ranks in words.

    Example:
        >>> rank_list([0, 2], 3)
        'ranks 0, 2 of 3'
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} of {world_size}"


def _check_source(things: Sequence[object], group: Group, source_rank: int) -> None:
    fine = 0 <= source_rank < group.world_size
    problem = f"`source_rank`: expected 0 .. {group.world_size - 1}, got {source_rank}."
    group.agree(fine, problem, SpecError)
    _compare([("source_rank", str(source_rank)), ("things", f"{len(things)} of them")], group)


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def _unfit(tensor: Tensor) -> str:
    if hasattr(tensor, "placements"):
        return "expected a whole tensor, got a sharded one. Broadcast before sharding it."
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"expected a dense tensor, got layout {tensor.layout}, dtype {tensor.dtype}. Keep its dense parts."
    return ""


def _expanded(tensor: Tensor) -> str:
    dims = [d for d, (n, stride) in enumerate(zip(tensor.shape, tensor.stride())) if stride == 0 and n > 1]
    return f", expanded along {dims}" if dims else ""


def _same_view(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _shaped(structure: Structure) -> Iterator[tuple[str, Tensor]]:
    return ((name, t) for name, t in structure.tensors.items() if not is_lazy(t))


def _materialise(structure: Structure, shapes: Mapping[str, Shape], group: Group) -> str:
    """Give memory to lazy and meta tensors in place, so that optimizers and modules keep them; return a problem."""
    for name, tensor in structure.unready.items():
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            return f"`{name}`: expected no hooks on a lazy or meta tensor, it would lose them. Add them afterwards."
    for name, tensor in structure.unready.items():
        device = group.device if tensor.is_meta else tensor.device
        if is_lazy(tensor):
            tensor.materialize(shapes[name], device=device)
            continue
        fresh = torch.empty_like(tensor, device=device, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
        fresh.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
    return ""


def _compare(lines: Sequence[Line], group: Group) -> None:
    """Return when all workers hold equal lines; else raise on all, naming the first that differs."""
    if group.world_size == 1:
        return
    digest = hashlib.blake2b(repr(list(lines)).encode(), digest_size=16).digest()
    words = torch.tensor([int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)])
    if all(torch.equal(words, other) for other in gather_parts(words, group)):
        return
    found = [json.loads(text) for text in group.gather_text(json.dumps(list(lines)))]
    at = next(i for i in range(max(map(len, found))) if len({_line(other, i) for other in found}) > 1)
    sides: dict[str, list[int]] = {}
    for rank, other in enumerate(found):
        sides.setdefault(_line(other, at), []).append(rank)
    named = next(other[at][0] for other in found if at < len(other))
    told = "; ".join(f"{rank_list(ranks, group.world_size)}: {side}" for side, ranks in sides.items())
    raise AgreementError(
        f"`{named}`: expected the same structure on all workers, and this is the first entry that differs: {told}. "
        "Build the same things in the same order on every worker.",
        rank=min(min(ranks) for ranks in list(sides.values())[1:]),
        name=named,
    )


def _line(lines: Sequence[Sequence[str]], at: int) -> str:
    return f"`{lines[at][0]}` {lines[at][1]}" if at < len(lines) else "nothing more"
