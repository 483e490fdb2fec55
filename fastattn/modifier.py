"""What a score_mod or mask_mod does, as data; NumPy runs it step by step on arrays.

The record (a Modifier) is what every backend runs. It is hashable and says nothing of where the
function came from, so the same closure made anew in every call is still one kernel.

Kinds of values: "bool", "int" (int64 in NumPy; see cpu/modifiers.py for registers) and "float" (the
dtype that the scores are computed in).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kinds import array_view, is_device_view, is_on_device

NUMPY: dict[str, Callable] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": np.true_divide,
    "eq": np.equal,
    "exp": np.exp,
    "floor": np.floor,
    "floordiv": np.floor_divide,
    "ge": np.greater_equal,
    "gt": np.greater,
    "invert": np.invert,
    "le": np.less_equal,
    "log": np.log,
    "logical_not": np.logical_not,
    "lt": np.less,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "mod": np.remainder,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "or": np.bitwise_or,
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tanh": np.tanh,
    "where": np.where,
    "xor": np.bitwise_xor,
}
AUX_DTYPES = ("bool", "int32", "int64", "float32", "float64")
AUX_NAMES = {np.dtype(name): name for name in AUX_DTYPES}  # dtype.name itself costs a microsecond
# Other types of an aux array, and what they are converted to.
AUX_CONVERSIONS = {
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "float16": "float32",
    "bfloat16": "float32",
}

AuxTypes = tuple[tuple[str, int], ...]  # (dtype, rank) of each aux array


@dataclass(frozen=True, slots=True)
class Modifier:
    """What a score_mod or mask_mod does. Its repr is stable, so it may be part of a cache key.

    Each step is (operation, kind of the result, *operands), where operands are the numbers of
    earlier steps; but ("const", kind, text), ("aux", kind, array, *indices) and one step for each
    of the inputs used. The last step is the result.
    """

    argument: str  # "score_mod" or "mask_mod"
    steps: tuple[tuple, ...]
    aux: AuxTypes

    def uses(self, name: str) -> bool:
        """Whether an input ("score", "b", "h", "i" or "j") takes part."""
        return any(step[0] == name for step in self.steps)


def evaluate(
    modifier: Modifier,
    dtype: np.dtype,
    aux: Sequence[np.ndarray],
    b: Any,
    h: Any,
    i: Any,
    j: Any,
    score: Any = None,
) -> Any:
    """Run a modifier on arrays (or scalars) that broadcast; return bool or dtype.

    An aux index outside its array reads the nearest element, as it does in kernels.
    """
    inputs = {"b": b, "h": h, "i": i, "j": j}
    values: list[Any] = []
    with np.errstate(all="ignore"):
        for operation, kind, *operands in modifier.steps:
            if operation == "score":
                value = np.asarray(score, dtype)
            elif operation in inputs:
                value = np.asarray(inputs[operation], np.int64)
            elif operation == "const":
                value = _as_kind(_constant(kind, operands[0]), kind, dtype)
            elif operation == "aux":
                slot, *indices = operands
                value = _as_kind(_element(aux[slot], [values[n] for n in indices]), kind, dtype)
            elif operation == "convert":
                value = _as_kind(values[operands[0]], kind, dtype)
            else:
                value = NUMPY[operation](*(values[n] for n in operands))
            values.append(value)
    return values[-1]


def aux_arrays(aux: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Return the caller's aux as arrays that every backend can read: no copy where none is needed.

    Raises
    ------
    TypeError   not a tuple or list, or an element that is neither an array nor a number
    """
    if not isinstance(aux, (tuple, list)):
        raise TypeError(f"aux must be a tuple of arrays and numbers, got {type(aux).__name__}")
    return tuple(_aux_array(array, slot) for slot, array in enumerate(aux))


def aux_types(arrays: Sequence[np.ndarray]) -> AuxTypes:
    """Return (dtype, rank) of each array of aux_arrays()."""
    return tuple((AUX_NAMES[array.dtype], array.ndim) for array in arrays)


def _aux_array(value: Any, slot: int) -> np.ndarray:
    is_array = hasattr(value, "__array__") or is_on_device(value)
    if not isinstance(value, numbers.Real) and not is_array:
        raise TypeError(f"aux[{slot}] must be an array or a number, got {type(value).__name__}")
    array = array_view(f"aux[{slot}]", value)
    name = AUX_NAMES.get(array.dtype) or AUX_CONVERSIONS.get(array.dtype.name, array.dtype.name)
    if name not in AUX_DTYPES:
        raise TypeError(
            f"aux[{slot}] must be bool, an integer of at most 64 bits (signed) or a float of at "
            f"most 64 bits, got {array.dtype}"
        )
    if is_device_view(array):
        if AUX_NAMES.get(array.dtype) != name or not array.size:
            rule = f"aux[{slot}] of a GPU must be of {', '.join(AUX_DTYPES)}, and not empty"
            raise TypeError(f"{rule}, got {array.dtype} of shape {array.shape}")
        return array
    if array.size == 0:
        # There is no nearest element: it reads as 0. Only a call without keys or rows has a use
        # for it.
        return np.zeros((1,) * array.ndim, name)
    if AUX_NAMES.get(array.dtype) != name:
        array = array.astype(name)  # this byte order
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    return array if whole and array.flags.aligned else array.copy()


def _constant(kind: str, text: str) -> bool | int | float:
    """Return the number of a "const" step."""
    return float(text) if kind == "float" else int(text) if kind == "int" else text == "True"


def _as_kind(value: Any, kind: str, dtype: np.dtype) -> Any:
    """Return `value` as this kind; what is finite stays so when it becomes a narrower float."""
    if kind == "bool":
        return np.asarray(value) != 0
    if kind == "int":
        return np.asarray(value, np.int64)
    value = np.asarray(value)
    if value.dtype.kind == "f" and value.dtype.itemsize > np.dtype(dtype).itemsize:
        limit = np.finfo(dtype).max
        value = np.where(np.isinf(value), value, np.clip(value, -limit, limit))
    return value.astype(dtype)


def _element(array: np.ndarray, indices: list[np.ndarray]) -> np.ndarray:
    """Return array[indices], each index brought into the array."""
    inside = (np.clip(n, 0, size - 1) for n, size in zip(indices, array.shape, strict=True))
    return array[tuple(inside)]
