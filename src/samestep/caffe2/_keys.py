"""The SOLVER keys of each family of trainers, with the values that its own code takes for a key left out.

A file is merged over these the way the originals do it: a key that a family does not know is an error, and a
string that spells a number, a list or a truth value is read as one ("1e-4", "(0, 60000)").
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from samestep.errors import SpecError

__all__ = ["Family", "detect", "number_of", "solver"]

Family = Literal["detectron", "vrd", "self_supervision", "nonlocal"]

_DEFAULTS: dict[Family, dict[str, Any]] = {
    "detectron": {
        "BASE_LR": 0.001,
        "LR_POLICY": "step",
        "GAMMA": 0.1,
        "STEP_SIZE": 30000,
        "STEPS": [],
        "LRS": [],
        "MAX_ITER": 40000,
        "MOMENTUM": 0.9,
        "WEIGHT_DECAY": 0.0005,
        "WEIGHT_DECAY_GN": 0.0,
        "WARM_UP_ITERS": 500,
        "WARM_UP_FACTOR": 1.0 / 3.0,
        "WARM_UP_METHOD": "linear",
        "SCALE_MOMENTUM": True,
        "SCALE_MOMENTUM_THRESHOLD": 1.1,
        "LOG_LR_CHANGE_THRESHOLD": 1.1,
    },
    "vrd": {
        "NESTEROV": True,
        "BASE_LR": 0.1,
        "LR_FACTOR": 1.0,
        "STEP_SIZES": [150150, 150150, 150150],
        "NUM_ITERATIONS": 600600,
        "WEIGHT_DECAY": 0.0001,
        "WEIGHT_DECAY_BN": 0.0001,
        "MOMENTUM": 0.9,
        "LR_POLICY": "step",
        "LR_TYPE": "variable",
        "WARM_UP_ITERS": -1,
        "WARM_UP_LR": 1.0,
        "GRADUAL_INCREASE_LR": False,
        "GRADUAL_LR_STEP": 0.005,
        "GRADUAL_LR_START": 0.1,
        "SCALE_MOMENTUM": False,
        "GAMMA": 0.1,
        "WARM_UP_TYPE": "NA",
    },
    "self_supervision": {
        "NESTEROV": True,
        "BASE_LR": 0.1,
        "SCALE_MOMENTUM": False,
        "GAMMA": 0.1,
        "STEP_SIZES": [150150, 150150, 150150],
        "NUM_ITERATIONS": 450450,
        "WEIGHT_DECAY": 0.0001,
        "WEIGHT_DECAY_BN": 0.0001,
        "MOMENTUM": 0.9,
    },
    "nonlocal": {
        "NESTEROV": True,
        "WEIGHT_DECAY": 0.0001,
        "WEIGHT_DECAY_BN": 0.0001,
        "MOMENTUM": 0.9,
        "LR_POLICY": "steps_with_relative_lrs",
        "BASE_LR": 0.1,
        "STEP_SIZES": [150150, 150150, 150150],
        "LRS": [1.0, 0.1, 0.01],
        "MAX_ITER": 500500,
        "STEPS": [],
        "GAMMA": 0.1,
        "SCALE_MOMENTUM": False,
        "WARMUP.WARMUP_ON": False,
        "WARMUP.WARMUP_START_LR": 0.1,
        "WARMUP.WARMUP_END_ITER": 25025,
    },
}

# What tells the families apart, as dotted keys of the whole file.
_MARKS: dict[Family, str] = {
    "detectron": "SOLVER.STEP_SIZE SOLVER.STEPS SOLVER.WARM_UP_FACTOR SOLVER.WARM_UP_METHOD SOLVER.WEIGHT_DECAY_GN "
    "SOLVER.SCALE_MOMENTUM_THRESHOLD SOLVER.LOG_LR_CHANGE_THRESHOLD FPN FAST_RCNN MRCNN RETINANET TRAIN.DATASETS "
    "TRAIN.IMS_PER_BATCH MODEL.CONV_BODY",
    "vrd": "SOLVER.WARM_UP_LR SOLVER.GRADUAL_INCREASE_LR SOLVER.GRADUAL_LR_STEP SOLVER.GRADUAL_LR_START "
    "SOLVER.LR_FACTOR SOLVER.LR_TYPE SOLVER.WARM_UP_TYPE VISUAL_EMBEDDING TEXT_EMBEDDING OUTPUT_EMBEDDING_DIM "
    "INPUT_LANG_EMBEDDING_DIM",
    "self_supervision": "LOSS_BLOBS ACCURACY_BLOBS COLORIZATION MODEL.FINE_TUNE MODEL.BN_NO_SCALE_SHIFT "
    "MODEL.NO_BIAS_DECAY METRICS.TYPE TRAIN.DATA_TRANSFORMS TRAIN.DATA_PROCESSING",
    "nonlocal": "NONLOCAL SOLVER.WARMUP MODEL.VIDEO_ARC_CHOICE TRAIN.VIDEO_LENGTH TRAIN.SAMPLE_RATE FILENAME_GT",
}


def detect(config: Mapping[str, Any]) -> Family:
    """Return the family whose keys the file uses.

    Raises:
        SpecError: when no family, or more than one, fits.
    """
    solver_keys = set(_section(config, "SOLVER"))
    length = {"MAX_ITER", "NUM_ITERATIONS"} & solver_keys
    scores: dict[Family, int] = {}
    for family in get_args(Family):
        known = {key.split(".")[0] for key in _DEFAULTS[family]}
        if length <= known:
            marks = sum(_has(config, mark) for mark in _MARKS[family].split())
            scores[family] = 2 * marks - len(solver_keys - known)
    best = max(scores.values(), default=0)
    winners = [family for family, score in scores.items() if score == best]
    if len(winners) != 1:
        raise SpecError(
            f"`family`: expected keys of one family of trainers, got a file that fits {winners or 'none'}. Give "
            f"family= as one of {', '.join(get_args(Family))}.",
            name="family",
        )
    return winners[0]


def solver(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the SOLVER values of a file, with the family's own for those left out, and the keys that it gives.

    Raises:
        SpecError: with the name of a key that is unknown or of the wrong type.
    """
    given: dict[str, Any] = {}
    for key, value in _section(config, "SOLVER").items():
        if isinstance(value, Mapping):
            given.update({f"{key}.{inner}": nested for inner, nested in value.items()})
        else:
            given[str(key)] = value
    defaults = _DEFAULTS[family]
    for key in given:
        if key not in defaults:
            raise SpecError(
                f"`SOLVER.{key}`: expected a key that {family} knows ({', '.join(sorted(defaults))}), got {key!r}. "
                "Correct the key or the family.",
                name=key,
            )
    read = {key: _typed(key, value, defaults[key]) for key, value in given.items()}
    return {**defaults, **read}, frozenset(given)


