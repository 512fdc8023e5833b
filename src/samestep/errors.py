"""The errors that samestep raises, and what each one means.

::

    SamestepError
    ├── SpecError (also ValueError)      a setting, a file or the input data is wrong
    ├── GroupError                       something between the workers went wrong
    │   ├── WorkerError                  a worker failed, was killed or hung
    │   └── AgreementError               the workers disagree before an action
    ├── ReplicaMismatchError             an audit found replicas that differ
    └── CheckpointError                  a checkpoint is missing, damaged or does not fit

A bad argument of a pure function is a plain ``ValueError`` or ``TypeError``.

Every error carries fields, so that callers need not parse its text: ``rank`` (the first rank that found it, or
None), ``step`` (updates applied when it was found, or None), ``name`` (of the argument, tensor or file, or None)
and ``exit_code``, what the command line returns for it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AgreementError",
    "CheckpointError",
    "GroupError",
    "ReplicaMismatchError",
    "SamestepError",
    "SpecError",
    "WorkerError",
]


class SamestepError(Exception):
    """Base of all errors that samestep raises on purpose."""

    exit_code: ClassVar[int] = 2

    def __init__(
        self, message: str, *, rank: int | None = None, step: int | None = None, name: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.step = step
        self.name = name
        self.common = False  # whether all workers raised this same error

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields are lost by the default pickling of exceptions, and errors travel between processes.
        return (_rebuild, (type(self), self.message, self.__dict__))


class SpecError(SamestepError, ValueError):
    """A setting, an input file or the data in it is wrong; nothing was started or written."""


class GroupError(SamestepError):
    """Something between the workers went wrong: start-up, transport, or one of them."""

    exit_code: ClassVar[int] = 3


class WorkerError(GroupError):
    """A worker failed, was killed or did not answer in time; `rank` says which one."""


class AgreementError(GroupError):
    """The workers disagree, or one of them failed, before a common action; raised on all of them alike."""

    exit_code: ClassVar[int] = 1


class ReplicaMismatchError(SamestepError):
    """An audit found that replicas differ; `name` is the first tensor that does."""

    exit_code: ClassVar[int] = 1


class CheckpointError(SamestepError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


def _rebuild(kind: type[SamestepError], message: str, fields: dict[str, object]) -> SamestepError:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error
