"""A recipe of the Caffe2 era as an object: read from its file, and built for a torch model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from samestep import momentum as momentum_policies
from samestep import scaling
from samestep.caffe2._keys import Family, detect, number_of, solver
from samestep.caffe2._rates import RATES
from samestep.caffe2._schedule import base_lr, check, schedule
from samestep.errors import SpecError
from samestep.momentum import Policy, VelocitySGD
from samestep.schedules import Schedule

if TYPE_CHECKING:
    from torch import nn

    from samestep.scheduler import LRScheduler

__all__ = ["FAITHFUL", "GroupRules", "Recipe", "read_recipe"]

FAITHFUL: dict[str, tuple[Family, str]] = {
    "vrd_plain_momentum": ("vrd", "NESTEROV is never passed to the update: plain momentum was run"),
    "vrd_norm_decay_ignored": ("vrd", "WEIGHT_DECAY_BN is never read: norms decay like weights"),
    "vrd_momentum_per_device": (
        "vrd",
        "each device scales the history of all: the factor to the power NUM_DEVICES",
    ),
    "self_supervision_no_weight_decay": ("self_supervision", "NO_BIAS_DECAY also drops the decay of weights"),
}
"""Defects of the originals that change what is trained: name -> (family, what it does)."""


@dataclass(frozen=True)
class GroupRules:
    """How rates and decays differ by kind of parameter; the arguments of `scaling.param_groups`."""

    weight_decay: float
    bias_lr_factor: float = 1.0
    bias_weight_decay: float = 0.0
    norm_lr_factor: float = 1.0
    norm_weight_decay: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """The SOLVER part of a Caffe2-era configuration, in samestep's words.

    `family` is the kind of trainer; `base_lr` the rate at factor 1; `schedule` the factor by 0-based step, warm-up
    included; `momentum` the policy for the momentum history; `param_groups` the rules by kind of parameter;
    `total_steps` and `global_batch_size` the length in updates and the images per update; `sgd_momentum` and
    `nesterov` the settings of SGD; `second_lr_factor` VRD's LR_FACTOR, for parameters named in `build`; `faithful`
    the defects that were asked for.
    """

    family: Family
    base_lr: float
    schedule: Schedule
    momentum: Policy
    param_groups: GroupRules
    total_steps: int
    global_batch_size: int
    sgd_momentum: float
    nesterov: bool
    second_lr_factor: float = 1.0
    faithful: tuple[str, ...] = ()
    solver: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def lr(self, step: int) -> float:
        """Return the rate that the original used at this update, as the float32 number that it fed to its net.

        It is computed in the original's own order of operations, and equals ``base_lr * schedule(step)`` up to the
        rounding to float32. Past the end of the run, the last rate stays (a cosine climbs again, as there).

        Args:
            step: updates applied before, from 0.

        Raises:
            ValueError: when the step is negative or no integer.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"`step`: expected an integer >= 0, got {step!r}.")
        return RATES[self.family](self.solver, step)

    def build(
        self, model: nn.Module, *, second_lr_params: Sequence[str] = ()
    ) -> tuple[VelocitySGD, LRScheduler]:
        """Return the optimizer in velocity form, as the original's, and the scheduler that drives it.

        Args:
            model: its trainable parameters are grouped by `param_groups`.
            second_lr_params: name patterns, such as "head.*", of the parameters on the second rate, which is
                `second_lr_factor` times the first. The released VRD trainer computes that rate and uses it nowhere.

        Raises:
            ValueError: when a pattern matches no parameter or nothing is trainable.
        """
        from samestep.scheduler import LRScheduler

        groups = scaling.param_groups(
            model,
            self.base_lr,
            lr_factors=dict.fromkeys(second_lr_params, self.second_lr_factor),
            **asdict(self.param_groups),
        )
        # With a momentum of 0 Nesterov's step is the plain one, and the optimizer refuses to be told otherwise.
        nesterov = self.nesterov and self.sgd_momentum > 0.0
        optimizer = VelocitySGD(groups, lr=self.base_lr, momentum=self.sgd_momentum, nesterov=nesterov)
        return optimizer, LRScheduler(optimizer, self.schedule, momentum=self.momentum)


def read_recipe(path: str | Path, family: Family | None = None, faithful: Sequence[str] = ()) -> Recipe:
    """Read the SOLVER part of a YAML file of Detectron, Large-Scale-VRD, self-supervision or video-nonlocal-net.

    Keys left out take the value that the original takes. Each family keeps its conventions: Detectron and nonlocal
    count iterations from 0 and the others from 1, warm-ups multiply, replace or hide the schedule, Detectron and
    VRD double the rate of biases and do not decay them. Known defects are not repeated unless named.

    Args:
        path: the file.
        family: "detectron", "vrd", "self_supervision" or "nonlocal"; None detects it from the keys.
        faithful: names of defects to repeat, from `caffe2.FAITHFUL`.

    Raises:
        SpecError: when the file cannot be read, the family cannot be told, a key is unknown, of a wrong type or
            contradicts another (`name` is that key), or a defect is unknown or of another family.
    """
    config = _load(Path(path))
    if family is None:
        family = detect(config)
    elif family not in get_args(Family):
        raise SpecError(
            f"`family`: expected one of {', '.join(get_args(Family))}, got {family!r}.", name="family"
        )
    _check_faithful(family, faithful)
    values, given = solver(config, family)
    check(values, given, family)
    return Recipe(
        family=family,
        base_lr=base_lr(values),
        schedule=_schedule(values, family),
        momentum=_policy(values, config, family, faithful),
        param_groups=_rules(values, config, family, faithful),
        total_steps=values["MAX_ITER"] if "MAX_ITER" in values else values["NUM_ITERATIONS"],
        global_batch_size=_batch(config, family),
        sgd_momentum=values["MOMENTUM"],
        nesterov=values.get("NESTEROV", False) and "vrd_plain_momentum" not in faithful,
        second_lr_factor=values.get("LR_FACTOR", 1.0),
        faithful=tuple(faithful),
        solver=values,
    )


