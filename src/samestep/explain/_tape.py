"""Watching a model while its loss is computed: every module's outputs, and the gradients that come back to them.

A module's output is known by a key, ``name|n|i``: the i-th tensor of what module `name` returned when it was called
for the n-th time within one call of the loss function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.explain import _measure, _rows

__all__ = ["Call", "Comparer", "Keeper", "Tape", "module_of"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


def module_of(key: str) -> str:
    """Return the module's name in a key.

    Example:
        >>> module_of("blocks.0.norm|0|0")
        'blocks.0.norm'
    """
    return key.split("|")[0]


@dataclass
class Call:
    """One call of the loss function: its rows in the global batch (None where unknown) and what was seen."""

    rows: list[int] | None
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)


class _Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to a narrower float into casts to float64, so that a ``.float()`` in a model adds no noise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class Tape:
    """Wraps a loss function so that its calls, the modules inside them and local gradients are seen."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], wide: bool) -> None:
        self.calls: list[Call] = []
        self.local: dict[str, list[Tensor]] = {}
        self._loss_fn, self._wide = loss_fn, wide
        self._now: Call | None = None
        self._handles = [m.register_forward_hook(self._watch(name)) for name, m in model.named_modules()]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.local[name] = []
                self._handles.append(parameter.register_hook(self._collect(name)))  # type: ignore[no-untyped-call]

    def loss_fn(self, model: nn.Module, batch: Any) -> Any:
        """Call the loss function and watch it, unless it is called without gradients: a look beside the step."""
        if not torch.is_grad_enabled():
            return self._loss_fn(model, batch)
        call = Call(self.place(batch))
        self.calls.append(call)
        self._now = call
        try:
            if not self._wide:
                return self._loss_fn(model, batch)
            with _Widen():  # type: ignore[no-untyped-call]
                return self._loss_fn(model, batch)
        finally:
            self._now = None

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()

    def place(self, batch: Any) -> list[int] | None:
        """Return which rows of the global batch these are."""
        return list(range(_rows.count(batch)))

    def output(self, call: Call, key: str, value: Tensor) -> Tensor | None:
        """See an output; return what to go on with in its place, or None."""
        raise NotImplementedError

    def gradient(self, call: Call, key: str, value: Tensor) -> None:
        """See the gradient of an output."""
        raise NotImplementedError

    def _watch(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            call = self._now
            if call is None:
                return None
            nth = call.times[name]
            call.times[name] += 1
            leaves, spec = _pytree.tree_flatten(output)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point:
                    leaves[i] = self._follow(call, f"{name}|{nth}|{i}", leaf)
            return _pytree.tree_unflatten(leaves, spec)

        return hook

    def _follow(self, call: Call, key: str, value: Tensor) -> Tensor:
        instead = self.output(call, key, value)
        if instead is not None:
            # The value of the reference, the graph of this program.
            value = instead + (value - value.detach()) if value.requires_grad else instead
        if value.requires_grad:
            value.register_hook(lambda g: self.gradient(call, key, g))  # type: ignore[no-untyped-call]
        return value

    def _collect(self, name: str) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None:  # a parameter that took part in the backward with nothing
                return
            found = self.local[name]
            dense = (gradient.to_dense() if gradient.is_sparse else gradient).detach()
            while len(found) < max(len(self.calls), 1):
                found.append(torch.zeros_like(dense))
            found[-1] = found[-1] + dense

        return hook


class Keeper(Tape):
    """The reference's tape: keeps what it sees."""

    count = 1.0

    def output(self, call: Call, key: str, value: Tensor) -> None:
        """Keep an output."""
        call.forward[key] = value.detach().clone()

    def gradient(self, call: Call, key: str, value: Tensor) -> None:
        """Keep the gradient of an output."""
        call.backward[key] = value.detach().clone()


class Comparer(Tape):
    """A worker's tape: compares with the reference, and goes on with the reference's values."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], reference: dict[str, Any], rows: list[int]
    ) -> None:
        super().__init__(model, loss_fn, wide=True)
        self._right, self._part = reference, rows
        self._largest = {
            kind: max((float(t.abs().max()) for t in reference[kind].values() if t.numel()), default=0.0)
            for kind in ("outputs", "gradients")
        }

    def place(self, batch: Any) -> list[int] | None:
        """Return which rows of the global batch these are, None where they cannot be told."""
        rows = _rows.locate(_rows.digests(batch), self._right["digests"])
        if -1 not in rows:
            return rows
        return self._part if len(rows) == len(self._part) else None

    def _candidates(self, call: Call, kind: str, key: str, value: Tensor) -> list[Tensor]:
        right = self._right[kind].get(key)
        if right is None or call.rows is None:
            return []
        return _measure.aligned(right, value.shape, call.rows, self._right["n_rows"])

    def output(self, call: Call, key: str, value: Tensor) -> Tensor | None:
        """Note how far an output is from the reference's, and return the reference's."""
        options = self._candidates(call, "outputs", key, value)
        if not options:
            call.forward[key] = None
            return None
        sizes = [_measure.difference(value, option, self._largest["outputs"]) for option in options]
        call.forward[key] = min(sizes)
        return options[sizes.index(min(sizes))].to(value.dtype)

    def gradient(self, call: Call, key: str, value: Tensor) -> None:
        """Note the factor between the gradient of an output and the reference's, and what it leaves."""
        options = self._candidates(call, "gradients", key, value)
        if not options:
            return
        fit = min((_measure.factor(value, option) for option in options), key=lambda fit: fit.residual)
        size = max(float(option.abs().max()) if option.numel() else 0.0 for option in options)
        weight = size / self._largest["gradients"] if self._largest["gradients"] else 0.0
        call.backward[key] = (fit.coefficients[0] if fit.coefficients else None, fit.residual, weight)
