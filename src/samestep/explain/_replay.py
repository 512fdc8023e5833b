"""The step under test, on one of N workers: each stage is given the reference's values of the stage before.

It returns figures only; what they mean is decided in one place, `_judge`, where those of all workers lie side by
side.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import SpecError
from samestep.explain import _measure, _rows, _state
from samestep.explain._program import Program
from samestep.explain._reference import TOLERANCE
from samestep.explain._tape import Comparer
from samestep.group import Group
from samestep.reduce import gather_parts

__all__ = ["run"]


def run(group: Group, cases: list[tuple[Callable[[], Any], Any]], folder: str) -> list[dict[str, Any]]:
    """Return this worker's figures of every case.

    Collective: all ranks of `group`.
    """
    found = []
    for i, (build, batch) in enumerate(cases):
        reference = torch.load(Path(folder) / f"{i}.pt", map_location=group.device, weights_only=True)
        with _state.wide(True):
            figures = _replay(group, build, batch, reference)
        if not figures["structure"] and group.world_size > 1:
            as_built = torch.load(
                Path(folder) / f"{i}-as-built.pt", map_location=group.device, weights_only=True
            )
            figures["as_built"] = _as_built(group, build, batch, as_built)
        found.append(figures)
    return found


def _replay(group: Group, build: Callable[[], Any], given: Any, reference: dict[str, Any]) -> dict[str, Any]:
    program, _ = _state.built(build, in_float64=True)
    figures: dict[str, Any] = {"structure": _structure(program, reference)}
    if any(group.gather_text(figures["structure"])):
        return figures | {"structure": figures["structure"] or "fits"}
    figures["initial"] = _initial(program, reference)
    figures["options"] = _state.option_table(program)
    batch = _rows.converted(given, torch.float64, group.device)
    part = program.part(batch, group.rank, group.world_size)
    figures["rows"] = _rows.locate(_rows.digests(part), reference["digests"])
    if not _complete(group, part, reference["digests"]):
        part = program.part(batch, group.rank, group.world_size, ordinary=True)
    rows = _rows.locate(_rows.digests(part), reference["digests"])
    _state.seeded(1)
    tape = Comparer(program.bare, program.loss_fn, reference, rows)
    program.bare.zero_grad(set_to_none=True)
    before = _state.state(program.bare)
    try:
        reduced = _gradients(program, tape.loss_fn, part, reference["clipped"])
    finally:
        tape.close()
    figures["calls"] = [
        {"rows": call.rows, "forward": call.forward, "backward": call.backward} for call in tape.calls
    ]
    figures["part"] = rows
    target = reference["reduced"] if program.train_step is None else reference["clipped"]
    figures["reduced"] = _reduced(group, tape, reduced, target)
    figures["clipped_by"] = 1.0
    if program.train_step is not None:
        figures["clipped_by"] = _clipped_by(reference)
        _unclip(figures["reduced"], figures["clipped_by"])
    if program.train_step is None:
        figures["clip"] = _clip(program, reference)
        _feed(program, reference["clipped"])
        program.optimizer.step()
    figures["update"] = _update(program, before, reference)
    figures["buffers"] = _buffers(program, reference["after"])
    return figures


def _structure(program: Program, reference: dict[str, Any]) -> str:
    """Return what is different about the names and shapes of this worker's model, empty when nothing is."""
    mine = {name: tuple(t.shape) for name, t in _state.state(program.bare).items()}
    right = {name: tuple(t.shape) for name, t in reference["state"].items()}
    for name in [*right, *mine]:
        if mine.get(name) != right.get(name):
            said = [f"shape {s[name]}" if name in s else "no such tensor" for s in (mine, right)]
            return f"`{name}`: {said[0]}, where one worker has {said[1]}"
    return ""


def _initial(program: Program, reference: dict[str, Any]) -> list[str]:
    """Return the names of what starts with other bits, and put the reference's in their place."""
    mine = _state.state(program.bare)
    found = [name for name, right in reference["state"].items() if not _same_bits(mine[name], right)]
    _state.load(program.bare, reference["state"])
    entries = _state.optimizer_state(program)
    wrong = [
        key
        for key in dict.fromkeys([*reference["optimizer"], *entries])
        if key not in entries
        or key not in reference["optimizer"]
        or not _same_bits(entries[key], reference["optimizer"][key])
    ]
    if wrong:
        _state.load_optimizer_state(program, reference["optimizer"])
    return found + wrong


