"""The guard that stays on: do all replicas hold the same model, and if not, what differs, where, and why."""

from samestep.audit._audit import Audit

__all__ = ["Audit"]
