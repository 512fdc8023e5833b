"""What a loader saves, and the check that a saved position belongs to this loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.errors import SpecError
from samestep.sharding._blocks import whole

__all__ = ["FORMAT_VERSION", "check", "describe_dataset"]

FORMAT_VERSION = 1


def describe_dataset(dataset: Any, n_samples: int | None) -> dict[str, Any]:
    """Return what tells one dataset from another, as JSON data.

    Args:
        dataset: may have a method `fingerprint()` that returns a string.
        n_samples: its length, or None for a stream.

    Raises:
        SpecError: when `fingerprint()` returns something else.
    """
    fingerprint = getattr(dataset, "fingerprint", None)
    value = fingerprint() if callable(fingerprint) else None
    if value is not None and not isinstance(value, str):
        raise SpecError(
            f"`dataset`: expected fingerprint() to return a string, got {type(value).__name__}. Return a digest.",
            name="dataset",
        )
    return {"class_name": type(dataset).__qualname__, "n_samples": n_samples, "fingerprint": value}


def check(state: Mapping[str, Any], settings: Mapping[str, Any], allow: Sequence[str]) -> tuple[int, int]:
    """Return (epoch, samples consumed) of a saved state that fits these settings.

    Args:
        state: as saved; may hold more.
        settings: what this loader was made with.
        allow: names of settings that may differ.

    Raises:
        SpecError: when the state is not one of ours, or a setting differs; says both values.
    """
    if unknown := sorted(set(allow) - set(settings)):
        raise SpecError(f"`allow`: expected names of {sorted(settings)}, got {unknown}.", name="allow")
    if not isinstance(state, Mapping):
        raise SpecError(
            f"`state`: expected a loader's state, got {type(state).__name__}. Pass what state_dict gave.",
            name="state",
        )
    missing = sorted({"format_version", "epoch", "samples_consumed", *settings} - set(state))
    if missing:
        raise SpecError(
            f"`state`: expected a loader's state, {missing} missing. Pass what state_dict gave.", name="state"
        )
    if state["format_version"] != FORMAT_VERSION:
        raise SpecError(
            f"`state`: expected format_version {FORMAT_VERSION}, got {state['format_version']!r}. "
            "Load it with the version of samestep that saved it.",
            name="format_version",
        )
    differences = []
    for name, mine in settings.items():
        if name not in allow:
            differences += _differences(name, mine, state[name])
    if differences:
        raise SpecError(
            f"`state`: saved by another loader: {'; '.join(text for _, text in differences)}. "
            "Make the loader as it was, or name in `allow` what may differ.",
            name=differences[0][0],
        )
    return whole("epoch", state["epoch"], 0), whole("samples_consumed", state["samples_consumed"], 0)


def _differences(name: str, mine: Any, saved: Any) -> list[tuple[str, str]]:
    if isinstance(mine, Mapping) and isinstance(saved, Mapping):
        keys = sorted({*mine, *saved})
        return [
            found for key in keys for found in _differences(f"{name}.{key}", mine.get(key), saved.get(key))
        ]
    if type(mine) is type(saved) and mine == saved:
        return []
    return [(name, f"{name} is {mine!r} here and {saved!r} in the state")]
