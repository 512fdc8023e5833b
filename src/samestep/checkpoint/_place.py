"""Check that a checkpoint fits the things of a run, and put it into them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint._codec import decode
from samestep.checkpoint._manifest import Manifest, dtype_of
from samestep.checkpoint._state import State, kind_of, param_names
from samestep.errors import CheckpointError

__all__ = ["Placement", "check"]


@dataclass(frozen=True)
class Placement:
    """What of a checkpoint goes where, once its tensors are read.

    Attributes:
        manifest: of the checkpoint.
        things: those to fill, by name.
        allow: names that the user let differ.
        wanted: names of the tensors to read.
    """

    manifest: Manifest
    things: Mapping[str, Any]
    allow: tuple[str, ...]
    wanted: tuple[str, ...]

    def apply(self, tensors: Mapping[str, Tensor], run: Callable[[str, Callable[[], None]], None]) -> None:
        """Put the checkpoint into the things, in an order in which a refusal leaves all of them as they were.

        Loaders, schedulers and the like check what they are given, so they go first and are put back when one of
        them refuses; modules and optimizers have been checked before. A scheduler writes into its optimizer, so it
        is loaded again when the optimizer has its state.

        Args:
            tensors: those in `wanted`, by name.
            run: calls a job for a thing of that name, and raises on all workers when it fails on one.

        Raises:
            CheckpointError: when a thing refuses its state.
        """
        kinds = {name: kind_of(thing) for name, thing in self.things.items()}
        schedulers = [n for n in self.things if kinds[n] == "state" and hasattr(self.things[n], "optimizer")]
        others = [n for n in self.things if kinds[n] == "state" and n not in schedulers]
        done: list[tuple[str, Any]] = []
        try:
            for name in (*others, *schedulers):
                before = copy.deepcopy(self.things[name].state_dict())
                run(name, partial(self._load, name, tensors))
                done.append((name, before))
        except CheckpointError:
            for name, before in reversed(done):
                self.things[name].load_state_dict(before)
            raise
        for kind in ("module", "optimizer", "data"):
            for name in (name for name in self.things if kinds[name] == kind):
                run(name, partial(self._load, name, tensors))
        for name in schedulers:
            run(name, partial(self._load, name, tensors))

    def _load(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        thing, saved = self.things[name], self.manifest.states[name]

        def tensor(key: str) -> Tensor:
            return tensors[self.manifest.aliases.get(key, key)]

        if isinstance(thing, nn.Module):
            _load_module(name, thing, saved, self.manifest, tensor)
        elif isinstance(thing, Optimizer):
            _load_optimizer(param_names(self.things, thing), thing, saved, tensor)
        elif type(thing) is dict:
            content = decode(saved["value"], lambda key: tensor(key).clone())
            thing.clear()
            thing.update(content)
        else:
            # Two names of one tensor must not become one memory where nobody said so.
            content = decode(saved["value"], lambda key: tensor(key).clone())
            prefix = f"{name}."
            settings = [word.removeprefix(prefix) for word in self.allow if word.startswith(prefix)]
            if settings and "allow" in inspect.signature(thing.load_state_dict).parameters:
                thing.load_state_dict(content, allow=settings)
            else:
                thing.load_state_dict(content)


def check(manifest: Manifest, things: Mapping[str, Any], mine: State, allow: Sequence[str]) -> Placement:
    """Return how a checkpoint goes into the things of a run.

    Args:
        manifest: of the checkpoint.
        things: those to fill, by name, from `present`.
        mine: what they hold now.
        allow: names, with shell wildcards, of things and tensors that may be missing on either side.

    Raises:
        CheckpointError: when something does not fit; says both sides and what would allow it.
    """
    saved = {name for name in manifest.states if not _allowed(name, allow)}
    asked = {name for name in things if name in manifest.states or not _allowed(name, allow)}
    if saved - asked:
        raise _misfit(sorted(saved - asked), "in the checkpoint, not asked for", "Pass it to restore")
    if asked - set(manifest.states):
        raise _misfit(
            sorted(asked - set(manifest.states)), "asked for, not in the checkpoint", "Leave it out"
        )
    chosen = {name: things[name] for name in things if name in asked}
    wanted: list[str] = []
    for name, thing in chosen.items():
        _check_class(name, thing, manifest.states[name], allow)
        theirs = manifest.names(name)
        if isinstance(thing, nn.Module):
            ours = [key for key in (*mine.tensors, *mine.aliases) if key.startswith(f"{name}.")]
            _refuse_difference(ours, theirs, allow, "", "Make the model as it was")
            known = set(ours)
            theirs = [key for key in theirs if key in known]
            _check_tensors(theirs, manifest, mine)
        elif isinstance(thing, Optimizer):
            _check_groups(name, param_names(chosen, thing), thing, manifest, allow)
        wanted += theirs
    unique = dict.fromkeys(manifest.aliases.get(key, key) for key in wanted)
    return Placement(manifest, chosen, tuple(allow), tuple(unique))


def _check_class(name: str, thing: Any, saved: Mapping[str, Any], allow: Sequence[str]) -> None:
    kind, label = kind_of(thing), type(thing).__qualname__
    if kind != saved["kind"]:
        raise CheckpointError(
            f"`{name}`: the checkpoint has a {saved['kind']} ({saved['class']}), this run a {kind} ({label}). "
            "Pass the same things to save and restore.",
            name=name,
        )
    if kind in ("optimizer", "state") and label != saved["class"] and not _allowed(f"{name}.class", allow):
        raise CheckpointError(
            f"`{name}`: the checkpoint has a {saved['class']}, this run a {label}. Make the same {name}, or "
            f"allow=['{name}.class'] to load its state into this one.",
            name=name,
        )


def _check_tensors(names: Sequence[str], manifest: Manifest, mine: State) -> None:
    for name in names:
        entry, tensor = manifest.entry(name), mine.tensors[mine.aliases.get(name, name)]
        theirs = (entry.shape, dtype_of(entry.dtype))
        if theirs != (tuple(tensor.shape), tensor.dtype):
            raise CheckpointError(
                f"`{name}`: the checkpoint has shape {theirs[0]} of {theirs[1]}, this run {tuple(tensor.shape)} of "
                f"{tensor.dtype}. No option allows this: make the model as it was.",
                name=name,
            )
    # Names of one memory get one value: the checkpoint must agree that there is only one.
    there = set(names)
    for name in names:
        if (first := mine.aliases.get(name)) is not None and first in there:
            a, b = manifest.entry(first), manifest.entry(name)
            if a.digest != b.digest:
                raise CheckpointError(
                    f"`{name}`: shares its memory with `{first}` in this run, and has other values in the "
                    "checkpoint. Make the model as it was.",
                    name=name,
                )


def _check_groups(
    name: str, groups: list[list[str]], optimizer: Optimizer, manifest: Manifest, allow: Sequence[str]
) -> None:
    saved = [group["params"] for group in manifest.states[name]["groups"]]
    if len(saved) != len(groups):
        raise CheckpointError(
            f"`{name}`: the checkpoint has {len(saved)} param groups, this run {len(groups)}. Make the param "
            "groups as they were.",
            name=name,
        )
    for g, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        where = f" (param group {g} of `{name}`)"
        _refuse_difference(ours, theirs, allow, where, "Make the param groups as they were")
    parameters = dict(zip(chain(*groups), _parameters(optimizer)))
    for key, values in manifest.states[name]["state"].items():
        shape = tuple(parameters[key].shape) if key in parameters else None
        for word, value in values.items():
            entry = (
                manifest.entry(value["$tensor"]) if isinstance(value, dict) and "$tensor" in value else None
            )
            if (
                shape is not None
                and entry is not None
                and _elementwise(word, entry.shape)
                and entry.shape != shape
            ):
                raise CheckpointError(
                    f"`{name}.{key}.{word}`: the checkpoint has shape {entry.shape}, the parameter {shape}. "
                    "No option allows this: make the model as it was.",
                    name=key,
                )


def _elementwise(key: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a state tensor should have its parameter's shape; factored ones (Adafactor) have others."""
    return key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "prev")


