"""The step's own rule of clipping, for one worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["clip_norm"]


def clip_norm(parameters: Sequence[nn.Parameter], bound: float) -> None:
    """Multiply gradients so that their common norm is at most `bound`, as `TrainStep` does on every worker.

    torch's rule adds 1e-6 to the norm, which would part from ours by as much.

    Args:
        parameters: with gradients or without.
        bound: on the norm over all of them, above 0.

    Example:
        >>> parameter = nn.Parameter(torch.zeros(2))
        >>> parameter.grad = torch.tensor([3.0, 4.0])
        >>> clip_norm([parameter], 1.0)
        >>> [round(x, 6) for x in parameter.grad.tolist()]
        [0.6, 0.8]
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if norm > bound:
        for gradient in gradients:
            gradient *= bound / norm
