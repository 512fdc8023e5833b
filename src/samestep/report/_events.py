"""The curves of a run as TensorBoard event files, for people who have their other runs there."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from samestep.errors import SpecError
from samestep.report._files import read
from samestep.report._sections import series

__all__ = ["write_events"]


def write_events(run_folder: str | os.PathLike[str]) -> Path:
    """Write the numbers of ``metrics.jsonl`` as event files into ``tensorboard/`` of a run folder; return that.

    Events of an earlier call are replaced. It needs the package ``tensorboard``, which samestep does not install by
    itself.

    Args:
        run_folder: holds ``metrics.jsonl``.

    Raises:
        SpecError: when it is no run's folder, has no metrics, or tensorboard is not installed.
    """
    folder = Path(run_folder)
    metrics = read(folder).metrics
    if not metrics:
        raise SpecError(
            f"`run_folder`: expected lines in {folder / 'metrics.jsonl'}, got none. Let the run log a step first.",
            name="run_folder",
        )
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SpecError(
            "tensorboard: expected the package, got none. pip install 'samestep[tensorboard]'.",
            name="tensorboard",
        ) from None
    target, draft = folder / "tensorboard", folder / f".tensorboard.{os.getpid()}"
    try:
        with SummaryWriter(str(draft)) as writer:
            for name, xs, ys in series(metrics):
                for x, y in zip(xs, ys):
                    if math.isfinite(y):
                        writer.add_scalar(name, y, int(x))
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
