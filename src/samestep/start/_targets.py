"""Values computed from data: run the computation, check what it returns, bring it to the tensors' own dtypes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.start._mark import MARK

__all__ = ["Compute", "cast_targets", "run_compute", "slots_of"]

Compute = Callable[[nn.Module], Mapping[str, Tensor]]


def slots_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all their names, those of shared ones included; not the mark."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    found.pop(MARK, None)
    return found


def run_compute(compute: Compute, module: nn.Module) -> tuple[Any, BaseException | None]:
    """Return what `compute` gives, or what it raised, outside autograd."""
    try:
        with torch.no_grad():
            return compute(module), None
    except Exception as error:
        return None, error


def cast_targets(given: Any, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return targets checked against the tensors that they replace, in those tensors' dtypes and devices.

    Between floating dtypes a value is rounded, as from float to complex; every other cast must keep all values.

    Raises:
        SpecError: unknown name, other shape, value not finite before or after the cast, lossy cast.
    """
    if not isinstance(given, Mapping) or not given:
        got = "an empty mapping" if isinstance(given, Mapping) else type(given).__name__
        raise SpecError(f"`compute`: expected a mapping of names to tensors, got {got}.", name="compute")
    targets: dict[str, Tensor] = {}
    firsts: dict[int, str] = {}
    for name, value in given.items():
        if name not in slots:
            near = difflib.get_close_matches(str(name), slots, n=1, cutoff=0.4) or list(slots)[:1]
            raise SpecError(
                f"`{name}`: expected the name of a parameter or buffer, got none of {len(slots)} names. "
                f"Write it as the unwrapped module does, such as `{(near or ['(no tensors)'])[0]}`.",
                name=str(name),
            )
        slot = slots[name]
        if not isinstance(value, Tensor) or value.shape != slot.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise SpecError(
                f"`{name}`: expected a tensor of shape {tuple(slot.shape)}, got {got}.", name=name
            )
        if any(stride == 0 and n > 1 for n, stride in zip(slot.shape, slot.stride())):
            raise SpecError(
                f"`{name}`: expected a tensor with its own memory, got an expanded one.", name=name
            )
        targets[name] = _cast(value.detach(), slot, name)
        first = firsts.setdefault(id(slot), name)
        if not torch.equal(targets[first], targets[name]):
            raise SpecError(
                f"`{name}`: it is the same tensor as `{first}`, expected one value for both, got two. "
                "Return one of them.",
                name=name,
            )
    return {name: targets[name] for name in firsts.values()}


def _cast(value: Tensor, slot: Tensor, name: str) -> Tensor:
    if not _finite(value):
        bad = int((~torch.isfinite(value)).sum())
        raise SpecError(f"`{name}`: expected finite values, got {bad} that are NaN or infinite.", name=name)
    if value.is_complex() and not slot.is_complex():
        raise SpecError(f"`{name}`: expected real values for {slot.dtype}, got {value.dtype}.", name=name)
    cast = value.to(dtype=slot.dtype, device=slot.device)
    rounds = value.is_floating_point() or value.is_complex()
    rounds = rounds and (slot.is_floating_point() or slot.is_complex())
    if not _finite(cast):
        raise SpecError(
            f"`{name}`: expected values within the range of {slot.dtype}, "
            f"got up to {float(value.abs().max()):.6g}.",
            name=name,
        )
    if not rounds and not torch.equal(cast.to(value.dtype), value.to(slot.device)):
        raise SpecError(
            f"`{name}`: expected values that {slot.dtype} can hold, got {value.dtype} that would change. "
            "Round them in compute.",
            name=name,
        )
    return cast


def _finite(value: Tensor) -> bool:
    floating = value.is_floating_point() or value.is_complex()
    return not floating or bool(torch.isfinite(value).all())
