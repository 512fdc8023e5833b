"""Functions that tests launch in workers, and what they share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.errors import SamestepError
from samestep.group import Group


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bytes of some tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of parameters, buffers and optimizer state."""
    held = [value for state in optimizer.state.values() for value in state.values()]
    return digest([*model.parameters(), *model.buffers(), *(t for t in held if isinstance(t, Tensor))])


def generators_digest() -> str:
    """Return a digest of the states of all global generators."""
    found = hashlib.blake2b(digest_size=8)
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(np.random.get_state()[1].tobytes())  # type: ignore[union-attr,index]
    found.update(repr(random.getstate()).encode())
    return found.hexdigest()


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the kind and the text of what a call raised; ("", its result's text) when it raised nothing."""
    try:
        return "", str(call())
    except (SamestepError, RuntimeError) as error:
        return type(error).__name__, str(error)


def each(group: Group, *cases: Callable[[Group], Any]) -> dict[str, Any]:
    """Run many cases inside one launch; each starts from the same generators."""
    found = {}
    for case in cases:
        torch.manual_seed(0)
        name = getattr(case, "__name__", None) or case.func.__name__  # type: ignore[attr-defined]
        found[name] = case(group)
        group.barrier()
    return found
