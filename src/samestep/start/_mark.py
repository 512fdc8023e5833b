"""The mark that a module carries once its data-dependent values are set, in its state, so that it survives."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.start._structure import unwrap

__all__ = ["MARK", "mark", "mark_of", "needs_initialization"]

MARK = "initialized"

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def mark(module: AnyModule) -> AnyModule:
    """Give a module the buffer ``initialized``, with value 0, and return the module.

    Call it where the module is built, before wrapping it and before loading a checkpoint: the buffer is part of
    ``state_dict`` from then on, initialized or not, so that every checkpoint says which it was.
    A module that has the buffer already keeps its value.

    Args:
        module: whose values `initialize` will set.

    Raises:
        SpecError: when something else is called ``initialized`` there.

    Example:
        >>> list(mark(nn.Linear(1, 1, bias=False)).state_dict())
        ['weight', 'initialized']
    """
    inner = unwrap(module)
    if MARK in inner._buffers:
        return module
    if hasattr(inner, MARK):
        raise SpecError(
            f"`{MARK}`: expected a free name on {type(inner).__name__}, got an attribute that is no buffer. "
            "Rename it.",
            name=MARK,
        )
    device = next((t.device for t in [*inner.parameters(), *inner.buffers()]), torch.device("cpu"))
    inner.register_buffer(MARK, torch.zeros((), dtype=torch.uint8, device=device))
    return module


def needs_initialization(module: nn.Module) -> bool:
    """Return whether `initialize` has yet to set this module's values. This worker's view; no collective.

    Args:
        module: one that `mark` was called on; wrappers are looked through.

    Raises:
        SpecError: when the module has no mark.

    Example:
        >>> needs_initialization(mark(nn.Linear(1, 1)))
        True
    """
    found = mark_of(module)
    if found is None:
        raise SpecError(
            f"`module`: expected {type(unwrap(module)).__name__} to carry the buffer `{MARK}`, got none. Call "
            "start.mark(module) where it is built, before a checkpoint is loaded.",
            name=MARK,
        )
    return not bool(found)


def mark_of(module: nn.Module) -> Tensor | None:
    """Return the mark's buffer, or None."""
    return unwrap(module)._buffers.get(MARK)
