"""A Modifier as a function of scalars, for one thread: what CUDA kernels call for each score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ..modifier import Modifier

INPUTS = {
    "score_mod": "score, b, h, i, j, aux",
    "score_mod_grad": "score, b, h, i, j, aux",
    "mask_mod": "b, h, i, j, aux",
}
# Python for each operation on its operands x, y and z. Both sides of a conditional expression
# are of one kind, so it is a select. NaN < y is false and NaN differs from itself.
EXPRESSIONS = {
    "abs": "abs({x})",
    "add": "{x} + {y}",
    "and": "{x} & {y}",
    "div": "{x} / {y}",
    "eq": "{x} == {y}",
    "exp": "exp({x})",
    "floor": "floor({x})",
    "floordiv": "({x} // {y} if {y} != 0 else zero)",
    "ge": "{x} >= {y}",
    "gt": "{x} > {y}",
    "invert": "~{x}",
    "le": "{x} <= {y}",
    "log": "log({x})",
    "logical_not": "not {x}",
    "lt": "{x} < {y}",
    "maximum": "({x} if {x} > {y} or {x} != {x} else {y})",
    "minimum": "({x} if {x} < {y} or {x} != {x} else {y})",
    "mod": "({x} % {y} if {y} != 0 else zero)",
    "mul": "{x} * {y}",
    "ne": "{x} != {y}",
    "neg": "-{x}",
    "or": "{x} | {y}",
    "sqrt": "sqrt({x})",
    "sub": "{x} - {y}",
    "tanh": "tanh({x})",
    "where": "({y} if {x} else {z})",
    "xor": "{x} ^ {y}",
}
TRUTH = {"and": "{x} and {y}", "or": "{x} or {y}", "xor": "{x} != {y}", "invert": "not {x}"}


def scalar_function(modifier: Modifier, dtype: str, words: Any) -> Callable:
    """A function for words.device(): score_mod(score, b, h, i, j, aux) -> score of `dtype`, or
    mask_mod(b, h, i, j, aux) -> bool.

    b, h, i, j   int64
    aux          int64: address of job.aux_table() in the memory of the device
    """
    known: dict[str, Any] = {"real": np.dtype(dtype).type, "zero": np.int64(0)}
    known |= vars(words.functions(dtype))
    lines = [f"def {modifier.argument}({INPUTS[modifier.argument]}):"]
    for number, step in enumerate(modifier.steps):
        lines.append(f"    v{number} = {_expression(modifier, number, step, dtype, words, known)}")
    lines.append(f"    return v{len(modifier.steps) - 1}")
    exec("\n".join(lines), known)
    return known[modifier.argument]


def device_function(modifier: Modifier, dtype: str, words: Any) -> Callable:
    """The same, as kernels call it."""
    is_mask = modifier.argument == "mask_mod"
    result = types.boolean if is_mask else getattr(types, dtype)
    return words.device(result)(scalar_function(modifier, dtype, words))


def _expression(
    modifier: Modifier, number: int, step: tuple, dtype: str, words: Any, known: dict[str, Any]
) -> str:
    """Python for one step; what it needs besides earlier values is put into `known`."""
    operation, kind, *operands = step
    if operation in ("score", "b", "h", "i", "j"):
        return operation
    if operation == "const":
        known[f"c{number}"] = _constant(kind, operands[0], dtype)
        return f"c{number}"
    if operation == "aux":
        slot, *indices = operands
        known[f"load{number}"] = _element(modifier, slot, dtype, words)
        arguments = "".join(f", v{n}" for n in indices)
        return f"load{number}(aux{arguments})"
    kinds = [modifier.steps[n][1] for n in operands]
    if operation == "convert":
        known["int64"] = np.int64
        expression = {"bool": "{x} != zero", "int": "int64({x})", "float": "real({x})"}[kind]
    elif kinds[0] == "bool" and operation in TRUTH:
        expression = TRUTH[operation]
    else:
        expression = EXPRESSIONS[operation]
    return expression.format(**dict(zip("xyz", (f"v{n}" for n in operands), strict=False)))


def _constant(kind: str, text: str, dtype: str) -> Any:
    if kind == "bool":
        return text == "True"
    if kind == "int":
        return np.int64(text)
    number, limit = float(text), float(np.finfo(dtype).max)
    finite = abs(number) < float("inf")
    return np.dtype(dtype).type(min(max(number, -limit), limit) if finite else number)


def _element(modifier: Modifier, slot: int, dtype: str, words: Any) -> Callable:
    """A device function (aux, *indices): the element of aux[slot] nearest to the indices."""
    stored, rank = modifier.aux[slot]
    start = sum(1 + 2 * r for _, r in modifier.aux[:slot])
    kind = {"b": "bool", "i": "int", "f": "float"}[stored[0]]
    known: dict[str, Any] = {"field": words.load("int64"), "load": words.load(stored)}
    known["real"] = np.dtype(dtype).type
    indices = [f"n{axis}" for axis in range(rank)]
    lines = [f"def element({', '.join(['aux', *indices])}):", "    place = 0"]
    for axis, index in enumerate(indices):
        size, stride = (f"field(aux, {start + 1 + axis + more})" for more in (0, rank))
        lines.append(f"    place += min(max({index}, 0), {size} - 1) * {stride}")
    lines.append(f"    value = load(field(aux, {start}), place)")
    if (stored, dtype) == ("float64", "float32"):
        # What is finite stays so.
        known |= {"inf": np.inf, "limit": float(np.finfo(dtype).max)}
        lines.append("    if abs(value) != inf:")
        lines.append("        value = -limit if value < -limit else value")
        lines.append("        value = limit if value > limit else value")
    lines.append("    return real(value)" if kind == "float" else "    return value")
    exec("\n".join(lines), known)
    result = {"bool": types.boolean, "int": types.int64, "float": getattr(types, dtype)}[kind]
    return words.device(result)(known["element"])
