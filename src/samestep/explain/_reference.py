"""What is right: one step on one worker, the whole global batch at once, and every value on the way.

It runs in a process of its own, under a process group of one, so that ``build()`` may wrap its model in DDP there
too. A step from which nothing could be learned is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.explain import _measure, _rows, _state
from samestep.explain._program import Program, count_of, scalar
from samestep.explain._tape import Keeper, module_of
from samestep.group import Group

__all__ = ["TOLERANCE", "run"]

TOLERANCE = 1e-9
"""Clean steps differ by at most 2e-12 in float64, the smallest fault to be found by 1e-6."""

Case = tuple[Callable[[], Any], Any]


def run(group: Group, cases: list[Case], folder: str) -> None:
    """Write the reference of every case, in float64 and as built, into a folder.

    Raises:
        SpecError: when a case would pass whatever its program did.
    """
    # There is nobody to talk to: the process group is there for what `build` may want to wrap.
    with Group.from_store(None, 0, 1, 0, str(group.device.type)):
        for i, (build, batch) in enumerate(cases):
            with _state.wide(True):
                torch.save(_reference(build, batch, group.device), Path(folder) / f"{i}.pt")
            torch.save(_as_built(build, batch, group.device), Path(folder) / f"{i}-as-built.pt")


def _reference(build: Callable[[], Any], given: Any, device: torch.device) -> dict[str, Any]:
    batch = _rows.converted(given, torch.float64, device)
    program, dropped = _state.built(build, in_float64=True)
    found: dict[str, Any] = {
        "n_rows": _rows.count(batch),
        "digests": _rows.digests(batch),
        "types": {name: type(module).__name__ for name, module in program.bare.named_modules()},
        "state": _state.state(program.bare),
        "optimizer": _state.optimizer_state(program),
        "options": _state.option_table(program),
        "dropped": dropped,
    }
    _refuse_equal_rows(found["digests"])
    found["random"], found["noise"] = _probe(program, batch, found["state"])
    _state.seeded(1)
    tape = _gradients(program, batch)
    found["outputs"], found["gradients"] = tape.calls[0].forward, tape.calls[0].backward
    found["reduced"], found["count"] = _state.gradients(program), tape.count
    _refuse_no_gradient(found["reduced"])
    _finish(program, found)
    return found


def _as_built(build: Callable[[], Any], given: Any, device: torch.device) -> dict[str, Any]:
    program, _ = _state.built(build, in_float64=False)
    found: dict[str, Any] = {"state": _state.state(program.bare)}
    _state.seeded(1)
    loss = program.loss_fn(program.model, _rows.converted(given, None, device))
    torch.autograd.backward(scalar(loss, "the global batch", quotient=True))
    found["reduced"] = _state.gradients(program)
    _finish(program, found)
    return found


def _finish(program: Program, found: dict[str, Any]) -> None:
    """Clip and update."""
    if program.clip is not None:
        program.clip(list(program.parameters().values()))
    found["clipped"] = _state.gradients(program)
    program.optimizer.step()
    found["after"] = _state.state(program.bare)


def _gradients(program: Program, batch: Any) -> Keeper:
    program.bare.zero_grad(set_to_none=True)
    tape = Keeper(program.bare, program.loss_fn, wide=True)
    try:
        returned = tape.loss_fn(program.model, batch)
        tape.count = count_of(returned)
        loss = scalar(returned, "the global batch", quotient=True)
        if not loss.requires_grad:
            raise SpecError(
                "`loss_fn`: the loss depends on no trainable parameter, so every program would pass. "
                "Compute it from the model that is passed in.",
                name="loss_fn",
            )
        if not math.isfinite(float(loss.detach())):
            raise SpecError(
                f"`loss_fn`: expected a finite loss of the global batch, got {float(loss)}.", name="loss_fn"
            )
        torch.autograd.backward(loss)
    finally:
        tape.close()
    return tape


def _probe(program: Program, batch: Any, start: dict[str, Tensor]) -> tuple[str | None, float]:
    """Return the first module that draws random numbers, and how far reordered samples move the gradient."""
    seen = []
    n_rows = _rows.count(batch)
    for seed, order in [(1, range(n_rows)), (2, range(n_rows)), (1, range(n_rows - 1, -1, -1))]:
        _state.seeded(seed)
        tape = _gradients(program, _rows.take(batch, order))
        seen.append((tape.calls[0].forward, _state.gradients(program)))
        _state.load(program.bare, start)
    program.bare.zero_grad(set_to_none=True)
    (outputs, right), (other, redone), (_, turned) = seen
    for key, value in outputs.items():
        if key in other and not torch.equal(value, other[key]):
            return module_of(key) or "the model", 0.0
    largest = _largest(right)
    if any(_measure.difference(redone[name], g, largest) > TOLERANCE for name, g in right.items()):
        return "the loss", 0.0
    noise = max((_measure.difference(turned[name], g, largest) for name, g in right.items()), default=0.0)
    if noise > TOLERANCE / 10:
        raise SpecError(
            f"the reference: its own gradient moves by {noise:.1e} when the samples are put in another order, "
            f"where faults of {TOLERANCE:.0e} are to be told. Something in the model computes in a narrower "
            "float, or its loss depends on the order of the samples; take that out."
        )
    return None, noise


def _largest(tensors: dict[str, Tensor | None]) -> float:
    return max((float(t.abs().max()) for t in tensors.values() if t is not None and t.numel()), default=0.0)


def _refuse_equal_rows(digests: list[str]) -> None:
    if len(digests) > 1 and len(set(digests)) == 1:
        raise SpecError(
            f"`global_batch`: all {len(digests)} samples are equal, so that a missing reduction could not show. "
            "Give different samples.",
            name="global_batch",
        )


def _refuse_no_gradient(reduced: dict[str, Tensor | None]) -> None:
    if any(t is not None and not bool(torch.isfinite(t).all()) for t in reduced.values()):
        name = next(n for n, t in reduced.items() if t is not None and not bool(torch.isfinite(t).all()))
        raise SpecError(f"the reference: the gradient of `{name}` is not finite.", name=name)
    if _largest(reduced) == 0:
        raise SpecError(
            "the reference: every gradient is 0, so that every program would pass. "
            "Look for a constant loss, frozen parameters or dead activations."
        )