def _same_bits(one: Tensor, two: Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    raw = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
    return torch.equal(*raw)


def _complete(group: Group, part: Any, digests: list[str]) -> bool:
    """Return whether the parts of all workers are the global batch, each sample once."""
    all_rows = [json.loads(text) for text in group.gather_text(json.dumps(_rows.digests(part)))]
    return Counter(digest for rows in all_rows for digest in rows) == Counter(digests)


def _gradients(
    program: Program, loss_fn: Callable[..., Any], part: Any, fed: dict[str, Tensor | None] | None
) -> dict[str, Tensor | None]:
    """Run the program up to its gradient; where it runs to the end, look when the gradient enters the optimizer."""
    if program.train_step is None:
        program.run_gradients(loss_fn, part)
        return _state.gradients(program)
    seen: list[dict[str, Tensor | None]] = []

    def at_the_door(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen.append(_state.gradients(program))
        if fed is not None:
            _feed(program, fed)

    handle = program.optimizer.register_step_pre_hook(at_the_door)
    try:
        program.train_step(program.model, program.optimizer, loss_fn, part)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise SpecError(
            f"`train_step`: expected one call of optimizer.step(), got {len(seen)}. Apply one update.",
            name="train_step",
        )
    return seen[0]


def _feed(program: Program, values: dict[str, Tensor | None]) -> None:
    for name, parameter in program.parameters().items():
        value = values[name]
        parameter.grad = None if value is None else value.clone()


def _largest(tensors: dict[str, Tensor | None]) -> float:
    return max((float(t.abs().max()) for t in tensors.values() if t is not None and t.numel()), default=0.0)


def _reduced(
    group: Group, tape: Comparer, reduced: dict[str, Tensor | None], right: dict[str, Tensor | None]
) -> dict[str, dict[str, Any]]:
    """Return, for every parameter, how far its gradient is off, and as which sum of local gradients it was made."""
    n_calls = max(int(text) for text in group.gather_text(str(max(len(tape.calls), 1))))
    largest, found = _largest(right), {}
    for name, value in right.items():
        got = reduced[name]
        entry: dict[str, Any] = {"error": _measure.difference(got, value, largest)}
        entry["presence"] = "" if (got is None) == (value is None) else ("extra" if value is None else "none")
        if value is not None and value.numel():
            columns = _columns(group, tape.local[name], value, n_calls)
            total = torch.zeros_like(value) if got is None else got.to(value.dtype)
            entry["made"] = _measure.weights(columns, total, largest)
            entry["needed"] = _measure.weights(columns, value, largest)
            own = sum(tape.local[name], torch.zeros_like(total))
            entry["own"] = _measure.difference(total, own, largest) <= TOLERANCE
            entry["norms"] = [float(column.norm()) for column in columns]
        found[name] = entry
    return found


def _clipped_by(reference: dict[str, Any]) -> float:
    """Return the factor by which the reference's gradient was clipped, of the parameter where it is largest."""
    name = max(reference["reduced"], key=lambda n: _largest({n: reference["reduced"][n]}))
    fit = _measure.factor(reference["clipped"][name], reference["reduced"][name])
    return fit.coefficients[0] if fit.coefficients else 1.0


def _unclip(reduced: dict[str, dict[str, Any]], clipped_by: float) -> None:
    """Turn weights of a clipped sum into those of the sum."""
    for entry in reduced.values():
        for kind in ("made", "needed"):
            if kind in entry:
                values = tuple(w / clipped_by for w in entry[kind].coefficients)
                entry[kind] = entry[kind]._replace(coefficients=values)


def _columns(group: Group, local: list[Tensor], like: Tensor, n_calls: int) -> list[Tensor]:
    """Return the local gradients of all ranks, call by call: (call 0, rank 0), (call 0, rank 1), ..."""
    columns = []
    for call in range(n_calls):
        mine = local[call].to(like.dtype) if call < len(local) else torch.zeros_like(like)
        columns += gather_parts(mine, group)
    return columns


def _clip(program: Program, reference: dict[str, Any]) -> dict[str, Any]:
    """Return how far the clipped gradient is off, given the reference's gradient to clip."""
    _feed(program, reference["reduced"])
    if program.clip is not None:
        program.clip(list(program.parameters().values()))
    return _factors(_state.gradients(program), reference["clipped"])


def _factors(mine: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> dict[str, Any]:
    largest, found = _largest(right), {}
    for name, value in right.items():
        got = mine[name]
        fit = _measure.Fit((), 0.0) if value is None or got is None else _measure.factor(got, value)
        found[name] = (_measure.difference(got, value, largest), fit)
    return found


def _update(program: Program, before: dict[str, Tensor], reference: dict[str, Any]) -> dict[str, Any]:
    after, names = _state.state(program.bare), list(program.parameters())
    mine: dict[str, Tensor | None] = {n: after[n] - before[n] for n in names}
    right: dict[str, Tensor | None] = {n: reference["after"][n] - reference["state"][n] for n in names}
    return _factors(mine, right)


def _buffers(program: Program, right: dict[str, Tensor]) -> dict[str, float]:
    mine = dict(program.bare.named_buffers())
    largest = _largest({name: right[name] for name in mine if right[name].is_floating_point()})
    return {
        name: _measure.difference(t, right[name], largest if t.is_floating_point() else 0.0)
        for name, t in mine.items()
    }


def _as_built(
    group: Group, build: Callable[[], Any], given: Any, reference: dict[str, Any]
) -> dict[str, Any]:
    """Return the largest deviations of the step in the dtype it is trained in, in units of the last place."""
    program, _ = _state.built(build, in_float64=False)
    batch = _rows.converted(given, None, group.device)
    _state.seeded(1)
    part = program.part(batch, group.rank, group.world_size)
    mine = _gradients(program, program.loss_fn, part, None)
    right = reference["reduced"] if program.train_step is None else reference["clipped"]
    largest = _largest(right)
    ulps = {}
    for name, value in right.items():
        if value is not None:
            ulps[name] = _measure.difference(mine[name], value, largest) / torch.finfo(value.dtype).eps
    worst = max(ulps, key=lambda name: ulps[name])
    return {"ulps": ulps[worst], "name": worst, "dtype": str(right[worst].dtype).removeprefix("torch.")}
