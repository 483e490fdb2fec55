"""The rules of array arguments: each function returns a canonical view, or raises."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from .kinds import (
    array_view,
    device_of,
    is_device_view,
    is_on_device,
    is_tensor,
    new_array,
    numpy_view,
)

FLOATS = {"e": "float16", "f": "float32", "d": "float64"}  # dtype.name itself costs a microsecond
FLOAT_RULE = "float16, bfloat16, float32 or float64"


class Names(NamedTuple):
    """The names under which the caller passed the arguments, for messages."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    mask: str = "mask"
    bias: str = "bias"
    causal: str = "causal"


NAMES = Names()


def float_name(dtype: np.dtype) -> str:
    """Return the name of a supported dtype, "" for others."""
    # bfloat16 is known by its name alone: only a caller who has ml_dtypes can have such arrays.
    return FLOATS.get(dtype.char) or ("bfloat16" if dtype.name == "bfloat16" else "")


# --- q, k and v ---------------------------------------------------------------------------------


def operands_of(names: Names, *arrays: Any) -> list[np.ndarray]:
    """Return q, k and v as canonical arrays of one dtype and of rank 2 or more."""
    q, k, v = found = [_operand(name, a) for name, a in zip(names, arrays, strict=False)]
    if not (q.dtype == k.dtype == v.dtype):
        rule = f"{names.q}, {names.k} and {names.v} must have the same dtype"
        raise TypeError(f"{rule}, got {q.dtype}, {k.dtype} and {v.dtype}")
    return found


def _operand(name: str, a: Any) -> np.ndarray:
    a = array_view(name, a)
    if not float_name(a.dtype):
        raise TypeError(f"{name} must be {FLOAT_RULE}, got {a.dtype}")
    if a.ndim < 2:
        raise ValueError(f"{name} must have rank 2 or more, got shape {a.shape}")
    return canonical(a)


def integers(name: str, rule: str, a: Any) -> np.ndarray:
    """Return an int or an array-like of ints as an array: of Python's ints, dtype object, where one
    is too large for any other, as it is for the caller's bounds.
    """
    array = numpy_view(name, a)
    if type(a) is not np.ndarray:
        if not array.size:
            array = array.astype(np.int64)  # of an empty list, NumPy makes floats
        elif array.dtype == object and all(type(number) is int for number in array.flat):
            return array
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be {rule}, got {array.dtype}")
    return array


def all_below(stop: int, indices: np.ndarray) -> bool:
    """Whether int64 indices lie from 0 to stop - 1, in one pass: read without their signs, negative
    ones lie past all others.
    """
    return not np.count_nonzero(indices.view(np.uint64) >= stop)


def same_arrays(names: tuple[str, ...], values: tuple[Any, ...]) -> list[np.ndarray]:
    """Return plain float arrays, all of one shape and dtype."""
    arrays = [numpy_view(name, a) for name, a in zip(names, values, strict=True)]
    for name, a in zip(names, arrays, strict=True):
        if not float_name(a.dtype):
            raise TypeError(f"{name} must be {FLOAT_RULE}, got {a.dtype}")
        for rule, kind, error in (("dtype", a.dtype, TypeError), ("shape", a.shape, ValueError)):
            first = getattr(arrays[0], rule)
            if kind != first:
                message = f"{names[0]} and {name} must have the same {rule}, got {first} and {kind}"
                raise error(message)
    return arrays


def canonical(a: np.ndarray) -> np.ndarray:
    """Return `a`, or a copy if it is not native, aligned and in strides of whole elements."""
    flags = a.flags
    if a.dtype.isnative and flags.aligned and (flags.c_contiguous or _strides_are_whole(a)):
        return a
    if is_device_view(a):
        rule = "arrays of a GPU must be aligned and have strides of whole elements"
        raise ValueError(f"{rule}, got strides {a.strides} of {a.dtype}")
    return a.astype(a.dtype.newbyteorder("="), order="C")


