"""What saving behind the loop needs: copies that the loop cannot change, and connections of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.group import Group

__all__ = ["Staging", "twin"]


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


def twin(group: Group) -> Group:
    """Return the same workers over connections of their own, for a thread whose traffic must not mix.

    Collective: all ranks of `group`.
    """
    if group.world_size == 1:
        return group
    return dataclasses.replace(group, process_group=torch.distributed.new_group(backend="gloo"), _owns=False)
