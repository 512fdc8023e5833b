"""What the errors of torch's transports say, in plain words."""

from __future__ import annotations

import re

import torch.distributed as dist

__all__ = ["first_line", "is_transport"]


def is_transport(error: BaseException) -> bool:
    """Return whether torch raised `error` because another worker is gone, silent or out of step."""
    text = str(error).lower()
    signs = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "peer", "application")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


def first_line(error: BaseException) -> str:
    """Return what an error of torch's transport says, without its source file and its advice."""
    lines = str(error).strip().splitlines()
    line = lines[0].strip() if lines else type(error).__name__
    return re.sub(r"\[\S*\.(cc|cpp|h):\d+\] ", "", line).split(". This is typically")[0].rstrip(".")
