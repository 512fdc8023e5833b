"""What an audit covers: everything that must be equal on all replicas, by phase and name, and what is left out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from samestep import fingerprint
from samestep.sharding import ShardLoader, StreamLoader

__all__ = ["PHASES", "Cover", "Rng", "State", "unwrapped"]

PHASES = (
    "data",
    "RNG",
    "step count",
    "LR",
    "options",
    "scaler",
    "gradients",
    "optimizer state",
    "parameters",
    "buffers",
)
"""In the order of cause and effect within a step: the first one that differs is the one to name."""

Rng = Literal["per rank", "same", "distinct"]

_BATCH_NORM = "BatchNorm statistics, which every rank keeps of its own batches"
_DECLARED = "declared per rank"
_SHARDED = "sharded over the workers, not replicated"
_UNREADABLE = "without a stable value"
_GENERATORS = "random generators, which every rank draws from on its own"


@dataclass
class State:
    """Tensors by phase and name, in registration order, and names left out by reason."""

    phases: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: State) -> None:
        """Take over what another state holds."""
        for phase, named in other.phases.items():
            self.phases.setdefault(phase, {}).update(named)
        for reason, names in other.left_out.items():
            for name in names:
                self.leave_out(reason, name)

    def leave_out(self, reason: str, name: str) -> None:
        """Say that a name is not covered, and why."""
        names = self.left_out.setdefault(reason, [])
        if name not in names:
            names.append(name)


@dataclass
class Cover:
    """One watched model with what belongs to it.

    Attributes:
        model: the module that a DDP wrapper, if any, wraps.
        prefix: in front of every name; empty for the first watched model.
        per_rank: patterns of names that are allowed to differ.
        rng: the policy for the global random generators.
        updates: how many updates the optimizer has applied.
    """

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: Any
    scaler: Any
    loader: Any
    per_rank: Sequence[str] = ()
    rng: Rng = "per rank"
    prefix: str = ""
    updates: int = 0

    def state(self, *, merged_buffers: bool) -> State:
        """Return what must be equal, as it is now, gradients excepted.

        Args:
            merged_buffers: whether somebody merges BatchNorm's statistics over the workers, as TrainStep does.
        """
        state = State()
        self._add(state, "data", self._loader_values(state))
        self._add(state, "RNG", self._generators(state))
        self._add(state, "step count", fingerprint.named_values(self.updates, "applied updates"))
        if self.optimizer is not None:
            self._add_optimizer(state, self.optimizer)
        self._add(state, "LR", self._values(state, "scheduler", self.scheduler))
        self._add(state, "scaler", self._values(state, "scaler", self.scaler))
        self._add(state, "parameters", dict(self.model.named_parameters()))
        own = self._own_buffers(merged_buffers)
        buffers = {}
        for name, buffer in self.model.named_buffers():
            if name in own:
                state.leave_out(own[name], self.prefix + name)
            else:
                buffers[name] = buffer
        self._add(state, "buffers", buffers)
        return state

    def gradients(self) -> State:
        """Return the gradients that are there now."""
        state = State()
        named = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self._add(state, "gradients", named)
        return state

    @property
    def couples_decay(self) -> bool:
        """Whether a parameter leaks into its own optimizer state, by weight decay that is added to the gradient."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        decoupled = isinstance(self.optimizer, torch.optim.AdamW)
        return any(g.get("weight_decay") and not g.get("decoupled_weight_decay", decoupled) for g in groups)

    def _add_optimizer(self, state: State, optimizer: Optimizer) -> None:
        by_phase: dict[str, dict[str, Tensor]] = {"LR": {}, "options": {}, "optimizer state": {}}
        for name, tensor in fingerprint.named_state(optimizer, self.model).items():
            if not name.startswith("options."):
                by_phase["optimizer state"][name] = tensor
            else:
                phase = "LR" if name.rpartition(".")[2] in ("lr", "initial_lr") else "options"
                by_phase[phase][name] = tensor
        for phase, named in by_phase.items():
            self._add(state, phase, named)

    def _add(self, state: State, phase: str, named: Mapping[str, Tensor]) -> None:
        kept = state.phases.setdefault(phase, {})
        for name, tensor in named.items():
            if any(fnmatchcase(name, pattern) for pattern in self.per_rank):
                state.leave_out(_DECLARED, self.prefix + name)
                continue
            for part, dense in _dense(name, tensor):
                if dense is None:
                    state.leave_out(_SHARDED, self.prefix + part)
                else:
                    kept[self.prefix + part] = dense

    def _values(self, state: State, name: str, thing: Any) -> dict[str, Tensor]:
        """Return the state of a scheduler or scaler as tensors; what has no stable value is left out by name."""
        if thing is None:
            return {}
        found: dict[str, Tensor] = {}
        for key, value in (thing.state_dict() if hasattr(thing, "state_dict") else {}).items():
            try:
                found.update(fingerprint.named_values(value, f"{name}.{key}"))
            except TypeError:
                state.leave_out(_UNREADABLE, f"{self.prefix}{name}.{key}")
        return found

    def _loader_values(self, state: State) -> dict[str, Tensor]:
        if isinstance(self.loader, ShardLoader | StreamLoader):
            return self._values(state, "loader", self.loader)
        if self.loader is None:
            return {}
        sampler = getattr(self.loader, "sampler", None)
        values = {f"sampler.{key}": getattr(sampler, key, None) for key in ("epoch", "seed", "num_replicas")}
        try:
            values["length"] = len(self.loader)
        except TypeError:
            values["length"] = None  # a stream
        plain = {key: value for key, value in values.items() if isinstance(value, int)}
        return fingerprint.named_values(plain, "loader") if plain else {}

    def _generators(self, state: State) -> dict[str, Tensor]:
        if self.rng == "per rank":
            state.leave_out(_GENERATORS, f"{self.prefix}generators")
            return {}
        found = {"generator.torch": torch.get_rng_state()}
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if device.type == "cuda":
            found["generator.cuda"] = torch.cuda.get_rng_state(device)
        kind, keys, *rest = np.random.get_state(legacy=True)
        found["generator.numpy"] = _text((kind, np.asarray(keys).tolist(), rest))
        found["generator.python"] = _text(random.getstate())
        return found

    def _own_buffers(self, merged: bool) -> dict[str, str]:
        """Return the buffers that are each rank's own by rule, with the reason."""
        own = {}
        for prefix, module in self.model.named_modules():
            for key in module._buffers:
                name = f"{prefix}.{key}" if prefix else key
                if getattr(module, "buffer_rules", {}).get(key) == "own":
                    own[name] = 'buffer_rules says "own"'
                elif isinstance(module, _BatchNorm) and not merged and _has_counted(module):
                    own[name] = _BATCH_NORM
        return own


def _text(value: object) -> Tensor:
    return torch.tensor(list(repr(value).encode()), dtype=torch.uint8)


def _has_counted(module: _BatchNorm) -> bool:
    """Tell whether a batch has passed; before that the statistics are initial values, equal on all ranks."""
    if isinstance(module, nn.SyncBatchNorm):
        return False
    return module.num_batches_tracked is None or bool(module.num_batches_tracked)


def _dense(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the dense parts of a tensor; None for one that is not replicated."""
    shared: Any = tensor
    if hasattr(shared, "placements"):  # a distributed tensor
        replicated = all(placement.is_replicate() for placement in shared.placements)
        yield name, shared.to_local() if replicated else None
    elif tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        yield f"{name}.indices", whole.indices()
        yield f"{name}.values", whole.values()
    else:
        yield name, tensor


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what a DDP wrapper wraps, or the module itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model
