"""Python data as JSON and back, without loss: what is not a tensor in a checkpoint.

JSON has no tuples, no integer keys, no infinities and no bytes, and schedulers and samplers use them all. Such a
value becomes an object with one key that begins with ``$``. Nothing here ever calls code named in a file, so that
loading a checkpoint runs nothing.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import CheckpointError

__all__ = ["decode", "encode"]


def encode(value: Any, name: str, keep: Callable[[str, Tensor], str]) -> Any:
    """Return a value as JSON data.

    Args:
        value: None, bool, int, float, str, bytes, tensors and dtypes, numpy scalars, and lists, tuples, dicts and
            Counters of such.
        name: of the value, for tensors in it and for messages.
        keep: takes a tensor and its name, and returns the name under which it is kept.

    Raises:
        CheckpointError: when a part is something else; says which.
    """
    if value is None or isinstance(value, str | bool | int):
        # A subclass of int (an enum) would come back as another type.
        return value if type(value) in (type(None), str, bool, int) else _refuse(value, name)
    if isinstance(value, np.generic):
        return encode(value.item(), name, keep)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": keep(name, value)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [encode(part, f"{name}.{i}", keep) for i, part in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(part, f"{name}.{i}", keep) for i, part in enumerate(value)]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, keep)
    return _refuse(value, name)


def decode(data: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that `encode` made JSON data of.

    Args:
        data: as read from the file.
        tensor: gives a tensor by its name.

    Raises:
        CheckpointError: when the data is not what `encode` writes.
    """
    if isinstance(data, list):
        return [decode(part, tensor) for part in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1 or not next(iter(data)).startswith("$"):
        return {key: decode(part, tensor) for key, part in data.items()}
    kind, content = next(iter(data.items()))
    if kind == "$tensor":
        return tensor(content)
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return bytes.fromhex(content)
    if kind == "$tuple":
        return tuple(decode(part, tensor) for part in content)
    if kind == "$dict":
        return {decode(key, tensor): decode(part, tensor) for key, part in content}
    if kind == "$counter":
        return collections.Counter({decode(key, tensor): part for key, part in content})
    if kind == "$dtype" and isinstance(dtype := getattr(torch, content, None), torch.dtype):
        return dtype
    raise CheckpointError(f"manifest: expected a known kind of value, got {kind}={content!r}.", name=kind)


def _encode_mapping(value: Mapping[Any, Any], name: str, keep: Callable[[str, Tensor], str]) -> Any:
    for key in value:
        if not isinstance(key, str | int | float | bool | tuple | None):
            _refuse(key, f"{name}: key")
    parts = [(key, encode(part, f"{name}.{key}", keep)) for key, part in value.items()]
    if isinstance(value, collections.Counter):
        return {"$counter": [[encode(key, name, keep), part] for key, part in parts]}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(parts)
    return {"$dict": [[encode(key, name, keep), part] for key, part in parts]}


def _refuse(value: Any, name: str) -> Any:
    raise CheckpointError(
        f"`{name}`: expected tensors, numbers, text or lists and dicts of such, got {type(value).__qualname__}. "
        "Leave it out of state_dict(), or save what it is made from.",
        name=name,
    )
