"""Values computed from data, set before the first step of a Lightning run and never again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep import start
from samestep.errors import SpecError
from samestep.group import Group

__all__ = ["Initialization", "as_initialization"]

Compute = Callable[[Any, Group], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Initialization:
    """What to compute from data before the first step, for `SamestepCallback`.

    Attributes:
        compute: ``compute(module, group) -> {name: tensor}``, run without autograd.
        where: path of the submodule whose parameters and buffers are set, as for ``get_submodule``; "" for the
            LightningModule itself. It gets the buffer ``initialized``, part of every checkpoint.
        collective: whether `compute` runs on all workers (it may then call collectives, such as a k-means over all
            workers' rows, and returns equal values), or on rank 0 alone, which sees that worker's data only.
        by: as for `start.initialize`.
    """

    compute: Compute
    where: str = ""
    collective: bool = True
    by: Literal["broadcast", "gradient"] = "broadcast"

    def mark(self, root: nn.Module) -> None:
        """Give the module its mark; before a checkpoint is loaded and before DDP wraps it."""
        start.mark(self._module(root))

    def run(self, root: nn.Module, optimizers: list[Optimizer], group: Group) -> bool:
        """Set the values where the mark says that they are not set; see `start.initialize`.

        Collective: all ranks of `group`.
        """
        module = self._module(root)
        optimizer = optimizers[0] if optimizers and self.by == "broadcast" else None
        return start.initialize(
            module,
            lambda inner: self.compute(inner, group),
            group,
            self.by,
            optimizer,
            collective=self.collective,
        )

    def _module(self, root: nn.Module) -> nn.Module:
        try:
            return root.get_submodule(self.where)
        except AttributeError as error:
            raise SpecError(
                f"`where`: expected the path of a submodule, got {self.where!r}: {error}."
            ) from error


def as_initialization(given: Initialization | Compute | None) -> Initialization | None:
    """Return what the user gave as an `Initialization`.

    Raises:
        SpecError: neither one nor a function.
    """
    if given is None or isinstance(given, Initialization):
        return given
    if callable(given):
        return Initialization(given)
    raise SpecError(
        f"`initialize`: expected compute(module, group) or an Initialization, got {type(given).__name__}.",
        name="initialize",
    )
