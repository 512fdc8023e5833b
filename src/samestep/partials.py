"""Partial sums of the shard tree on one worker: a binary counter whose digits are gradients.

::

    shard 0    [0]
    shard 1    [01]              two equal neighbours are added at once
    shard 2    [01] [2]
    shard 3    [0123]            at most log2 of the shards + 1 are held

Gradients are taken out of ``.grad`` as they are, not copied, and added many at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.errors import SpecError
from samestep.sharding import counter_merges

__all__ = ["PartialSums"]


class PartialSums:
    """Adds up the gradients of one worker's shards along the tree, in at least float32.

    Args:
        names: of the parameters, for messages.
        parameters: in whose ``.grad`` the gradients lie.
        n_shards: leaves of the tree, S.
        block: this worker's shards.

    Numerics: order-fixed; low-precision gradients are summed in float32.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], n_shards: int, block: range
    ) -> None:
        self._names, self._parameters = names, parameters
        self._n_shards, self._block = n_shards, block
        self.begin()

    def __len__(self) -> int:
        """Return how many sums are held, each of the size of the gradients."""
        return len(self._stack)

    def begin(self) -> None:
        """Forget all sums."""
        self._stack: list[list[Tensor]] = []  # a list over parameters each
        self._pieces: list[Tensor] | None = None  # the sum over the current shard's earlier pieces
        self._leaf = self._block.start

    def between(self) -> None:
        """Take the gradients of a piece of a shard."""
        taken = self._take_all()
        if self._pieces is None:
            self._pieces = taken
        else:
            torch._foreach_add_(self._pieces, taken)

    def keep(self) -> None:
        """Take the gradients of a shard, or of its last piece.

        Raises:
            SpecError: when one of them is sparse.
        """
        self._stack.append(self._take_all())
        if self._pieces is not None:
            torch._foreach_add_(self._stack[-1], self._pieces)
            self._pieces = None
        for _ in range(counter_merges(self._n_shards, self._block.start, self._leaf)):
            newer = self._stack.pop()
            torch._foreach_add_(self._stack[-1], newer)
        self._leaf += 1

    def total(self) -> list[Tensor]:
        """Return, and give away, the sum over all shards where this worker holds them all."""
        return self._stack.pop()

    def of_bucket(self, last: Tensor, like: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
        """Return the sums of this worker's subtrees for some of the parameters.

        Args:
            last: (n,) gradients of the last shard, one after another; overwritten, and the last of the sums.
            like: tensors of their shapes.
            places: numbers of their parameters.

        Returns:
            (n,) tensors in leaf order, as many as the layout says.
        """
        views = [part.view(t.shape) for part, t in zip(torch.split(last, [t.numel() for t in like]), like)]
        if self._pieces is not None:
            torch._foreach_add_(views, [self._pieces[place] for place in places])
        parts = [[entry[place] for place in places] for entry in self._stack]
        for _ in range(counter_merges(self._n_shards, self._block.start, self._block.stop - 1)):
            torch._foreach_add_(views, parts.pop())
        return [*(torch.cat([part.reshape(-1) for part in entry]) for entry in parts), last]

    def _take_all(self) -> list[Tensor]:
        return [self._take(index) for index in range(len(self._parameters))]

    def _take(self, index: int) -> Tensor:
        """Return this shard's gradient in at least float32 and free `.grad`; zeros where there is none."""
        parameter = self._parameters[index]
        grad, parameter.grad = parameter.grad, None
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if grad is None:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if grad.layout != torch.strided:
            raise SpecError(
                f"`{self._names[index]}`: exact mode got a sparse gradient, whose additions have no fixed order. "
                "Use sparse=False, or mode='fast'."
            )
        return grad.to(dtype)
