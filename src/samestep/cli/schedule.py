"""``samestep schedule``: what LR and momentum factor a recipe or an expression gives at which step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli._recipes import RECIPES, load_settings, lr_key_of, outline_of
from samestep.cli._speak import spoken
from samestep.cli._table import Plan, as_json, as_text, policy_text
from samestep.errors import SpecError

if TYPE_CHECKING:
    from samestep.caffe2 import Recipe
    from samestep.momentum import Policy
    from samestep.schedules import Schedule

__all__ = ["schedule"]

_POLICIES = ("free", "frozen", "threshold", "relative", "every_change")


def schedule(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_EXPRESSION",
            help="A Detectron-family YAML file, a recipe file of ours, a run folder, or an expression.",
        ),
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates to show; the file's own by default.")
    ] = None,
    at: Annotated[list[int] | None, typer.Option(min=0, help="Show this step only; repeatable.")] = None,
    lr: Annotated[
        list[float] | None, typer.Option(help="Base LR; 1 by default; repeat it for several param groups.")
    ] = None,
    momentum: Annotated[
        str | None, typer.Option(help=f"Momentum policy: {', '.join(_POLICIES)}; free by default.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="Trainer of a YAML file: detectron, vrd, self_supervision or nonlocal."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting of a recipe file; repeatable."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, .png or .svg.")] = None,
    as_data: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show LR and momentum factor at the first and last step and around every boundary.

    Example: samestep schedule "multistep([30,60,80],0.1)*linear_warmup(5,0.1)" --lr 0.1 --plot lr.png
    """
    with spoken():
        _check_options(at, plot)
        plan = _plan(what, steps, lr or [], momentum, family, settings or [])
        chosen = sorted(set(at)) if at else plan.interesting_steps()
        if plot is not None:
            from samestep.cli._plot import draw

            draw(plan, plot)
        if as_data:
            print(json.dumps(as_json(plan, chosen), indent=2))
            return
        print(as_text(plan, chosen))
        if plot is not None:
            print(f"\npicture  {plot}")


def _check_options(at: Sequence[int] | None, plot: Path | None) -> None:
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise SpecError(f"--plot: expected a name that ends in .png or .svg, got {plot}.", name="plot")
    for step in at or ():
        if step < 0:
            raise SpecError(f"--at: expected a step of at least 0, got {step}.", name="at")


def _plan(
    what: str,
    steps: int | None,
    lrs: list[float],
    momentum: str | None,
    family: str | None,
    settings: list[str],
) -> Plan:
    path = Path(what)
    policy = None if momentum is None else _policy(momentum)
    for lr in lrs:
        if not 0.0 <= lr < float("inf"):
            raise SpecError(f"--lr: expected a finite number of at least 0, got {lr}.", name="lr")
    if not _is_file(path, what):
        for option, given in (("--family", family), ("--set", settings)):
            if given:
                raise SpecError(f"{option}: expected none with an expression. Leave it out.", name=option[2:])
        return _of_expression(what, steps, lrs or [1.0], policy)
    if len(lrs) > 1:
        raise SpecError(
            f"--lr: expected one for a file, whose param groups are its own, got {len(lrs)}.", name="lr"
        )
    if path.is_dir():
        path = path / "config.yaml"
    content = _read(path)
    if family is not None or "SOLVER" in content:
        if settings:
            raise SpecError(
                f"--set: expected none with the recipe {path} of another trainer. Edit a copy of it.",
                name="set",
            )
        return _of_caffe2(path, steps, lrs, policy, family)
    return _of_recipe(path, content, steps, lrs, policy, settings)


def _is_file(path: Path, what: str) -> bool:
    # A name that looks like a file is one, so that a mistyped one is not read as an expression.
    return path.suffix.lower() in (".yaml", ".yml") or ("(" not in what and path.exists())


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}). Check the path.", name="file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: no YAML: {' '.join(str(error).split())}", name="file") from None
    if not isinstance(content, dict):
        raise SpecError(
            f"{path}: expected keys and values, got {type(content).__name__}. Give a recipe file.",
            name="file",
        )
    return content


def _policy(name: str) -> Policy:
    from samestep import momentum

    if name not in _POLICIES:
        raise SpecError(f"--momentum: expected one of {', '.join(_POLICIES)}, got {name!r}.", name="momentum")
    policy: Policy = getattr(momentum, name)()
    return policy


