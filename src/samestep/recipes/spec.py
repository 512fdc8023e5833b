"""Settings of a recipe: a YAML file, `--set` on top of it, every key checked before anything starts.

Reading settings imports neither torch nor data, so that a typing mistake is answered at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from samestep.errors import SpecError

__all__ = ["RunSpec", "load", "parse_settings", "to_yaml"]


class RunSpec(BaseModel):
    """Settings that all recipes have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    recipe: ClassVar[str]
    """Name of the recipe on the command line."""

    paths: ClassVar[frozenset[str]] = frozenset()
    """Keys that name files; in a settings file they are relative to its folder."""

    lr_key: ClassVar[str] = "lr"
    """Key of the learning rate that `samestep schedule --lr` sets."""

    mode: Literal["fast", "exact"] = Field(
        "fast", description="fast: as torch's DDP adds; exact: same bits for any N"
    )
    steps: int = Field(1, ge=0, description="applied updates of the run")
    global_batch_size: int = Field(1024, ge=1, description="samples of a step, over all workers")
    shards: int = Field(2, ge=1, description="parts of every global batch; the most workers that can be used")
    seed: int = Field(0, ge=0, description="of the sample order, the initial values and all random streams")
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints; 0 for none but the last")
    audit_every: int = Field(
        100, ge=0, description="steps between audits of the replicas; 0 for one at the end"
    )
    on_disk_error: Literal["raise", "continue"] = Field(
        "raise", description="continue: train on without the checkpoints that the disk does not take"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.global_batch_size < self.shards:
            raise ValueError(
                f"`global_batch_size`: expected at least shards={self.shards}, got {self.global_batch_size}"
            )
        return self


S = TypeVar("S", bound=RunSpec)


def load(kind: type[S], config: Path | None, settings: Iterable[str] = ()) -> S:
    """Return the settings of a recipe, checked.

    Args:
        kind: the recipe's model of its settings.
        config: YAML file, or None for the defaults.
        settings: ``key=value`` texts that go on top, values in YAML; paths in them are as the shell sees them.

    Raises:
        SpecError: the file is missing or no YAML mapping, a key is unknown (the nearest known one is named), or a
            value does not fit.
    """
    values: dict[str, Any] = {}
    if config is not None:
        values = _read(config)
        # A run's own config.yaml holds paths as its worker saw them.
        for key in (kind.paths & values.keys()) if config.name != "config.yaml" else ():
            values[key] = _beside(config, values[key])
    values.update(parse_settings(settings))
    where = str(config) if config is not None else "settings"
    _refuse_unknown(values, kind, where)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SpecError(f"{where}: {_first_problem(error)}", name=_first_key(error)) from None


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return ``key=value`` texts as a mapping; values are YAML.

    Raises:
        SpecError: a text without ``=``, or a value that is no YAML.

    Example:
        >>> parse_settings(["steps=10", "n_centroids=[4, 4]"])
        {'steps': 10, 'n_centroids': [4, 4]}
    """
    values = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise SpecError(
                f"--set {text}: expected KEY=VALUE. Write, for example, --set steps=100.", name="set"
            )
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SpecError(
                f"--set {text}: the value is no YAML: {_one_line(error)}", name=key.strip()
            ) from None
    return values


def to_yaml(spec: RunSpec) -> str:
    """Return all settings as YAML, defaults included, for ``config.yaml``."""
    return yaml.safe_dump({"recipe": spec.recipe, **spec.model_dump(mode="json")}, sort_keys=False)


def _read(config: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(config.read_text())
    except OSError as error:
        raise SpecError(
            f"{config}: cannot be read ({error.strerror}). Check the path.", name="config"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{config}: no YAML: {_one_line(error)}", name="config") from None
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise SpecError(
            f"{config}: expected keys and values, got {type(content).__name__}. See the recipe's example.",
            name="config",
        )
    return dict(content)


def _beside(config: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_beside(config, entry) for entry in value]
    return str(config.parent / value) if isinstance(value, str) else value


def _refuse_unknown(values: dict[str, Any], kind: type[RunSpec], where: str) -> None:
    named = values.pop("recipe", kind.recipe)
    if named != kind.recipe:
        raise SpecError(f"{where}: `recipe`: expected {kind.recipe!r}, got {named!r}.", name="recipe")
    for key in values:
        if key not in kind.model_fields:
            near = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.5)
            hint = f"Did you mean `{near[0]}`?" if near else f"Known keys: {', '.join(kind.model_fields)}."
            raise SpecError(f"{where}: unknown key `{key}`. {hint}", name=key)


def _first_key(error: ValidationError) -> str | None:
    place = error.errors()[0]["loc"]
    return str(place[0]) if place else None


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"`{place}`: expected a value, got none. Give it in the file, or with --set {place}=VALUE."
    message = first["msg"].removeprefix("Value error, ")
    return f"`{place}`: {message}, got {first['input']!r}." if place else f"{message}."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
