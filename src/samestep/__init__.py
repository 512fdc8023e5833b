"""Synchronous data-parallel training in PyTorch that is exact, and proves it.

A module is the namespace: ``from samestep import schedules``, then ``schedules.cosine(...)``. Importing
samestep itself imports nothing else, not even torch, so that the command line answers at once; a module is
loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.1.0"

__all__ = [
    "accelerate",
    "agent",
    "audit",
    "buffers",
    "bulk",
    "caffe2",
    "carrier",
    "checkpoint",
    "codebooks",
    "compare",
    "compiled",
    "doctor",
    "environment",
    "errors",
    "explain",
    "fingerprint",
    "forward",
    "gradients",
    "group",
    "handshake",
    "hooks",
    "jsonlines",
    "kmeans",
    "launch",
    "lightning",
    "lossfn",
    "momentum",
    "native",
    "partials",
    "pooling",
    "pytest_plugin",
    "reduce",
    "report",
    "scaling",
    "scheduler",
    "schedules",
    "sharding",
    "start",
    "step",
    "streams",
    "survive",
    "tally",
    "targets",
    "transport",
    "tree",
    "trial",
    "watch",
    "weighing",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"samestep.{name}")
    raise AttributeError(f"module 'samestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
