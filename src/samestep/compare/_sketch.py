"""Seventeen numbers that tell how far two tensors are apart, without keeping the tensors.

Each element, with a fixed random sign, is added to one of 16 sums. The squared distance of two tensors' sums is, on
average over the signs, the squared distance of the tensors themselves; from 16 of them it is known to about a
third. A single element that differs shows exactly. The seventeenth number is the tensor's norm.
"""

from __future__ import annotations

import base64
import functools
import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["WIDTH", "decode", "distance", "encode", "sketches"]

WIDTH = 16
_ROWS = 4096
_CHUNK = WIDTH * _ROWS
_SMALL = 4096  # elements; the rows of a complex one still fit into a chunk


def sketches(tensors: list[Tensor]) -> np.ndarray:
    """Return the sums and the norm of each tensor: (n_tensors, 17) float64, with one copy per device.

    Args:
        tensors: dense, of any dtype but complex ones counted as pairs.

    Numerics: order-fixed for a given thread count; accumulates in float64.
    """
    found = np.zeros((len(tensors), WIDTH + 1))
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    for device, places in by_device.items():
        # Calls into torch cost more than the sums of a small tensor: small ones on the CPU are added at once.
        small = [i for i in places if device.type == "cpu" and tensors[i].numel() <= _SMALL]
        if small:
            found[small] = _together([tensors[i] for i in small])
        large = [i for i in places if device.type != "cpu" or tensors[i].numel() > _SMALL]
        if large:
            found[large] = torch.stack([_sketch(tensors[i]) for i in large]).cpu().numpy()
    return found


def encode(row: np.ndarray) -> str:
    """Return a sketch as text, every bit of it."""
    return base64.b64encode(row.astype("<f8").tobytes()).decode()


def decode(text: str) -> np.ndarray:
    """Return the sketch that `encode` wrote.

    Raises:
        ValueError: when the text is damaged.
    """
    row = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f8")
    if row.shape != (WIDTH + 1,):
        raise ValueError(f"expected {WIDTH + 1} numbers, got {row.shape[0]}")
    return row


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    return (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)


def _together(tensors: list[Tensor]) -> np.ndarray:
    """Return the sketches of small tensors on the CPU."""
    parts = [_flat(tensor).double().numpy() for tensor in tensors]
    # At least one row each, for reduceat takes no empty stretch.
    n_rows = [max(1, -(-len(part) // WIDTH)) for part in parts]
    starts = np.cumsum([0, *n_rows[:-1]])
    rows = np.zeros((sum(n_rows), WIDTH))
    for part, start in zip(parts, starts.tolist()):
        rows.reshape(-1)[start * WIDTH : start * WIDTH + len(part)] = part
    flips = _signs(torch.device("cpu"))[1][0].item()
    signs = _host_signs()[np.concatenate([np.arange(n) for n in n_rows])] * flips
    found = np.empty((len(tensors), WIDTH + 1))
    found[:, :WIDTH] = np.add.reduceat(rows * signs, starts, axis=0)
    found[:, WIDTH] = np.sqrt(np.add.reduceat(np.square(rows), starts, axis=0).sum(1))
    return found


def _sketch(tensor: Tensor) -> Tensor:
    flat = _flat(tensor)
    signs, flips = _signs(flat.device)
    sums = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
    squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    for number, start in enumerate(range(0, flat.numel(), _CHUNK)):
        part = flat[start : start + _CHUNK].double()
        squares += part.dot(part)
        if rest := -part.numel() % WIDTH:
            part = torch.cat([part, part.new_zeros(rest)])
        rows = part.view(-1, WIDTH)
        sums += (rows * signs[: rows.shape[0]]).sum(0) * flips[number % len(flips)]
    return torch.cat([sums, squares.sqrt().view(1)])


@functools.cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return signs (4096, 16) for the places of a chunk and (65536,) for the chunks."""
    bits = np.random.Generator(np.random.PCG64(0x5A3E57E9)).integers(0, 2, _CHUNK + 65536)
    signs = torch.from_numpy(bits * 2.0 - 1.0).to(device)
    return signs[:_CHUNK].view(_ROWS, WIDTH), signs[_CHUNK:]


@functools.cache
def _host_signs() -> np.ndarray:
    return _signs(torch.device("cpu"))[0].numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the distance of two tensors, from their sketches; not a number when either is not finite."""
    return math.sqrt(float(np.square(a[:WIDTH] - b[:WIDTH]).sum()))
