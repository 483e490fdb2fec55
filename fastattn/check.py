"""Every rule about arguments, once: arguments of attention() -> Problem and canonical views."""

from __future__ import annotations

from functools import lru_cache, reduce
from math import inf, prod
from numbers import Real
from operator import index, or_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .problem import Operands, Problem, Variant

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BACKENDS = ("auto", "numpy", "cpu")
FLOATS = {"e": "float16", "f": "float32", "d": "float64"}  # dtype.name itself costs a microsecond
LARGEST = {"float32": float(np.finfo(np.float32).max), "float64": float(np.finfo(np.float64).max)}
# Far beyond any array, and sums of a few of them with a length still fit an int64.
ALIGN_LIMIT = 2**60


class Names(NamedTuple):
    """The names under which the caller passed the arguments, for messages."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    mask: str = "mask"
    bias: str = "bias"
    causal: str = "causal"


NAMES = Names()


def check(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: Any = None,
    causal: Any = False,
    align: Any = "bottom_right",
    window: Any = (None, None),
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    return_lse: Any = False,
    out: np.ndarray | None = None,
    names: Names = NAMES,
) -> tuple[Problem, Operands]:
    """Return the Problem and the canonical views of one call, or raise before anything is written.

    Parameters are those of attention(); `names` says what a face's caller called the arrays. Rank 2
    means one head: the views get a heads axis of 1. `out` and, if return_lse, `lse` are allocated
    C-contiguous. Nothing is copied but an input that is not native, aligned and in strides of whole
    elements. Raises TypeError for kinds and dtypes, ValueError for shapes and values.
    """
    q, k, v = _operand(names.q, q), _operand(names.k, k), _operand(names.v, v)
    if not (q.dtype == k.dtype == v.dtype):
        rule = f"{names.q}, {names.k} and {names.v} must have the same dtype"
        raise TypeError(f"{rule}, got {q.dtype}, {k.dtype} and {v.dtype}")
    has_heads = q.ndim > 2 or k.ndim > 2 or v.ndim > 2
    q, k, v = _share_leading_dimensions(names, q, k, v)
    _check_sizes(names, q.shape, k.shape, v.shape)
    *lead, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k, head_dim_v = v.shape[-3:]
    rows = (*lead, heads_q, seqlen_q)

    dtype = FLOATS[q.dtype.char]
    offset = _offset(align, seqlen_q, seqlen_k)
    left, right = _window(window, _flag(names.causal, causal), offset, seqlen_q, seqlen_k)
    scale = _scale(scale, head_dim, dtype)
    if mask is not None:
        mask = _broadcast(names.mask, _mask(names, mask), (*rows, seqlen_k), has_heads)
    if bias is not None:
        bias = _broadcast(names.bias, _bias(names, bias), (*rows, seqlen_k), has_heads)
    bias_dtype = "" if bias is None else FLOATS[bias.dtype.char]
    sizes = prod(lead), heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    problem = _problem(dtype, mask is not None, bias_dtype, *sizes, scale, offset, left, right)

    if out is None:
        out = np.empty((*rows, head_dim_v), q.dtype)
    else:
        out = _result(out, (*rows, head_dim_v), q.dtype, has_heads)
        _check_overlap(out, names, (q, k, v, mask, bias))
    lse = np.empty(rows, q.dtype) if _flag("return_lse", return_lse) else None
    return problem, Operands(q, k, v, mask, bias, out, lse)


def check_backend(backend: Any) -> None:
    """Raise unless `backend` is one of BACKENDS."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")


@lru_cache(maxsize=1024)
def _problem(dtype: str, has_mask: bool, bias_dtype: str, *fields: Any) -> Problem:
    # Cached: making the two frozen records costs 2 µs, finding them again 0.4 µs.
    return Problem(Variant(dtype, has_mask, bias_dtype), *fields)


# --- q, k and v ---------------------------------------------------------------------------------


def _operand(name: str, a: Any) -> np.ndarray:
    a = plain(name, a)
    if a.dtype.char not in "fd":
        raise TypeError(f"{name} must be float32 or float64, got {a.dtype}")
    if a.ndim < 2:
        raise ValueError(f"{name} must have rank 2 or more, got shape {a.shape}")
    return _canonical(a)


def plain(name: str, a: Any) -> np.ndarray:
    """Return any array-like as a plain array; a masked array's mask would be lost, so refuse it."""
    if type(a) is np.ndarray:
        return a
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be a plain array, got a masked array. Pass its .data, and mask=~its mask "
            "broadcast to the scores (mask is True where a query may attend)."
        )
    return np.asarray(a)


def _canonical(a: np.ndarray) -> np.ndarray:
    """Return `a`, or a copy if it is not native, aligned and in strides of whole elements."""
    flags = a.flags
    if a.dtype.isnative and flags.aligned and (flags.c_contiguous or _strides_are_whole(a)):
        return a
    return a.astype(a.dtype.newbyteorder("="), order="C")


def _strides_are_whole(a: np.ndarray) -> bool:
    # The low bits of the or are 0 only if those of every stride are; itemsize is 2, 4 or 8.
    return reduce(or_, a.strides, 0) % a.itemsize == 0


