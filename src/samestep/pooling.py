"""What pure code may ask of the other workers, as one small protocol.

Layer L1 never asks whether a process group exists. A function that needs figures of all workers takes a
`Pool`; `alone` is the pool of a single worker, and `reduce.pool(group)` is the real one, with the same answers
on every worker.

::

    worker 0: rows 0..6     ─┐                    sum of all, on every worker
    worker 1: rows 7..9     ─┼─  pool(tensor)  ─>
    worker 2: no rows       ─┘   pool.offset(3)   rows in front of this worker's first one
"""

from __future__ import annotations

from typing import Literal, NoReturn, Protocol

from torch import Tensor

from samestep.errors import SpecError

__all__ = ["Pool", "ReduceOp", "alone"]

ReduceOp = Literal["sum", "max", "min"]


class Pool(Protocol):
    """All workers that hold a part of one data set, seen from one of them.

    Every method is collective: all workers call it, in the same order.
    """

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for all (writes files, shows progress)."""
        ...

    def __call__(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the elementwise sum, maximum or minimum over all workers.

        Args:
            tensor: any shape, equal on all workers; left as it is. Integer sums are exact in any order; float
                sums are added in rank order.
            op: "sum", "max" or "min".

        Returns:
            Tensor of the same shape and dtype, equal bit for bit on all workers.
        """
        ...

    def offset(self, n_rows: int) -> int:
        """Return how many rows the workers of lower rank hold, so that rows get global numbers."""
        ...

    def agree(self, ok: bool, message: str) -> None:
        """Return if all workers are content; else raise the same `SpecError` on all of them.

        Args:
            ok: this worker's finding.
            message: what this worker found; read only when `ok` is false.

        Raises:
            SpecError: names the ranks that were not content, with what they found.
        """
        ...


class _Alone:
    """The pool of a single worker."""

    is_main = True

    def __call__(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return tensor.clone()

    def offset(self, n_rows: int) -> int:
        return 0

    def agree(self, ok: bool, message: str) -> None:
        if not ok:
            _refuse(message)


def _refuse(message: str) -> NoReturn:
    raise SpecError(message, rank=0)


alone: Pool = _Alone()
