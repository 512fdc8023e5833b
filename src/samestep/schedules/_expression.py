"""Reads a schedule from text such as ``multistep([30, 60, 80], 0.1) * linear_warmup(5, 0.1)``.

The text is parsed as a Python expression and walked; nothing in it is ever run by Python. What a schedule prints
as is read back as an equal schedule.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from samestep.errors import SpecError
from samestep.schedules._base import Schedule
from samestep.schedules._cycles import one_cycle, trapezoid, warm_restarts
from samestep.schedules._decays import cosine, exponential, inverse_sqrt, linear, polynomial
from samestep.schedules._joined import constant, maximum, minimum
from samestep.schedules._steps import absolute, multistep, piecewise, step
from samestep.schedules._warmup import constant_warmup, exponential_warmup, gradual_warmup, linear_warmup
from samestep.schedules._with_warmup import with_warmup

__all__ = ["parse"]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        absolute,
        constant,
        constant_warmup,
        cosine,
        exponential,
        exponential_warmup,
        gradual_warmup,
        inverse_sqrt,
        linear,
        linear_warmup,
        maximum,
        minimum,
        multistep,
        one_cycle,
        piecewise,
        polynomial,
        step,
        trapezoid,
        warm_restarts,
        with_warmup,
    )
}
_LONGEST = 20_000  # characters; python's parser itself can be brought down by endless nesting


def parse(text: str) -> Schedule:
    """Return the schedule that an expression stands for.

    Known are the functions of this package by their names, ``*``, ``.then(other, at=n)``, numbers and quotients of
    numbers, strings, and lists of them.

    Args:
        text: the expression.

    Raises:
        SpecError: no expression, or it holds anything else, or a function refuses its arguments; the message says
            where.

    Example:
        >>> from samestep import schedules
        >>> schedule = schedules.parse("multistep([30,60,80],0.1)*linear_warmup(500, 1/4)")
        >>> schedule
        multistep([30, 60, 80], 0.1) * linear_warmup(500, 0.25)
        >>> schedules.parse(repr(schedule)) == schedule
        True
    """
    if not isinstance(text, str) or len(text) > _LONGEST:
        got = f"{len(text)} characters" if isinstance(text, str) else repr(text)
        raise SpecError(f"`text`: expected at most {_LONGEST} characters, got {got}.", name="text")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError as error:
        raise SpecError(
            f"`text`: expected one expression, got {text!r}: {error.msg} at character {error.offset}.",
            name="text",
        ) from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise SpecError(f"`text`: expected an expression that can be read: {reason}.", name="text") from None
    if isinstance(value, bool) or not isinstance(value, (Schedule, int, float)):
        raise SpecError(f"`text`: expected a schedule, got {value!r}.", name="text")
    return value if isinstance(value, Schedule) else _call(constant, [value], {}, ast.Constant(value), text)


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, text) for item in items]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _operate(node, _value(left, text), _value(right, text), text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            if name not in _FUNCTIONS:
                raise _refusal(
                    node, text, f"no schedule is called {name!r}; there are {', '.join(_FUNCTIONS)}"
                )
            return _call(_FUNCTIONS[name], *_arguments(args, keywords, text), node, text)
        case ast.Call(func=ast.Attribute(value=first, attr="then"), args=args, keywords=keywords):
            schedule = _value(first, text)
            if not isinstance(schedule, Schedule):
                raise _refusal(node, text, f"only a schedule has .then, not {schedule!r}")
            return _call(schedule.then, *_arguments(args, keywords, text), node, text)
    raise _refusal(
        node, text, f"{ast.unparse(node)!r} is not a schedule, a number, a list, or one of * / .then()"
    )


def _arguments(
    args: list[ast.expr], keywords: list[ast.keyword], text: str
) -> tuple[list[Any], dict[str, Any]]:
    named: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None:
            raise _refusal(keyword.value, text, "** is not known here")
        named[keyword.arg] = _value(keyword.value, text)
    return [_value(arg, text) for arg in args], named


def _call(
    function: Callable[..., Any], args: list[Any], named: dict[str, Any], node: ast.expr, text: str
) -> Any:
    try:
        return function(*args, **named)
    except SpecError:
        raise
    except (TypeError, ValueError) as error:
        raise _refusal(node, text, str(error)) from error


def _operate(node: ast.BinOp, left: Any, right: Any, text: str) -> Any:
    numbers = all(isinstance(side, (int, float)) and not isinstance(side, bool) for side in (left, right))
    schedules = all(isinstance(side, (Schedule, int, float)) for side in (left, right))
    if (isinstance(node.op, ast.Mult) and schedules) or (numbers and right != 0):
        try:
            return left * right if isinstance(node.op, ast.Mult) else left / right
        except (ValueError, OverflowError) as error:
            raise _refusal(node, text, str(error)) from error
    raise _refusal(node, text, f"{left!r} and {right!r} cannot be multiplied or divided")


def _refusal(node: ast.expr, text: str, reason: str) -> SpecError:
    place = getattr(node, "col_offset", 0) + 1
    return SpecError(f"`text`: at character {place} of {text!r}: {reason}.", name="text")
