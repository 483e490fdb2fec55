"""The derivative of a score_mod with respect to the score, as one more Modifier.

Forward mode on the recorded steps: beside each float goes its derivative, or nothing where the
score takes no part in it. A branch that where() does not take adds nothing, even if it is infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .modifier import Modifier
from .trace import Traced, apply, recorded


@lru_cache(maxsize=256)
def derivative(modifier: Modifier) -> Modifier:
    """Return d score_mod / d score of the same inputs.

    At a kink, abs() has slope 0 and minimum() and maximum() that of their second operand; floor(),
    comparisons and conversions have none.
    """

    def slope(recorder: Any) -> Any:
        values: list[Traced] = []
        slopes: list[Any] = []  # a Traced, or None for 0
        for step in modifier.steps:
            values.append(recorder.replay(step, values))
            slopes.append(_slope_of(step, values, slopes))
        return 0.0 if slopes[-1] is None else slopes[-1]

    return recorded(modifier.argument, modifier.aux, slope)


def is_one(modifier: Modifier) -> bool:
    """Whether a derivative is 1 everywhere, as for all that only adds to the score."""
    return modifier.steps == (("const", "float", "1.0"),)


def _slope_of(step: tuple, values: list[Traced], slopes: list[Any]) -> Any:
    """Return the derivative of the last of `values`, which `step` makes of those before."""
    operation, kind, *operands = step
    if operation == "score":
        return 1.0
    if operation not in SLOPES or kind != "float":
        return None
    given = [(values[n], slopes[n]) for n in operands]
    if all(slope is None for _, slope in given):
        return None
    return SLOPES[operation](values[-1], *(part for pair in given for part in pair))


def _sum(x: Any, y: Any) -> Any:
    if x is None or y is None:
        return y if x is None else x
    return x + y


def _scaled(slope: Any, factor: Any) -> Any:
    """Return slope * factor, shorter where the slope is none or 1."""
    if slope is None:
        return None
    return factor if isinstance(slope, float) and slope == 1 else slope * factor


def _negative(slope: Any) -> Any:
    return None if slope is None else -slope


def _chosen(truth: Any, x: Any, y: Any) -> Any:
    """Return where(truth, x, y) of two slopes."""
    if isinstance(x, float) and isinstance(y, float) and x == y:
        return x
    return apply("where", truth, 0.0 if x is None else x, 0.0 if y is None else y)


# (value, x, slope of x, y, slope of y) -> slope of value
SLOPES: dict[str, Callable[..., Any]] = {
    "abs": lambda value, x, dx: _scaled(dx, _chosen(x < 0, -1.0, _chosen(x > 0, 1.0, None))),
    "add": lambda value, x, dx, y, dy: _sum(dx, dy),
    "div": lambda value, x, dx, y, dy: _sum(
        None if dx is None else dx / y, _scaled(_negative(dy), value / y)
    ),
    "exp": lambda value, x, dx: _scaled(dx, value),
    "log": lambda value, x, dx: dx / x,
    "maximum": lambda value, x, dx, y, dy: _chosen(x > y, dx, dy),
    "minimum": lambda value, x, dx, y, dy: _chosen(x < y, dx, dy),
    "mul": lambda value, x, dx, y, dy: _sum(_scaled(dx, y), _scaled(dy, x)),
    "neg": lambda value, x, dx: -dx,
    "sqrt": lambda value, x, dx: dx / (value + value),
    "sub": lambda value, x, dx, y, dy: _sum(dx, _negative(dy)),
    "tanh": lambda value, x, dx: _scaled(dx, 1.0 - value * value),
    "where": lambda value, truth, _, x, dx, y, dy: _chosen(truth, dx, dy),
}