def _load(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"`{path}`: expected a YAML file, got: {error}.", name=str(path)) from error
    if not isinstance(config, Mapping) or not isinstance(config.get("SOLVER"), Mapping):
        raise SpecError(f"`{path}`: expected a mapping with a SOLVER section, got none.", name="SOLVER")
    return config


def _schedule(values: Mapping[str, Any], family: Family) -> Schedule:
    try:
        return schedule(values, family)
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(
            f"`SOLVER`: expected values that make a schedule, got: {error}", name="SOLVER"
        ) from error


def _policy(
    values: Mapping[str, Any], config: Mapping[str, Any], family: Family, faithful: Sequence[str]
) -> Policy:
    if not values["SCALE_MOMENTUM"]:
        return momentum_policies.frozen()
    if family == "nonlocal":
        return momentum_policies.relative(1e-7)
    if family == "detectron":
        limit = values["SCALE_MOMENTUM_THRESHOLD"]
        if limit < 1.0:
            raise SpecError(
                f"`SOLVER.SCALE_MOMENTUM_THRESHOLD`: expected a number >= 1, got {limit!r}.",
                name="SCALE_MOMENTUM_THRESHOLD",
            )
        return momentum_policies.threshold(limit, 1e-7)
    if "vrd_momentum_per_device" in faithful:
        return momentum_policies.every_change(number_of(config, "NUM_DEVICES", 8))
    return momentum_policies.every_change()


def _rules(
    values: Mapping[str, Any], config: Mapping[str, Any], family: Family, faithful: Sequence[str]
) -> GroupRules:
    decay: float = values["WEIGHT_DECAY"]
    if family == "detectron":
        return GroupRules(decay, bias_lr_factor=2.0, norm_weight_decay=values["WEIGHT_DECAY_GN"])
    norm_decay: float = values["WEIGHT_DECAY_BN"]
    if family == "vrd":
        ignored = "vrd_norm_decay_ignored" in faithful
        return GroupRules(decay, bias_lr_factor=2.0, norm_weight_decay=decay if ignored else norm_decay)
    if family == "nonlocal":
        return GroupRules(decay, bias_weight_decay=decay, norm_weight_decay=norm_decay)
    norm_lr_factor = 0.0 if _switch(config, "BN_NO_SCALE_SHIFT") else 1.0
    if not _switch(config, "NO_BIAS_DECAY"):
        return GroupRules(decay, 1.0, decay, norm_lr_factor, norm_decay)
    dropped = "self_supervision_no_weight_decay" in faithful
    return GroupRules(0.0 if dropped else decay, 2.0, 0.0, norm_lr_factor, norm_decay)


def _switch(config: Mapping[str, Any], key: str) -> bool:
    model = config.get("MODEL")
    value = model.get(key, False) if isinstance(model, Mapping) else False
    if not isinstance(value, bool):
        raise SpecError(f"`MODEL.{key}`: expected True or False, got {value!r}.", name=key)
    return value


def _batch(config: Mapping[str, Any], family: Family) -> int:
    if family == "detectron":
        return number_of(config, "TRAIN.IMS_PER_BATCH", 2) * number_of(config, "NUM_GPUS", 1)
    if family == "vrd":
        nodes = number_of(config, "DISTRIBUTED.NUM_NODES", 1)
        return number_of(config, "TRAIN.IMS_PER_BATCH", 1) * number_of(config, "NUM_DEVICES", 8) * nodes
    # These two give the batch of all devices together.
    default = 64 if family == "nonlocal" else 256
    devices = "NUM_GPUS" if family == "nonlocal" else "NUM_DEVICES"
    batch, n_devices = number_of(config, "TRAIN.BATCH_SIZE", default), number_of(config, devices, 8)
    if batch % n_devices:
        raise SpecError(
            f"`TRAIN.BATCH_SIZE`: expected a multiple of {devices} {n_devices}, got {batch}.",
            name="BATCH_SIZE",
        )
    return batch


def _check_faithful(family: Family, faithful: Sequence[str]) -> None:
    if isinstance(faithful, str):
        raise SpecError(f"`faithful`: expected a list of names, got the text {faithful!r}.", name="faithful")
    known = sorted(name for name, (owner, _) in FAITHFUL.items() if owner == family)
    for name in faithful:
        if name not in known:
            raise SpecError(
                f"`faithful`: expected defects of {family} ({', '.join(known) or 'none known'}), got {name!r}.",
                name="faithful",
            )