def _strides_are_whole(a: np.ndarray) -> bool:
    # The low bits of the or are 0 only if those of every stride are; itemsize is 2, 4 or 8.
    return reduce(or_, a.strides, 0) % a.itemsize == 0


def share_leading_dimensions(
    names: Names, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of rank 3 and up that agree before the heads; stride 0 where they broadcast."""
    if q.ndim > 2 and q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and k.ndim == v.ndim == q.ndim:
        return q, k, v
    shapes = q.shape, k.shape, v.shape
    q, k, v = (a if a.ndim > 2 else a[None] for a in (q, k, v))
    try:
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        rule = f"leading dimensions of {names.q}, {names.k} and {names.v} must broadcast"
        raise ValueError("{}, got {}, {} and {}".format(rule, *shapes)) from None
    q, k, v = (np.broadcast_to(a, lead + a.shape[-3:]) for a in (q, k, v))
    return q, k, v


def check_sizes(names: Names, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Raise unless shapes of rank 3 and up fit together after the leading dimensions."""
    if q[-1] != k[-1]:
        raise ValueError(f"{names.q} and {names.k} must have the same head_dim, got {q} and {k}")
    if k[-2] != v[-2]:
        raise ValueError(f"{names.k} and {names.v} must have the same seqlen_k, got {k} and {v}")
    if k[-3] != v[-3]:
        raise ValueError(f"{names.k} and {names.v} must have the same heads, got {k} and {v}")
    if q[-3] % k[-3] if k[-3] else q[-3]:
        rule = f"{names.q} heads must be a multiple of {names.k} heads"
        raise ValueError(f"{rule}, got {q[-3]} and {k[-3]}")


def check_places(names: Names, q: np.ndarray, others: Iterable[tuple[str, Any]]) -> None:
    """Raise unless the others that are given are in the memory of q: a GPU's, or the CPU's."""
    place = device_of(q)
    for name, a in others:
        if a is not None and a is not q and device_of(a) != place:
            rule = f"{name} must be in the memory of {names.q}, {_place_text(place)}"
            raise ValueError(f"{rule}, got an array in {_place_text(device_of(a))}")


def _place_text(device: int | None) -> str:
    return "the CPU's" if device is None else f"that of GPU {device}"


# --- mask and bias ------------------------------------------------------------------------------


def mask_of(names: Names, mask: Any) -> np.ndarray:
    """Return a bool array."""
    mask = array_view(names.mask, mask)
    if mask.dtype.char != "?":
        raise TypeError(
            f"{names.mask} must be bool, got {mask.dtype}. "
            f"Pass {names.mask} != 0 to choose keys, or a float {names.bias} to add to the scores."
        )
    return mask


def bias_of(names: Names, bias: Any) -> np.ndarray:
    """Return a canonical float array."""
    bias = array_view(names.bias, bias)
    if not float_name(bias.dtype):
        rule = f"{names.bias} must be {FLOAT_RULE}, got {bias.dtype}"
        hint = f". Pass a bool array as {names.mask}." if bias.dtype.char == "?" else ""
        raise TypeError(rule + hint)
    return canonical(bias)


def broadcast(name: str, a: np.ndarray, scores: tuple[int, ...], has_heads: bool) -> np.ndarray:
    """Return a view of `a` in the shape of the scores: NumPy's rules, but it may not enlarge."""
    if a.shape == scores:
        return a
    given = scores if has_heads else scores[1:]
    try:
        return np.broadcast_to(a, given).reshape(scores)
    except ValueError:
        raise ValueError(f"{name} must broadcast to the scores {given}, got {a.shape}") from None


# --- alibi and sinks ----------------------------------------------------------------------------


def slopes_of(alibi: Any, lead: tuple[int, ...], heads_q: int, dtype: str) -> np.ndarray:
    """Return (*lead, heads_q) in `dtype`, stride 0 where it broadcasts."""
    alibi = _per_head("alibi", alibi, dtype)
    # An infinite slope times a distance of 0 has no value.
    if not is_device_view(alibi) and not np.isfinite(alibi).all():
        raise ValueError(f"alibi must be finite, got {alibi[~np.isfinite(alibi)][0]}")
    if alibi.ndim and alibi.shape[-1] == heads_q:
        try:
            return np.broadcast_to(alibi, (*lead, heads_q))
        except ValueError:
            pass
    rule = f"alibi must have shape {(heads_q,)} or {(*lead, heads_q)}"
    raise ValueError(f"{rule}, got {alibi.shape}")


def sinks_of(sinks: Any, heads_q: int, dtype: str) -> np.ndarray:
    """Return (heads_q,) in `dtype`."""
    sinks = _per_head("sinks", sinks, dtype)
    if sinks.shape != (heads_q,):
        raise ValueError(f"sinks must have shape {(heads_q,)}, got {sinks.shape}")
    return sinks


def _per_head(name: str, a: Any, dtype: str) -> np.ndarray:
    a = array_view(name, a)
    if not float_name(a.dtype):
        raise TypeError(f"{name} must be {FLOAT_RULE}, got {a.dtype}")
    if is_device_view(a):  # whose values no one reads here
        if a.dtype != dtype or not a.flags.c_contiguous:
            rule = f"{name} of a GPU must be {dtype} and contiguous"
            raise TypeError(f"{rule}, got {a.dtype} with strides {a.strides}")
        return a
    with np.errstate(over="ignore"):
        converted = a.astype(dtype)  # a copy, which `out` cannot overlap
    if a.dtype.itemsize > converted.itemsize:
        lost = np.isinf(converted) & np.isfinite(a)
        if lost.any():
            raise ValueError(f"{name} must be finite in {dtype}, got {a[lost][0]}")
    return converted


# --- out ----------------------------------------------------------------------------------------


def result_of(out: Any, shape: tuple[int, ...], dtype: np.dtype, has_heads: bool) -> np.ndarray:
    """Return a view of the caller's `out` in `shape`."""
    given = shape if has_heads else shape[1:]
    if type(out) not in (np.ndarray, np.memmap) and not is_tensor(out) and not is_on_device(out):
        rule = "out must be a plain NumPy array or a tensor of torch"
        raise TypeError(f"{rule}, got {type(out).__name__}")
    out = array_view("out", out)
    if out.dtype != dtype:
        raise TypeError(f"out must be {dtype}, got {out.dtype}")
    if out.shape != given:
        raise ValueError(f"out must have shape {given}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    if canonical(out) is not out:
        rule = "out must be aligned and have strides of whole elements"
        raise ValueError(f"{rule}, got strides {out.strides}")
    return out if has_heads else out[None]


def empty_in_order_of(q: np.ndarray) -> np.ndarray:
    """Return a dense array of the shape and dtype of q, whose axes lie as those of q."""
    is_dense = 0 not in q.strides and not is_device_view(q)
    return np.empty_like(q) if is_dense else new_array(q, q.shape, q.dtype)


def check_overlap(
    out: np.ndarray, names: Iterable[str], inputs: Iterable[np.ndarray | None]
) -> None:
    """Raise if `out` shares memory with an input, or its elements with each other; `inputs` in the
    order of `names`.
    """
    if out.size > 1 and not out.flags.c_contiguous:
        # Each axis must step over all that the axes of smaller steps span.
        span = out.itemsize
        steps = zip((abs(stride) for stride in out.strides), out.shape, strict=True)
        for step, size in sorted(pair for pair in steps if pair[1] > 1):
            if step < span:
                raise ValueError(f"out must not overlap itself, got strides {out.strides}")
            span += step * (size - 1)
    for name, a in zip(names, inputs, strict=False):
        # Bounds first: the exact answer can take long for odd strides.
        if a is not None and np.may_share_memory(out, a) and np.shares_memory(out, a):
            raise ValueError(f"out must not overlap {name}, got arrays that share memory")
