"""Digests of tensors and of whole states: what users call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.fingerprint._digest import check, digests, labels, mix
from samestep.fingerprint._names import named_state, named_tensors

__all__ = ["hexdigest", "state", "tensor", "word"]


def tensor(t: Tensor) -> Tensor:
    """Return the 128-bit digest of a tensor, as two words on the tensor's own device.

    Args:
        t: any dense tensor: any dtype, shape (also empty) and strides. Left as it is.

    Returns:
        (2,) int64 tensor on the device of `t`. No host synchronisation.

    Raises:
        TypeError: when `t` is not a dense tensor with storage (sparse, quantized, meta).

    Numerics: integers only; equal on all devices and for any number of threads.

    Example:
        >>> import torch
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> torch.equal(tensor(a), tensor(a.clone()))
        True
        >>> torch.equal(tensor(a), tensor(a.flip(0)))
        False
    """
    check(t)
    return digests([t])[0]


def hexdigest(t: Tensor) -> str:
    """Return the digest of a tensor as 32 hexadecimal digits.

    Args:
        t: as for `tensor`.

    Returns:
        32 hexadecimal digits. On an accelerator this waits for the device.

    Raises:
        TypeError: as for `tensor`.

    Example:
        >>> import torch
        >>> hexdigest(torch.tensor(0.0)) == hexdigest(torch.tensor(-0.0))
        False
        >>> len(hexdigest(torch.zeros(0)))
        32
    """
    return _hex(tensor(t).tolist())


def state(named: Mapping[str, Tensor] | nn.Module | Optimizer) -> dict[str, str]:
    """Return the digest of every tensor of a state, by name, in registration order.

    Args:
        named: tensors by name; or a module (its `named_tensors`); or an optimizer (its `named_state`).

    Returns:
        32 hexadecimal digits per name. One copy to the host per device.

    Raises:
        TypeError: when a value is not a dense tensor.

    Example:
        >>> from torch import nn
        >>> list(state(nn.BatchNorm1d(2)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    tensors = _named(named)
    digests: dict[str, str] = {}
    for names, words in _by_device(tensors):
        digests.update(zip(names, map(_hex, words.tolist()), strict=True))
    return {name: digests[name] for name in tensors}


def word(named: Mapping[str, Tensor] | nn.Module | Optimizer) -> int:
    """Return one word for a whole state, which is what replicas compare.

    Names count, their order does not: two states have one word when they hold the same tensors under the same
    names.

    Args:
        named: as for `state`.

    Returns:
        An int in [0, 2**63). One copy to the host per device, of one word.

    Raises:
        TypeError: when a value is not a dense tensor.

    Example:
        >>> import torch
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> word({"a": a, "b": b}) == word({"b": b, "a": a})
        True
        >>> word({"a": a, "b": b}) == word({"a": b, "b": a})
        False
    """
    total = 0
    for names, words in _by_device(_named(named)):
        total += int(mix(mix(words ^ labels(words.device, tuple(names))).sum(1)).sum())
    return total & (2**63 - 1)


def _named(named: Mapping[str, Tensor] | nn.Module | Optimizer) -> dict[str, Tensor]:
    if isinstance(named, nn.Module):
        return named_tensors(named)
    return named_state(named) if isinstance(named, Optimizer) else dict(named)


def _by_device(tensors: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    for name, t in tensors.items():
        check(t, name)
    if tensors and all(t.is_cpu for t in tensors.values()):
        yield list(tensors), digests(list(tensors.values()))
        return
    groups: dict[torch.device, list[str]] = {}
    for name, t in tensors.items():
        groups.setdefault(t.device, []).append(name)
    for names in groups.values():
        yield names, digests([tensors[name] for name in names])


def _hex(words: Iterable[int]) -> str:
    return "".join(f"{word & (2**64 - 1):016x}" for word in words)
