"""The LR scheduler: writes what a schedule asks for into an optimizer, on the clock of applied updates."""

from samestep.scheduler._resume import Resume
from samestep.scheduler._scheduler import LRScheduler, PreviewRow

__all__ = ["LRScheduler", "PreviewRow", "Resume"]
