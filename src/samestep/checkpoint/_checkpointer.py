"""Save and restore: what users call."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from samestep.checkpoint._folder import Found, find, read_manifest
from samestep.checkpoint._place import check
from samestep.checkpoint._staging import Staging
from samestep.checkpoint._state import State, collect, present
from samestep.checkpoint._storage import plan_parts, read_tensors, verify
from samestep.checkpoint._writing import check_same, everywhere, write
from samestep.errors import CheckpointError, SpecError
from samestep.group import Group
from samestep.reduce import twin

__all__ = ["Checkpointer"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Checkpointer:
    """Saves the whole state of a run into a folder and brings it back, on any number of workers.

    Args:
        folder: of this run's checkpoints alone; all workers must see the same one.
        group: the workers.
        keep: how many usable checkpoints to keep, at least 1.
        asynchronous: whether `save` returns as soon as the tensors are copied to host memory, and a thread writes
            them. What became of it shows at the next `save`, `wait` or `close`.
        on_error: what a save does when the disk does not take it: "raise", or "continue" with a line in the log.

    Attributes:
        folder: as given.
        skipped: the damaged checkpoints that the last `restore` or `latest` passed over, with the reason.

    Raises:
        SpecError: when an argument is wrong.

    Collective: all ranks of `group` make it and call it alike.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        group: Group,
        keep: int = 3,
        asynchronous: bool = False,
        on_error: Literal["raise", "continue"] = "raise",
    ) -> None:
        problem = ""
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            problem = f"`keep`: expected a whole number of at least 1, got {keep!r}."
        if on_error not in ("raise", "continue"):
            problem = f"`on_error`: expected 'raise' or 'continue', got {on_error!r}."
        group.agree(not problem, problem, SpecError)
        self.folder = Path(folder)
        self.skipped: tuple[Found, ...] = ()
        self._group = group
        self._keep = keep
        self._continue = on_error == "continue"
        self._damaged: set[Path] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[int, Future[Path]] | None = None
        self._staging = Staging()
        if asynchronous:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="samestep-checkpoint")
            self._behind = twin(group)

    def save(self, step: int, /, **things: Any) -> Path | None:
        """Save the state of things; it is there whole, or not at all.

        Args:
            step: updates applied so far.
            **things: model, optimizer, scheduler, loader, scaler, step, ...: modules, optimizers, whatever has
                state_dict and load_state_dict, and dicts of JSON data (`extra`). None stands for nothing.

        Returns:
            The checkpoint's folder; None when it is written behind the loop, or when it failed and `on_error` is
            "continue".

        Raises:
            CheckpointError: on all workers, when a state cannot be saved or differs between workers, when a later
                step is already there, or the disk does not take it. Earlier checkpoints are untouched.

        Collective: all ranks of the group.
        """
        self.wait()
        state = everywhere(self._group, "save", lambda: self._collect(step, things))
        check_same(self._group, state)
        names = plan_parts(state.tensors, self._group.world_size)[self._group.rank]
        part = {name: state.tensors[name] for name in names}
        if self._thread is None:
            return self._settle(step, lambda: write(self._group, self.folder, self._keep, step, state, part))
        staged = everywhere(self._group, "save", lambda: self._staging.copy(part))
        arguments = (self._behind, self.folder, self._keep, step, state, staged)
        self._pending = (step, self._thread.submit(write, *arguments))
        return None

    def wait(self) -> Path | None:
        """Wait until the save behind the loop is done, if there is one.

        Returns:
            The checkpoint's folder; None when nothing was pending, or it failed and `on_error` is "continue".

        Raises:
            CheckpointError: on all workers, as for `save`.

        Collective: all ranks of the group, when saving is asynchronous.
        """
        if self._pending is None:
            return None
        (step, future), self._pending = self._pending, None
        return self._settle(step, future.result)

    def restore(self, *, allow: Sequence[str] = (), **things: Any) -> int | None:
        """Put the newest usable checkpoint into things.

        Everything is read, checked against its digests and compared with the things before the first of them
        changes. Damaged checkpoints are passed over, with a line in the log; see `skipped`.

        Args:
            allow: names, with shell wildcards, of things and tensors that may be missing on either side
                (``"scaler"``, ``"model.head.*"``), and of settings that may differ (``"optimizer.class"``,
                ``"loader.seed"``).
            **things: under the names they were saved with; a dict gets the saved content.

        Returns:
            The step; None when the folder holds no checkpoint at all.

        Raises:
            CheckpointError: on all workers, when the checkpoint does not fit (with both sides, and what would allow
                it), or all checkpoints are damaged.

        Collective: all ranks of the group.
        """
        self.wait()
        chosen = everywhere(self._group, "restore", lambda: present(things))
        mine = everywhere(self._group, "restore", lambda: collect(chosen))
        self.skipped = ()
        for found in self._find():
            if found.problem:
                self._skip(found)
            elif self._try(found, chosen, mine, allow):
                return found.step
        if self.skipped:
            texts = [f"{found.path.name}: {found.problem}" for found in self.skipped]
            raise CheckpointError(
                f"`{self.folder}`: expected a usable checkpoint, got {len(texts)} damaged: {' '.join(texts)} "
                "Bring a good one back, or use another folder to begin anew.",
                name=str(self.folder),
            )
        return None

    def latest(self) -> Path | None:
        """Return the folder of the newest checkpoint of which every byte is as it was written, or None.

        Damaged ones are passed over, with a line in the log; see `skipped`.

        Collective: all ranks of the group.
        """
        self.wait()
        self.skipped = ()
        for found in self._find():
            problem = found.problem or self._look(found.path)
            if not problem:
                return found.path
            self._skip(dataclasses.replace(found, problem=problem))
        return None

    def close(self) -> None:
        """Wait as `wait` does, and let the thread go.

        Collective: all ranks of the group, when saving is asynchronous.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._staging.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    def _collect(self, step: int, things: Mapping[str, Any]) -> State:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"`step`: expected a whole number of at least 0, got {step!r}.", name="step"
            )
        state = collect(present(things))
        if self._group.is_main:
            try:
                later = [f for f in find(self.folder) if f.step > step and f.path not in self._damaged]
            except OSError:
                later = []  # the write itself will say so, where `on_error` counts
            if later := [found for found in later if found.foreign or not found.problem]:
                raise CheckpointError(
                    f"`step`: got {step}, but `{later[0].path}` is there, and a restart would go on from it. "
                    "Restore before saving, or use another folder.",
                    name="step",
                )
        return state

    def _settle(self, step: int, job: Any) -> Path | None:
        try:
            path: Path = job()
        except CheckpointError as error:
            error.step = step
            if not self._continue:
                raise
            if self._group.is_main:
                _log.error("going on without a checkpoint of step %d: %s", step, error)
            return None
        return path

    def _find(self) -> list[Found]:
        """Return the checkpoints as rank 0 sees them, so that all workers try the same ones."""

        def look() -> list[Found]:
            return find(self.folder) if self._group.is_main else []

        here = everywhere(self._group, str(self.folder), look)
        rows = [(found.step, found.path.name, found.problem, found.foreign) for found in here]
        rows = json.loads(self._group.gather_text(json.dumps(rows))[0])
        found = [Found(step, self.folder / name, problem, foreign) for step, name, problem, foreign in rows]
        whole = next((f for f in found if f.foreign or not f.problem), None)
        if whole is not None and whole.foreign:
            raise CheckpointError(
                f"{whole.path.name}: {whole.problem}", step=whole.step, name="format_version"
            )
        return [f for f in found if not f.foreign]

    def _look(self, path: Path) -> str:
        """Return what rank 0 finds damaged in a checkpoint, on all workers."""

        def look() -> str:
            return _or_problem(lambda: verify(path, read_manifest(path)))[1] if self._group.is_main else ""

        return self._group.gather_text(everywhere(self._group, str(path), look))[0]

    def _try(self, found: Found, things: Mapping[str, Any], mine: State, allow: Sequence[str]) -> bool:
        """Restore from one checkpoint, or return False when a worker finds it damaged."""
        group = self._group
        manifest, problem = everywhere(
            group, "restore", lambda: _or_problem(lambda: read_manifest(found.path))
        )
        if self._damaged_for_one(found, problem):
            return False
        placement = everywhere(group, "restore", lambda: check(manifest, things, mine, allow))

        def read() -> dict[str, Tensor]:
            return read_tensors(found.path, manifest, placement.wanted)

        tensors, problem = everywhere(group, "restore", lambda: _or_problem(read))
        if self._damaged_for_one(found, problem):
            return False
        placement.apply(tensors, lambda name, job: everywhere(group, name, job))
        return True

    def _damaged_for_one(self, found: Found, problem: str) -> bool:
        texts = self._group.gather_text(problem)
        seen = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if len(set(texts)) == 1:
            seen = texts
        if any(texts):
            self._skip(dataclasses.replace(found, problem=" ".join(dict.fromkeys(seen))))
        return any(texts)

    def _skip(self, found: Found) -> None:
        self.skipped += (found,)
        self._damaged.add(found.path)
        if self._group.is_main:
            _log.warning("passed over a damaged checkpoint, %s: %s", found.path, found.problem)


def _or_problem(job: Callable[[], _T]) -> tuple[_T, str]:
    """Return what a job gives, or what it finds damaged; then there is nothing to use."""
    try:
        return job(), ""
    except CheckpointError as error:
        return cast(_T, None), error.message
