"""Stop anywhere and go on as if nothing had happened.

A checkpoint is a folder of safetensors files with one JSON manifest. It does not depend on how many workers saved it, is
read without running anything from it, and every byte of it is under a digest.
"""

from __future__ import annotations

from samestep.checkpoint._checkpointer import Checkpointer
from samestep.checkpoint._folder import Found

__all__ = ["Checkpointer", "Found"]
