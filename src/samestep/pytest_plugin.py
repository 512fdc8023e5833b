"""A pytest fixture that trains at several numbers of workers and asserts that it is the same training.

::

    def train(group, record):                       # at module level: it runs in worker processes
        ...
        record(0, model, optimizer)
        for step in range(10):
            ...
            record(step + 1, model, optimizer, loss=loss, samples=ids)

    def test_training_does_not_depend_on_the_workers(samestep_workers):
        samestep_workers(1, 2, 4).check(train)

Installed with samestep, through pytest's entry points; importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from samestep.compare import Comparison, Recorder
    from samestep.group import Group

__all__ = ["Workers", "samestep_workers"]


class Workers:
    """Numbers of workers to train with; made by the fixture `samestep_workers`.

    Args:
        counts: numbers of workers, at least two different ones; the smallest is the reference.
        folder: for the traces.
    """

    def __init__(self, counts: tuple[int, ...], folder: Path) -> None:
        if len(set(counts)) < 2 or len(set(counts)) != len(counts) or min(counts) < 1:
            raise ValueError(
                f"`counts`: expected at least two different numbers such as 1, 2, 4, got {counts}."
            )
        self._counts, self._folder = sorted(counts), folder

    def compare(
        self, train: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0
    ) -> list[Comparison]:
        """Train with each number of workers and return the comparison of each with the first.

        Args:
            train: ``train(group, record, *args)``, at module level; `record` takes what `compare.record` takes.
            *args: passed on; must be picklable.
            timeout_seconds: bound on each training.

        Raises:
            WorkerError: when a worker fails.
            SpecError: when `train` records nothing.
        """
        from samestep import compare, launch

        traces = []
        for count in self._counts:
            folder = self._folder / f"{count}-worker{'s' * (count > 1)}"
            launch.run(_train, count, folder, train, args, timeout_seconds=timeout_seconds)
            traces.append(compare.read(folder))
        return [compare.compare(traces[0], other) for other in traces[1:]]

    def check(
        self,
        train: Callable[..., Any],
        *args: Any,
        at_least: Literal["exact", "within"] = "within",
        timeout_seconds: float = 120.0,
    ) -> list[Comparison]:
        """Train as `compare` does and fail the test unless all runs agree, and the comparison proves something.

        Args:
            train: as for `compare`.
            *args: passed on.
            at_least: "within" takes rounding, "exact" takes only the same bits.
            timeout_seconds: bound on each training.

        Returns:
            The comparisons.
        """
        __tracebackhide__ = True
        found = self.compare(train, *args, timeout_seconds=timeout_seconds)
        wrong = [
            f"{one.reference} against {one.other}: {one.sentence()}"
            for one in found
            if one.exit_code or (at_least == "exact" and one.verdict != "exact")
        ]
        if wrong:
            pytest.fail("\n".join([f"expected {at_least} at {self._counts} workers", *wrong]), pytrace=False)
        return found


@pytest.fixture
def samestep_workers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Workers]:
    """Give ``samestep_workers(1, 2, 4)``, whose ``check(train)`` asserts that training is the same with each."""

    def with_counts(*counts: int) -> Workers:
        return Workers(counts, tmp_path_factory.mktemp("samestep"))

    return with_counts


def _train(group: Group, folder: Path, train: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from samestep.compare import Recorder

    recorder: Recorder = Recorder(folder, group=group)
    train(group, recorder.record, *args)