def number_of(config: Mapping[str, Any], path: str, default: int) -> int:
    """Return the positive integer at a dotted path of the file, or the family's default.

    Raises:
        SpecError: when the value is no integer of at least 1.
    """
    section, _, key = path.rpartition(".")
    values = _section(config, section) if section else config
    value = _typed(path, values.get(key, default), 1)
    if value < 1:
        raise SpecError(f"`{path}`: expected an integer >= 1, got {value!r}.", name=key)
    return int(value)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise SpecError(f"`{name}`: expected a mapping, got {type(section).__name__}.", name=name)
    return section


def _has(config: Mapping[str, Any], path: str) -> bool:
    section, _, key = path.rpartition(".")
    return key in (_section(config, section) if section else config)


def _typed(key: str, value: Any, like: Any) -> Any:
    """Return a value in the type of the default, as the originals coerce it."""
    if isinstance(value, str) and not isinstance(like, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise SpecError(f"`{key}`: expected {_word(like)}, got {value!r}.", name=key) from None
    if isinstance(like, list):
        items = value if isinstance(value, list | tuple) else [None]
        if all(_is_number(item) for item in items):
            return list(items)
    elif isinstance(like, bool | str):
        if isinstance(value, type(like)):
            return value
    elif _is_number(value) and (isinstance(like, float) or value == int(value)):
        return type(like)(value)
    raise SpecError(f"`{key}`: expected {_word(like)}, got {value!r}.", name=key)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _word(like: Any) -> str:
    words = {list: "a list of numbers", bool: "True or False", str: "a word", int: "an integer"}
    return words.get(type(like), "a number")
