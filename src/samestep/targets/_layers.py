"""Start values of layers inside a module, from what its forward makes of all workers' batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from samestep.errors import SpecError
from samestep.kmeans._points import as_points, together
from samestep.pooling import Pool, alone
from samestep.targets._exact import column_sums

__all__ = ["batch_norm", "lsuv", "weight_norm"]

Forward = Callable[[nn.Module, Any], object]
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def batch_norm(
    module: nn.Module, batches: Iterable[Any], pool: Pool = alone, *, forward: Forward | None = None
) -> dict[str, Tensor]:
    """Return the running statistics of every BatchNorm: mean and variance of all that came in, over all batches.

    The forward runs in training mode, so each batch is normalised by its own statistics, as in training. Every
    value counts once, however batches differ in size.

    Args:
        module: left as it is; equal on all workers.
        batches: of this worker, may be none.
        pool: all workers.
        forward: ``forward(module, batch)``; calls the module by default.

    Returns:
        ``{layer}.running_mean`` and ``{layer}.running_var``, (channels,); the variance divides by n - 1, as
        training does.

    Raises:
        SpecError: on all workers: no BatchNorm with statistics, a layer that saw fewer than two values per
            channel, values that are not finite, or an error in the forward.

    Collective: all workers of `pool` call it.
    Numerics: order-free over batches; float64 inside a batch.

    Example:
        >>> found = batch_norm(nn.BatchNorm1d(1), [torch.zeros(8, 1), torch.full((2, 1), 10.0)])
        >>> found["running_mean"].tolist()
        [2.0]
    """
    twin = copy.deepcopy(module).train()
    layers = {
        name: layer
        for name, layer in twin.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    }
    if not layers:
        raise SpecError("`module`: expected a BatchNorm with running statistics, got none.", name="module")
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(_summary(inputs[0])))
        for name, layer in layers.items()
    ]
    _run(twin, batches, forward, handles, pool)
    found: dict[str, Tensor] = {}
    for name, layer in layers.items():
        n, mean, squares = _merge(name, seen[name], layer.num_features, pool, least=2)
        prefix = f"{name}." if name else ""
        found[f"{prefix}running_mean"] = mean.float()
        found[f"{prefix}running_var"] = (squares / (n - 1)).float()
    return found


def lsuv(
    module: nn.Module,
    batches: Iterable[Any],
    pool: Pool = alone,
    *,
    forward: Forward | None = None,
    tolerance: float = 0.01,
    max_passes: int = 10,
) -> dict[str, Tensor]:
    """Return weights of linear and convolution layers such that each layer's output has variance 1.

    Layer after layer in the order of calls: a layer is measured after those in front of it were set. Weights start
    from what the module has; the paper makes them orthonormal first (``torch.nn.init.orthogonal_``).

    Args:
        module: left as it is; equal on all workers. Runs in evaluation mode.
        batches: of this worker, may be none; iterated once per pass, so no iterator.
        pool: all workers.
        forward: ``forward(module, batch)``; calls the module by default.
        tolerance: of the variance; a layer within it is left.
        max_passes: per layer.

    Returns:
        ``{layer}.weight`` of every layer that was called.

    Raises:
        SpecError: on all workers: no such layer was called, orders of calls that differ between workers, an output
            without spread or not finite, or an error in the forward.

    Collective: all workers of `pool` call it.
    Numerics: as `batch_norm`.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> lsuv(layer, [torch.tensor([[-2.0], [2.0]])])["weight"].abs().item()
        0.5

    Reference: Mishkin & Matas, All you need is a good init, 2016, algorithm 1.
    """
    twin = copy.deepcopy(module).eval()
    found: dict[str, Tensor] = {}
    for name, layer in _in_order(twin, batches, forward, pool):
        for _ in range(max_passes):
            n, mean, squares = _measure(twin, name, layer, batches, forward, pool)
            # Over all channels: spread inside them, and of their means.
            variance = float((squares / n + (mean - mean.mean()).square()).mean())
            _need_spread(name, variance)
            if abs(variance - 1) <= tolerance:
                break
            with torch.no_grad():
                layer.weight.copy_(layer.weight.double() / variance**0.5)
        found[_join(name, "weight")] = layer.weight.detach().clone()
    return found


def weight_norm(
    module: nn.Module, batches: Iterable[Any], pool: Pool = alone, *, forward: Forward | None = None
) -> dict[str, Tensor]:
    """Return scales and biases of weight-normalised layers such that each output channel has mean 0, variance 1.

    ``g = g / std`` and ``bias = (bias - mean) / std``, layer after layer in the order of calls.

    Args:
        module: with layers under ``torch.nn.utils.parametrizations.weight_norm`` (dim 0) that have a bias; left as
            it is, equal on all workers. Runs in evaluation mode.
        batches: of this worker, may be none; iterated once per layer, so no iterator.
        pool: all workers.
        forward: ``forward(module, batch)``; calls the module by default.

    Returns:
        ``{layer}.parametrizations.weight.original0`` (g) and ``{layer}.bias``.

    Raises:
        SpecError: on all workers, as `lsuv`.

    Collective: all workers of `pool` call it.
    Numerics: as `batch_norm`.

    Reference: Salimans & Kingma, Weight normalization, 2016, section 3.
    """
    twin = copy.deepcopy(module).eval()
    found: dict[str, Tensor] = {}
    for name, layer in _in_order(twin, batches, forward, pool):
        values = dict(layer.named_parameters())
        g, bias = values.get("parametrizations.weight.original0"), values.get("bias")
        if g is None:
            continue
        if bias is None:
            raise SpecError(f"`{name}`: expected a weight-normalised layer with a bias, got none.", name=name)
        n, mean, squares = _measure(twin, name, layer, batches, forward, pool)
        std = (squares / n).sqrt()
        _need_spread(name, float(std.min()))
        with torch.no_grad():
            g.copy_(g.double() / std.reshape(-1, *[1] * (g.dim() - 1)))
            bias.copy_((bias.double() - mean) / std)
        found[_join(name, "parametrizations.weight.original0")] = g.detach().clone()
        found[_join(name, "bias")] = bias.detach().clone()
    if not found:
        raise SpecError(
            "`module`: expected a weight-normalised layer in the forward, got none.", name="module"
        )
    return found


def _summary(values: Tensor, channel: int = 1) -> Tensor:
    """Return (1 + 2 * channels,) float64: count, means, sums of squared deviations."""
    rows = values.detach().double().cpu().movedim(channel, -1).reshape(-1, values.shape[channel])
    n = torch.tensor([len(rows)], dtype=torch.float64)
    mean = rows.sum(0) / n.clamp(min=1)
    return torch.cat([n, mean, (rows - mean).square().sum(0)])


def _merge(
    name: str, summaries: list[Tensor], channels: int, pool: Pool, least: int
) -> tuple[int, Tensor, Tensor]:
    """Return count, means and squared deviations over the calls of all workers."""
    table = torch.stack(summaries) if summaries else torch.zeros(0, 1 + 2 * channels, dtype=torch.float64)
    pool.agree(
        bool(table.isfinite().all()), f"`{name}`: expected finite values, got NaN or inf. Check the data."
    )
    n_calls = int(pool(torch.tensor([len(table)]))[0])
    n = int(pool(table[:, 0].sum().long().reshape(1))[0])
    if n < least:
        raise SpecError(f"`{name}`: expected at least {least} values per channel, got {n}.", name=name)
    points = as_points(table)
    counted = 1 + channels
    mean = column_sums(points, lambda part: part[:, :1] * part[:, 1:counted], channels, n_calls, pool) / n

    def spread(part: Tensor) -> Tensor:
        return part[:, counted:] + part[:, :1] * (part[:, 1:counted] - mean).square()

    return n, mean, column_sums(points, spread, channels, n_calls, pool)


def _run(
    module: nn.Module,
    batches: Iterable[Any],
    forward: Forward | None,
    handles: list[RemovableHandle],
    pool: Pool,
) -> None:
    def work() -> None:
        with torch.no_grad():
            for batch in batches:
                module(batch) if forward is None else forward(module, batch)

    try:
        together(pool, work)
    finally:
        for handle in handles:
            handle.remove()


def _in_order(
    module: nn.Module, batches: Iterable[Any], forward: Forward | None, pool: Pool
) -> list[tuple[str, Any]]:
    """Return the layers in the order of their first calls, which workers with batches must share."""
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _LAYERS)]
    place = torch.full((len(layers) + 1,), -1, dtype=torch.int64)
    calls: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_, i=i: calls.append(i)) for i, (_, layer) in enumerate(layers)
    ]
    _once(batches, pool)
    _run(module, batches, forward, handles, pool)
    for position, i in enumerate(dict.fromkeys(calls)):
        place[i] = position
    common = pool(place, "max")
    pool.agree(
        not calls or torch.equal(common, place),
        "`module`: expected layers called in the same order on all workers, got another order here.",
    )
    order = sorted((int(at), i) for i, at in enumerate(common) if at >= 0)
    if not order:
        raise SpecError("`batches`: expected one that calls a linear or convolution layer, got none.")
    return [layers[i] for _, i in order]


def _once(batches: Iterable[Any], pool: Pool) -> None:
    pool.agree(
        iter(batches) is not batches,
        "`batches`: expected batches that can be read again, got an iterator. Pass a list or a loader.",
    )


def _measure(
    module: nn.Module,
    name: str,
    layer: Any,
    batches: Iterable[Any],
    forward: Forward | None,
    pool: Pool,
) -> tuple[int, Tensor, Tensor]:
    linear = isinstance(layer, nn.Linear)
    seen: list[Tensor] = []
    channel = -1 if linear else 1
    hook = layer.register_forward_hook(lambda _, inputs, output: seen.append(_summary(output, channel)))
    _run(module, batches, forward, [hook], pool)
    return _merge(name, seen, layer.out_features if linear else layer.out_channels, pool, least=1)


def _need_spread(name: str, spread: float) -> None:
    if not spread > 0:
        raise SpecError(f"`{name}`: expected outputs that differ, got a constant.", name=name)


def _join(name: str, parameter: str) -> str:
    return f"{name}.{parameter}" if name else parameter
