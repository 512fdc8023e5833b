"""What `explain` answers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["AsBuilt", "Explanation", "Finding", "Stage"]

Stage = Literal[
    "initial values", "samples", "forward", "backward", "reduction", "clipping", "update", "buffers"
]


@dataclass(frozen=True)
class Finding:
    """One stage that differs although it was given the reference's values of the stage before.

    Attributes:
        stage: where.
        tensor: what parts first: a parameter, buffer, module or sample; None when it is the loss as a whole.
        ranks: on which workers.
        cause: in a few words, the same ones for every program with this fault; "unknown" where it cannot be told.
        sentence: the finding in plain words, with its figures.
        size: relative difference; inf where one side has no such value.
    """

    stage: Stage
    tensor: str | None
    ranks: tuple[int, ...]
    cause: str
    sentence: str
    size: float


@dataclass(frozen=True)
class AsBuilt:
    """The same comparison in the dtype of training: the largest difference of the gradient that is applied.

    Attributes:
        dtype: as "float32".
        ulps: in units of the last place of the tensor's largest value.
        tensor: the parameter in which it is.
    """

    dtype: str
    ulps: float
    tensor: str


@dataclass(frozen=True)
class Explanation:
    """Why the step on N workers is not the step on one worker; or that it is.

    Attributes:
        stage: of the first finding, None when there is none; so are the next five.
        tensor: what parts first.
        ranks: on which workers.
        cause: in a few words.
        sentence: in plain words; says so when nothing differs.
        size: relative difference.
        world_size: number of workers.
        tolerance: relative difference from which a value counts as different.
        findings: of all stages, in their order; each stage was given the reference's values.
        warnings: what this comparison could not see.
        as_built: the pair in the dtype of training; reported, not judged.
    """

    stage: Stage | None
    tensor: str | None
    ranks: tuple[int, ...]
    cause: str | None
    sentence: str
    size: float
    world_size: int
    tolerance: float
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()
    as_built: AsBuilt | None = field(default=None)

    @property
    def same(self) -> bool:
        """Whether no stage differs."""
        return self.stage is None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON data; a size that is not finite becomes None.

        Example:
            >>> Explanation(None, None, (), None, "Same.", 0.0, 4, 1e-9).to_dict()["world_size"]
            4
        """
        return dict(_plain(asdict(self)), same=self.same)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