def _share_leading_dimensions(
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


def _check_sizes(names: Names, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    if q[-1] != k[-1]:
        raise ValueError(f"{names.q} and {names.k} must have the same head_dim, got {q} and {k}")
    if k[-2] != v[-2]:
        raise ValueError(f"{names.k} and {names.v} must have the same seqlen_k, got {k} and {v}")
    if k[-3] != v[-3]:
        raise ValueError(f"{names.k} and {names.v} must have the same heads, got {k} and {v}")
    if q[-3] % k[-3] if k[-3] else q[-3]:
        rule = f"{names.q} heads must be a multiple of {names.k} heads"
        raise ValueError(f"{rule}, got {q[-3]} and {k[-3]}")


# --- scale, causal, align and window ------------------------------------------------------------


def _flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def _scale(scale: Any, head_dim: int, dtype: str) -> float:
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    number = scale if type(scale) is float else _real(scale)
    if not abs(number) <= LARGEST[dtype]:  # NaN as well
        raise ValueError(f"scale must be finite in {dtype}, got {scale!r}")
    return number


def _real(scale: Any) -> float:
    if isinstance(scale, Real) and not isinstance(scale, bool):
        try:
            return float(scale)
        except OverflowError:
            return inf
    array = np.asarray(scale)  # an array without axes, or another library's scalar
    if array.ndim or array.dtype.kind not in "iuf":
        raise TypeError(f"scale must be a real number, got {type(scale).__name__}")
    return float(array)


def _offset(align: Any, seqlen_q: int, seqlen_k: int) -> int:
    """Return the key position at which query row 0 stands."""
    if isinstance(align, str):
        if align == "bottom_right":
            return seqlen_k - seqlen_q
        if align == "top_left":
            return 0
        raise ValueError(f"align must be 'bottom_right', 'top_left' or an int, got {align!r}")
    offset = _integer("align must be 'bottom_right', 'top_left' or an int", align)
    if abs(offset) > ALIGN_LIMIT:
        raise ValueError(f"align must lie within -2**60 and 2**60, got {offset}")
    return offset


def _integer(rule: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{rule}, got {type(value).__name__}")


def _window(
    window: Any, causal: bool, offset: int, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """Return (left, right), causal folded in; None for a side that hides no key from any row."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be a pair (left, right), got {window!r}") from None
    left = None if left is None else _radius(left, window)
    right = None if right is None else _radius(right, window)
    if causal:
        right = 0
    if left is not None and seqlen_q - 1 + offset - left <= 0:
        left = None
    if right is not None and offset + right >= seqlen_k - 1:
        right = None
    return left, right


def _radius(value: Any, window: Any) -> int:
    radius = _integer("window must be a pair of ints >= 0 or None", value)
    if radius < 0:
        raise ValueError(f"window must be a pair of ints >= 0 or None (no limit), got {window!r}")
    return radius


# --- mask and bias ------------------------------------------------------------------------------


def _mask(names: Names, mask: Any) -> np.ndarray:
    mask = plain(names.mask, mask)
    if mask.dtype.char != "?":
        raise TypeError(
            f"{names.mask} must be bool, got {mask.dtype}. "
            f"Pass {names.mask} != 0 to choose keys, or a float {names.bias} to add to the scores."
        )
    return mask


def _bias(names: Names, bias: Any) -> np.ndarray:
    bias = plain(names.bias, bias)
    if bias.dtype.char not in FLOATS:
        rule = f"{names.bias} must be float16, float32 or float64, got {bias.dtype}"
        hint = f". Pass a bool array as {names.mask}." if bias.dtype.char == "?" else ""
        raise TypeError(rule + hint)
    return _canonical(bias)


def _broadcast(name: str, a: np.ndarray, scores: tuple[int, ...], has_heads: bool) -> np.ndarray:
    """Return a view of `a` in the shape of the scores: NumPy's rules, but it may not enlarge."""
    if a.shape == scores:
        return a
    given = scores if has_heads else scores[1:]
    try:
        return np.broadcast_to(a, given).reshape(scores)
    except ValueError:
        raise ValueError(f"{name} must broadcast to the scores {given}, got {a.shape}") from None


# --- out ----------------------------------------------------------------------------------------


def _result(out: Any, shape: tuple[int, ...], dtype: np.dtype, has_heads: bool) -> np.ndarray:
    """Return a view of the caller's `out` in `shape`."""
    given = shape if has_heads else shape[1:]
    if type(out) is not np.ndarray:
        raise TypeError(f"out must be a plain NumPy array, got {type(out).__name__}")
    if out.dtype != dtype:
        raise TypeError(f"out must be {dtype}, got {out.dtype}")
    if out.shape != given:
        raise ValueError(f"out must have shape {given}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    if _canonical(out) is not out:
        rule = "out must be aligned and have strides of whole elements"
        raise ValueError(f"{rule}, got strides {out.strides}")
    return out if has_heads else out[None]


def _check_overlap(out: np.ndarray, names: Names, inputs: tuple[np.ndarray | None, ...]) -> None:
    for name, a in zip(names, inputs, strict=False):
        # Bounds first: the exact answer can take long for odd strides.
        if a is not None and np.may_share_memory(out, a) and np.shares_memory(out, a):
            raise ValueError(f"out must not overlap {name}, got arrays that share memory")
