"""What saving behind the loop needs: copies that the loop cannot change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Staging"]


class Staging:
    """Copies of tensors in host memory, which is kept from one save to the next.

    Fresh memory costs more than the copy into it, page by page; on CUDA it is pinned.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return host copies by name; they are overwritten by the next call."""
        copies = {}
        for name, tensor in tensors.items():
            place = self._kept.get(name)
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = place.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._kept = copies
        return dict(copies)

    def clear(self) -> None:
        """Give the memory back."""
        self._kept = {}
