"""The same digests from a small C kernel, for tensors in host memory; several times faster when they are small."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from samestep import native

__all__ = ["Kernel", "kernel"]

Kernel = Callable[[Sequence[Tensor], Sequence[tuple[int, int]]], Tensor]
_COLUMNS = 16


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = native.load("fingerprint", Path(__file__).with_name("_digest.c").read_text())
    return found if found is not None and found.samestep_supported() else None


def kernel(keys: Tensor, lanes: Tensor) -> Kernel | None:
    """Return what gives the digests (n, 2) of contiguous CPU tensors and their headers, or None.

    Args:
        keys: (4160, 16) int8.
        lanes: (2, 16) int64.
    """
    library = _library()
    if library is None:
        return None
    # Four neighbouring bytes of a row meet the keys of all columns at once.
    raised = (keys.reshape(-1, 4, _COLUMNS).transpose(1, 2).to(torch.int16) + 64).to(torch.uint8).contiguous()
    lanes = lanes.contiguous()

    def digests(tensors: Sequence[Tensor], headers: Sequence[tuple[int, int]]) -> Tensor:
        n = len(tensors)
        numbers = ctypes.c_int64 * n
        result = torch.empty(n, 2, dtype=torch.int64)
        failed = library.samestep_digests(
            ctypes.c_int64(n),
            numbers(*[t.data_ptr() for t in tensors]),
            numbers(*[t.nbytes for t in tensors]),
            (ctypes.c_int64 * (2 * n))(*itertools.chain.from_iterable(headers)),
            ctypes.c_void_p(raised.data_ptr()),
            ctypes.c_void_p(lanes.data_ptr()),
            ctypes.c_void_p(result.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the sums of a fingerprint")
        return result

    return digests
