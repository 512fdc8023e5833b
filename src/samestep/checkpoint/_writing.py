"""One save, from tensors in memory to a published folder: what a worker does, before or behind the loop."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.checkpoint._folder import ASIDE, clean, prune, publish
from samestep.checkpoint._manifest import Manifest, TensorEntry
from samestep.checkpoint._state import State
from samestep.checkpoint._storage import write_part
from samestep.errors import CheckpointError, SamestepError
from samestep.group import Group

__all__ = ["check_same", "everywhere", "write"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def everywhere(group: Group, name: str, job: Callable[[], _T], advice: str = "") -> _T:
    """Return what a job gives on this worker, when it fails on none; else raise the same error on all.

    Args:
        group: the workers.
        name: of what the job is about, for the error.
        job: may fail on one worker alone; must not be collective unless it then fails on all.
        advice: added to what the disk says.

    Raises:
        CheckpointError: names the ranks on which it failed, with the reason.

    Collective: all ranks of `group`.
    """
    result, message = None, ""
    cause: Exception | None = None
    try:
        result = job()
    except SamestepError as error:
        message, cause = error.message, error
    except OSError as error:
        message, cause = f"`{error.filename or name}`: {error.strerror or error}. {advice}".rstrip(), error
    except Exception as error:
        message, cause = f"`{name}`: {type(error).__name__}: {error}", error
    try:
        group.agree(not message, message, CheckpointError)
    except CheckpointError as error:
        error.name = getattr(cause, "name", None) or name
        raise error from cause
    return result  # type: ignore[return-value]


def check_same(group: Group, state: State) -> None:
    """Raise on all workers unless all hold the same states and tensors of the same names and shapes.

    The values of tensors are not compared: that is what audits are for.

    Collective: all ranks of `group`.
    """
    facts = {name: _digest(json.dumps(value)) for name, value in state.states.items()}
    shapes = [(name, str(t.dtype), tuple(t.shape)) for name, t in state.tensors.items()]
    facts["tensors"] = _digest(repr((shapes, state.aliases)))
    texts = group.gather_text(json.dumps(facts))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            theirs, first = json.loads(text), json.loads(texts[0])
            name = next(key for key in (*first, *theirs) if first.get(key) != theirs.get(key))
            raise CheckpointError(
                f"`{name}`: rank {rank} of {group.world_size} holds another state than rank 0. Bring the workers "
                "to one state before saving.",
                rank=rank,
                name=name,
            )


def write(group: Group, folder: Path, keep: int, step: int, state: State, part: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint aside, give it its name, and remove what is too old.

    Args:
        group: the workers.
        folder: of the run's checkpoints.
        keep: usable checkpoints to keep.
        step: of this one.
        state: of the run; its tensors are not looked at.
        part: the tensors that this worker writes.

    Raises:
        CheckpointError: on all workers, when the disk does not take it on one of them.

    Collective: all ranks of `group`.
    """
    advice = (
        f"The checkpoint of step {step} was not saved, earlier ones are untouched. Make room or give rights there, "
        'or pass on_error="continue" to go on without it.'
    )
    aside = folder / f"{ASIDE}{group.gather_text(uuid.uuid4().hex[:8])[0]}"
    path = aside / f"tensors-{group.rank}-of-{group.world_size}.safetensors"
    try:
        everywhere(group, str(folder), lambda: _prepare(aside) if group.is_main else None, advice)
        entries, facts = everywhere(group, str(path), lambda: _write_part(path, part), advice)
        table = {name: entry.__dict__ for name, entry in entries.items()}
        texts = group.gather_text(json.dumps([{path.name: facts} if part else {}, table]))
        manifest = _manifest(step, state, group.world_size, [json.loads(text) for text in texts])
        target = everywhere(
            group, str(folder), lambda: publish(aside, manifest).name if group.is_main else "", advice
        )
    except BaseException:
        if group.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    if group.is_main:
        _prune(folder, keep)
    return folder / group.gather_text(target)[0]


def _prepare(aside: Path) -> None:
    aside.parent.mkdir(parents=True, exist_ok=True)
    clean(aside.parent)
    aside.mkdir()


def _write_part(path: Path, part: Mapping[str, Tensor]) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    if not path.parent.is_dir():
        raise CheckpointError(
            f"`{path.parent.parent}`: this worker does not see what rank 0 makes there. Use a folder that all "
            "workers share.",
            name=str(path.parent.parent),
        )
    return write_part(path, part) if part else ({}, {})


def _prune(folder: Path, keep: int) -> None:
    try:
        prune(folder, keep)
    except OSError as error:
        # The new checkpoint is safe; an old one too many is no reason to stop or to call it unsaved.
        _log.warning("could not remove an old checkpoint: %s", error)


def _manifest(step: int, state: State, world_size: int, parts: list[Any]) -> Manifest:
    entries = {
        name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
        for _, table in parts
        for name, entry in table.items()
    }
    loader = state.states.get("loader", {}).get("value")
    return Manifest(
        step=step,
        samples_consumed=loader.get("samples_consumed") if isinstance(loader, dict) else None,
        world_size=world_size,
        versions={"samestep": metadata.version("samestep"), "torch": torch.__version__},
        files={name: facts for written, _ in parts for name, facts in written.items()},
        tensors=entries,
        aliases=state.aliases,
        states=state.states,
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
