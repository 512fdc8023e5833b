"""Save and restore: what users call."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from samestep.checkpoint._folder import ASIDE, Found, clean, find, prune, publish, read_manifest
from samestep.checkpoint._manifest import Manifest, TensorEntry
from samestep.checkpoint._place import check
from samestep.checkpoint._state import State, collect, present
from samestep.checkpoint._storage import plan_parts, read_tensors, write_part
from samestep.errors import CheckpointError, SamestepError, SpecError
from samestep.group import Group

__all__ = ["Checkpointer"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Checkpointer:
    """Saves the whole state of a run into a folder and brings it back, on any number of workers.

    Args:
        folder: of this run's checkpoints alone; all workers must see the same one.
        group: the workers.
        keep: how many usable checkpoints to keep, at least 1.
        on_error: what a save does when the disk does not take it: "raise", or "continue" with a line in the log.

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
        on_error: Literal["raise", "continue"] = "raise",
    ) -> None:
        problem = ""
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            problem = f"`keep`: expected a whole number of at least 1, got {keep!r}."
        if on_error not in ("raise", "continue"):
            problem = f"`on_error`: expected 'raise' or 'continue', got {on_error!r}."
        group.agree(not problem, problem, SpecError)
        self.folder = Path(folder)
        self._group = group
        self._keep = keep
        self._continue = on_error == "continue"

    def save(self, step: int, /, **things: Any) -> Path | None:
        """Save the state of things; it is there whole, or not at all.

        Args:
            step: updates applied so far.
            **things: model, optimizer, scheduler, loader, scaler, step, ...: modules, optimizers, whatever has
                state_dict and load_state_dict, and dicts of JSON data. None stands for nothing.

        Returns:
            The checkpoint's folder; None when it failed and `on_error` is "continue".

        Raises:
            CheckpointError: on all workers, when a state cannot be saved or differs between workers, or the disk does
                not take it. Earlier checkpoints are untouched.

        Collective: all ranks of the group.
        """
        state = self._everywhere("save", lambda: collect(present(things)))
        self._check_same(state)
        try:
            return self._write(step, state)
        except CheckpointError as error:
            if not self._continue:
                raise
            if self._group.is_main:
                _log.error("checkpoint of step %d not saved: %s", step, error)
            return None

    def restore(self, *, allow: Sequence[str] = (), **things: Any) -> int | None:
        """Put the newest usable checkpoint into things, all of it or nothing.

        Args:
            allow: names, with shell wildcards, of things and tensors that may be missing on either side
                (``"scaler"``, ``"model.head.*"``), and of settings that may differ (``"loader.seed"``,
                ``"optimizer.class"``).
            **things: as for `save`; a dict gets the saved content.

        Returns:
            The step; None when the folder holds no checkpoint at all.

        Raises:
            CheckpointError: on all workers, when the checkpoint does not fit, or all are damaged.

        Collective: all ranks of the group.
        """
        chosen = self._everywhere("restore", lambda: present(things))
        mine = self._everywhere("restore", lambda: collect(chosen))
        names = [found for found in self._find() if not found.problem]
        if not names:
            return None
        placement = check(read_manifest(names[0].path), chosen, mine, allow)
        tensors = read_tensors(
            names[0].path, placement.manifest.files, placement.manifest.tensors, placement.wanted
        )
        for name, job in placement.jobs(tensors):
            self._everywhere(name, job)
        return placement.manifest.step

    def latest(self) -> Path | None:
        """Return the folder of the newest usable checkpoint, or None."""
        return next((found.path for found in self._find() if not found.problem), None)

    def _find(self) -> list[Found]:
        return self._everywhere("restore", lambda: find(self.folder))

    def _everywhere(self, name: str, job: Callable[[], _T]) -> _T:
        """Return what a job gives here, when it gives something on all workers; else raise on all."""
        result, message = None, ""
        cause: Exception | None = None
        try:
            result = job()
        except SamestepError as error:
            message, cause = error.message, error
        except OSError as error:
            message, cause = f"`{error.filename or self.folder}`: {error.strerror or error}.", error
        except Exception as error:
            message, cause = f"`{name}`: {type(error).__name__}: {error}", error
        try:
            self._group.agree(not message, message, CheckpointError)
        except CheckpointError as error:
            error.name = getattr(cause, "name", None) or name
            raise error from cause
        return result  # type: ignore[return-value]

    def _check_same(self, state: State) -> None:
        facts = {
            name: hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
            for name, value in state.states.items()
        }
        shapes = [(name, str(t.dtype), tuple(t.shape)) for name, t in state.tensors.items()]
        facts["tensors"] = hashlib.blake2b(repr((shapes, state.aliases)).encode(), digest_size=8).hexdigest()
        for rank, text in enumerate(texts := self._group.gather_text(json.dumps(facts))):
            if text != texts[0]:
                theirs, first = json.loads(text), json.loads(texts[0])
                name = next(key for key in (*first, *theirs) if first.get(key) != theirs.get(key))
                raise CheckpointError(
                    f"`{name}`: rank {rank} of {self._group.world_size} holds another state than rank 0. Bring the "
                    "workers to one state before saving.",
                    rank=rank,
                    name=name,
                )

    def _write(self, step: int, state: State) -> Path:
        group = self._group
        aside = self.folder / f"{ASIDE}{group.gather_text(uuid.uuid4().hex[:8])[0]}"
        try:
            self._everywhere("save", lambda: _prepare(aside) if group.is_main else None)
            names = plan_parts(state.tensors, group.world_size)[group.rank]
            part: dict[str, Tensor] = {name: state.tensors[name] for name in names}
            path = aside / f"tensors-{group.rank}-of-{group.world_size}.safetensors"
            entries, facts = self._everywhere("save", lambda: write_part(path, part) if part else ({}, {}))
            written = {path.name: facts} if part else {}
            table = {name: entry.__dict__ for name, entry in entries.items()}
            parts = [json.loads(text) for text in group.gather_text(json.dumps([written, table]))]
            manifest = _manifest(step, state, group.world_size, parts)
            target = self._everywhere(
                "save", lambda: self._publish(aside, manifest) if group.is_main else None
            )
        except BaseException:
            if group.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        return self.folder / group.gather_text(target.name if target else "")[0]

    def _publish(self, aside: Path, manifest: Manifest) -> Path:
        target = publish(aside, manifest)
        prune(self.folder, self._keep)
        return target


def _prepare(aside: Path) -> None:
    aside.parent.mkdir(parents=True, exist_ok=True)
    clean(aside.parent)
    aside.mkdir()


def _manifest(step: int, state: State, world_size: int, parts: list[Any]) -> Manifest:
    files = {name: facts for written, _ in parts for name, facts in written.items()}
    entries = {
        name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
        for _, table in parts
        for name, entry in table.items()
    }
    loader = state.states.get("loader", {}).get("value")
    consumed = loader.get("samples_consumed") if isinstance(loader, dict) else None
    versions = {"samestep": metadata.version("samestep"), "torch": torch.__version__}
    return Manifest(
        step=step,
        samples_consumed=consumed,
        world_size=world_size,
        versions=versions,
        files=files,
        tensors=entries,
        aliases=state.aliases,
        states=state.states,
    )