def _of_expression(text: str, steps: int | None, lrs: list[float], policy: Policy | None) -> Plan:
    from samestep import schedules
    from samestep.momentum import free
    from samestep.recipes.outline import stand_in

    try:
        parsed = schedules.parse(text)
    except SpecError as error:
        reason = error.message.removeprefix("`text`: ")
        if "(" not in text:
            reason = f"{text!r} is neither a file nor an expression ({reason})"
        raise SpecError(f"expression: {reason}", name="expression") from None
    n_steps = steps or _natural_length(parsed)
    names = ["lr"] if len(lrs) == 1 else [f"group {index}" for index in range(len(lrs))]
    policy = policy or free()
    facts = (
        ("schedule", parsed.describe()),
        ("length", f"{n_steps:,} updates" + ("" if steps else "; --steps shows more or less")),
        ("base lr", ", ".join(f"{lr:g}" for lr in lrs)),
        ("momentum", policy_text(policy)),
    )
    return Plan(text, "expression", stand_in(parsed, names, lrs, policy), n_steps, True, facts)


def _natural_length(parsed: Schedule) -> int:
    """Return an eighth more than what ends at the last boundary, so that what follows it shows."""
    last = max(parsed.boundaries(), default=0)
    return last + max(2, last // 8) if last else 100


def _of_caffe2(path: Path, steps: int | None, lrs: list[float], policy: Policy | None, family: Any) -> Plan:
    from dataclasses import replace

    from torch import nn

    from samestep.caffe2 import read_recipe

    recipe = read_recipe(path, family)
    recipe = replace(recipe, base_lr=lrs[0] if lrs else recipe.base_lr, momentum=policy or recipe.momentum)
    # One parameter of every kind that the recipe's rules tell apart.
    layers: dict[str, nn.Module] = {"first": nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))}
    second = recipe.second_lr_factor != 1.0
    if second:
        layers["second"] = nn.Linear(1, 1)
    _, scheduler = recipe.build(nn.ModuleDict(layers), second_lr_params=["second.*"] if second else [])
    n_steps = steps or recipe.total_steps
    rules, nesterov = recipe.param_groups, ", Nesterov" if recipe.nesterov else ""
    facts = (
        ("recipe", f"{recipe.family}, {recipe.total_steps:,} updates of {recipe.global_batch_size} images"),
        ("schedule", recipe.schedule.describe()),
        ("base lr", f"{recipe.base_lr:g}" + _other_rates(recipe)),
        ("momentum", policy_text(recipe.momentum)),
        (
            "optimizer",
            f"VelocitySGD, momentum {recipe.sgd_momentum:g}{nesterov}, weight decay {rules.weight_decay:g} "
            f"(biases {rules.bias_weight_decay:g}, norms {rules.norm_weight_decay:g})",
        ),
    )
    return Plan(str(path), recipe.family, scheduler, n_steps, True, facts, recipe.global_batch_size)


def _other_rates(recipe: Recipe) -> str:
    rules = recipe.param_groups
    factors = (
        ("biases", rules.bias_lr_factor),
        ("norms", rules.norm_lr_factor),
        ("second rate", recipe.second_lr_factor),
    )
    said = [f"{name} x {factor:g}" for name, factor in factors if factor != 1.0]
    return f"; {', '.join(said)}" if said else ""


def _of_recipe(
    path: Path,
    content: dict[str, Any],
    steps: int | None,
    lrs: list[float],
    policy: Policy | None,
    settings: list[str],
) -> Plan:
    name = content.get("recipe")
    if name not in RECIPES:
        raise SpecError(
            f"{path}: expected a SOLVER section (a Detectron-family recipe) or `recipe:` as one of "
            f"{', '.join(RECIPES)}, got {f'recipe: {name}' if name else 'neither'}.",
            name="recipe",
        )
    key = lr_key_of(name)
    spec: Any = load_settings(name, path, [*settings, *(f"{key}={lr!r}" for lr in lrs)], None, False)
    try:
        outline = outline_of(name)(spec, policy)
    except SpecError as error:
        raise SpecError(f"{path}: {error.message}", name=error.name) from None
    # Most optimizers keep no LR in their history, so nothing is rescaled, unless one asks what would be.
    momentum = "no LR in the history: nothing to rescale"
    if outline.policy is not None:
        momentum = policy_text(outline.policy)
    facts = (
        ("recipe", f"{name}, {outline.steps:,} updates of {spec.global_batch_size:,} samples"),
        ("schedule", outline.scheduler.schedule.describe()),
        ("base lr", f"{outline.base_lr:g}"),
        ("optimizer", f"{outline.optimizer}; {momentum}"),
    )
    n_steps = steps or max(1, outline.steps)
    has_momentum = outline.policy is not None
    return Plan(str(path), name, outline.scheduler, n_steps, has_momentum, facts, spec.global_batch_size)
