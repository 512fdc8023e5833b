"""What the tests of `start` share: cases that run in one launch for each number of workers.

A case is a function ``case(group) -> result`` whose error, if any, is its result. The tests then look at the
results of all ranks. The test files that are collected together run all their cases in the same launch.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from samestep import launch
from samestep.errors import SamestepError
from samestep.group import Group

WORLD_SIZES = (1, 2, 3, 4)
CASES: dict[str, Callable[[Group], Any]] = {}


@dataclass
class Raised:
    """An error that a case raised on one rank."""

    kind: str
    message: str
    rank: int | None
    name: str | None


def case(fn: Callable[[Group], Any]) -> Callable[[Group], Any]:
    CASES[fn.__name__] = fn
    return fn


def work(group: Group, modules: list[str]) -> dict[str, Any]:
    for module in modules:
        importlib.import_module(module)  # which registers its cases
    results: dict[str, Any] = {}
    for name, fn in CASES.items():
        results[name] = attempt(fn, group)
        group.barrier()
    return results


def attempt(fn: Callable[[Group], Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except SamestepError as error:
        return Raised(type(error).__name__, str(error), error.rank, error.name)
    except Exception as error:
        return Raised(type(error).__name__, traceback.format_exc(), None, None)


@functools.cache
def launched(world_size: int) -> list[dict[str, Any]]:
    modules = sorted({fn.__module__ for fn in CASES.values()})
    return launch.run(work, world_size, modules, timeout_seconds=60)


def same_error(ranks: list[dict[str, Any]], name: str, kind: type[SamestepError], *fragments: str) -> Raised:
    """Check that a case raised one and the same error everywhere, and return it."""
    found = [result[name] for result in ranks]
    assert all(isinstance(error, Raised) for error in found), found
    assert len({(e.kind, e.message, e.rank, e.name) for e in found}) == 1, found
    assert found[0].kind == kind.__name__, found[0]
    for fragment in fragments:
        assert fragment in found[0].message, found[0].message
    return found[0]


def raw(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def values(module: nn.Module) -> dict[str, bytes]:
    found = {name: raw(t) for name, t in module.named_parameters(remove_duplicate=False)}
    return found | {name: raw(t) for name, t in module.named_buffers(remove_duplicate=False)}


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def is_last(group: Group) -> bool:
    return group.rank == group.world_size - 1


def wrapped(module: nn.Module, group: Group, **options: Any) -> nn.Module:
    """Return the module in DDP, or as it is where there is no process group."""
    if group.world_size == 1:
        return module
    return DistributedDataParallel(module, process_group=group.process_group, **options)


def seeded(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
