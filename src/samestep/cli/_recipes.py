"""Which recipes there are, and their settings; a recipe is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.errors import SpecError

__all__ = ["RECIPES", "job_of", "load_settings", "lr_key_of", "outline_of", "program_of"]

RECIPES = {
    "image-classification": "samestep.recipes.image_classification",
    "semantic-ids": "samestep.recipes.semantic_ids",
}


_MAY_CHANGE = ("checkpoint_every", "audit_every", "on_disk_error")  # on resume: none of them changes a number


def load_settings(
    recipe: str, config: Path | None, changes: list[str], out: Path | None, resume: bool
) -> Any:
    """Return the settings; those of the folder when a run goes on, which new ones must not contradict."""
    from samestep.recipes.spec import load

    if recipe not in RECIPES:
        raise SpecError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}.", name="recipe")
    kind = importlib.import_module(f"{RECIPES[recipe]}.spec").Spec
    saved = None if out is None else out / "config.yaml"
    if not resume or saved is None or not saved.exists():
        return load(kind, config, changes)
    old = load(kind, saved)
    if config is None and not changes:
        return old
    new = load(kind, config, changes) if config is not None else load(kind, saved, changes)
    for key in kind.model_fields:
        if getattr(new, key) != getattr(old, key) and key not in _MAY_CHANGE:
            raise SpecError(
                f"{saved}: `{key}`: this run began with {getattr(old, key)!r}, got {getattr(new, key)!r}. "
                "Resume with the same settings, or start another run.",
                name=key,
            )
    return new


def job_of(recipe: str) -> Callable[..., None]:
    """Return the function that runs a recipe."""
    run: Callable[..., None] = importlib.import_module(f"{RECIPES[recipe]}.job").run
    return run


def lr_key_of(recipe: str) -> str:
    """Return the name of the setting that holds a recipe's learning rate."""
    key: str = importlib.import_module(f"{RECIPES[recipe]}.spec").Spec.lr_key
    return key


def outline_of(recipe: str) -> Callable[[Any, Any], Any]:
    """Return the function that says what rates a recipe's settings come to."""
    make: Callable[[Any, Any], Any] = importlib.import_module(f"{RECIPES[recipe]}.schedule").outline
    return make


def program_of(recipe: str) -> Callable[..., Any]:
    """Return the function that makes one step of a recipe's run for `samestep.explain`."""
    make: Callable[..., Any] = importlib.import_module(f"{RECIPES[recipe]}.program").program
    return make