def _load_module(
    name: str,
    module: nn.Module,
    saved: Mapping[str, Any],
    manifest: Manifest,
    tensor: Callable[[str], Tensor],
) -> None:
    state: dict[str, Any] = dict(module.state_dict())
    theirs = set(manifest.names(name))
    extra = {key: decode(value, lambda k: tensor(k).clone()) for key, value in saved["extra"].items()}
    for key in state:
        if f"{name}.{key}" in theirs:
            state[key] = tensor(f"{name}.{key}")
        elif key in extra:
            state[key] = extra[key]
    module.load_state_dict(state)


def _load_optimizer(
    names: list[list[str]], optimizer: Optimizer, saved: Mapping[str, Any], tensor: Callable[[str], Tensor]
) -> None:
    numbers: dict[str, int] = {}
    groups = []
    for members, group, now in zip(
        names, saved["groups"], optimizer.state_dict()["param_groups"], strict=True
    ):
        numbers.update(zip(members, now["params"], strict=True))
        options = {key: value for key, value in now.items() if key == "param_names"}
        groups.append({**decode(group["options"], tensor), **options, "params": now["params"]})
    kept = {numbers[key]: decode(values, tensor) for key, values in saved["state"].items() if key in numbers}
    optimizer.load_state_dict({**decode(saved["extra"], tensor), "state": kept, "param_groups": groups})
    # torch casts state to the parameter's dtype; what was saved in another one comes back in that.
    for name, parameter in zip(chain(*names), _parameters(optimizer), strict=True):
        for key, value in kept.get(numbers[name], {}).items():
            now = optimizer.state[parameter][key]
            if isinstance(value, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_difference(
    ours: Sequence[str], theirs: Sequence[str], allow: Sequence[str], where: str, advice: str
) -> None:
    here, there = set(ours), set(theirs)
    if extra := [name for name in theirs if name not in here and not _allowed(name, allow)]:
        raise _misfit(extra, "in the checkpoint, not in this run" + where, advice)
    if missing := [name for name in ours if name not in there and not _allowed(name, allow)]:
        raise _misfit(missing, "in this run, not in the checkpoint" + where, advice)


def _allowed(name: str, allow: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in allow)


def _misfit(names: Sequence[str], what: str, advice: str) -> CheckpointError:
    shown = ", ".join(f"`{name}`" for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
    return CheckpointError(f"{shown}: {what}. {advice}, or allow={list(names[:5])}.", name=names[0])
