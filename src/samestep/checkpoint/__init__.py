"""Stop anywhere and go on as if nothing had happened.

A checkpoint is a folder of safetensors files with one JSON manifest. It does not depend on how many workers saved
it, is read without running anything from it, and every byte of it is under a digest. Buffers that a module does not
save (``persistent=False``) are not in it: they must follow from how the module is made.

::

    checkpointer = Checkpointer("run/checkpoints", group=group)
    things = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "step": step}
    checkpointer.restore(**things)              None at the first start, the step after a restart
    ...
    checkpointer.save(step.step, **things)
"""

from __future__ import annotations

from samestep.checkpoint._checkpointer import Checkpointer
from samestep.checkpoint._export import to_safetensors
from samestep.checkpoint._folder import Found

__all__ = ["Checkpointer", "Found", "to_safetensors"]
