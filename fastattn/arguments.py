"""The rules of single arguments: each function returns the canonical value, or raises."""

from __future__ import annotations

import os
from math import inf, prod
from numbers import Real
from operator import index
from typing import Any, NamedTuple

import numpy as np

from .arrays import all_below, integers
from .kinds import numpy_view

LARGEST = {"float32": float(np.finfo(np.float32).max), "float64": float(np.finfo(np.float64).max)}
SMALLEST = {
    "float32": float(np.finfo(np.float32).tiny),
    "float64": float(np.finfo(np.float64).tiny),
}
# Far beyond any array; a sum of one with a length still fits an int32, as kernels hold positions.
ALIGN_LIMIT = 2**30
NO_LIMIT = 2**40  # a radius or a chunk that reaches any key from any position
ZERO = np.array(0)  # the kv_start of calls without one
NOT_REAL = (bool, np.timedelta64)  # which Python and NumPy count among the numbers
ALIGN_RULE = "align must be 'bottom_right', 'top_left', an int or an array of ints"


def flag(name: str, value: Any) -> bool:
    """Return a bool; nothing else is taken for one."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def real(name: str, value: Any) -> float:
    """Return a real number as a float, infinity where it is too large for one."""
    if type(value) is float:
        return value
    if isinstance(value, Real) and not isinstance(value, NOT_REAL):
        try:
            return float(value)
        except OverflowError:
            return inf
    try:
        array = numpy_view(name, value)  # without axes, or another library's scalar
        if not array.ndim and array.dtype.kind in "iuf":
            return float(array)
    except ValueError:  # lists of unequal length
        pass
    raise TypeError(f"{name} must be a real number, got {type(value).__name__}")


def integer(rule: str, value: Any) -> int:
    """Return an int, or raise `rule` with what was given."""
    try:
        if not isinstance(value, (bool, np.bool_)):  # NumPy 1's would do, with a warning
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{rule}, got {type(value).__name__}")


def count(name: str, value: Any, low: int) -> int:
    """Return an int of at least `low`."""
    rule = f"{name} must be an int >= {low}"
    number = integer(rule, value)
    if number < low:
        raise ValueError(f"{rule}, got {number}")
    return number


def scale_of(scale: Any, head_dim: int, dtype: str) -> float:
    """Return the scale, head_dim ** -0.5 by default."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    number = real("scale", scale)
    if not abs(number) <= LARGEST[dtype]:  # NaN as well
        raise ValueError(f"scale must be finite in {dtype}, got {scale!r}")
    return number


def softcap_of(softcap: Any, dtype: str) -> float:
    """Return the cap, 0 for none."""
    if softcap is None:
        return 0.0
    number = real("softcap", softcap)
    if number <= 0:
        return 0.0
    if not SMALLEST[dtype] <= number <= LARGEST[dtype]:
        raise ValueError(f"softcap must be a normal number in {dtype}, or 0, got {softcap!r}")
    return number


def chunk_of(chunk: Any) -> int:
    """Return the chunk length, 0 for none."""
    return min(count("chunk", chunk, 0), NO_LIMIT)


def dropout_of(dropout_p: Any, dropout_seed: Any) -> tuple[float, int]:
    """Return (p, seed); a seed from the operating system if none is given."""
    p = real("dropout_p", dropout_p)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if dropout_seed is not None:
        rule = "dropout_seed must be an int from 0 to 2**63 - 1"
        dropout_seed = integer(rule, dropout_seed)
        if not 0 <= dropout_seed < 2**63:
            raise ValueError(f"{rule}, got {dropout_seed}")
    if p == 0:
        return 0.0, 0
    if dropout_seed is None:
        dropout_seed = int.from_bytes(os.urandom(8), "little") >> 1
    return p, dropout_seed


def tf32_of(precision: Any, storage: str) -> bool:
    """Return whether factors of this dtype may be rounded to tf32."""
    if precision is None:
        return False
    if isinstance(precision, str) and precision == "tf32":
        return storage == "float32"  # no other dtype is rounded to it
    rule = "precision must be None, for products in the dtype of the arrays, or 'tf32'"
    raise ValueError(f"{rule}, got {precision!r}")


# --- window and align ---------------------------------------------------------------------------


def window_of(window: Any, causal: bool) -> tuple[int | None, int | None]:
    """Return (left, right), causal folded in; None for no limit."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be a pair (left, right), got {window!r}") from None
    left = None if left is None else _radius(left, window)
    right = None if right is None else _radius(right, window)
    return left, 0 if causal else right


def _radius(value: Any, window: Any) -> int:
    radius = integer("window must be a pair of ints >= 0 or None", value)
    if radius < 0:
        raise ValueError(f"window must be a pair of ints >= 0 or None (no limit), got {window!r}")
    return min(radius, NO_LIMIT)


def shortened(
    left: int | None, right: int | None, offset: int, seqlen_q: int, seqlen_k: int
) -> tuple[int | None, int | None]:
    """Return (left, right) with None for a side that hides no key from any row."""
    if left is not None and seqlen_q - 1 + offset - left <= 0:
        left = None
    if right is not None and offset + right >= seqlen_k - 1:
        right = None
    return left, right


def offset_of(align: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
    """Return the key position at which query row 0 stands; for arrays of lengths, an array."""
    if isinstance(align, str):
        if align == "bottom_right":
            return seqlen_k - seqlen_q
        if align == "top_left":
            return 0
        raise ValueError(f"{ALIGN_RULE}, got {align!r}")
    offset = integer(ALIGN_RULE, align)
    if abs(offset) > ALIGN_LIMIT:
        raise ValueError(f"align must lie within -2**30 and 2**30, got {offset}")
    return offset


# --- lengths of each batch entry ----------------------------------------------------------------


class Lengths(NamedTuple):
    """What the caller says of where the rows and keys of each batch entry stand."""

    align: Any = "bottom_right"
    q_len: Any = None
    kv_len: Any = None
    kv_start: Any = None
    block_table: Any = None


def per_batch(name: str, value: Any, lead: tuple[int, ...], low: Any, high: Any) -> np.ndarray:
    """Return int64, of no axes or of shape `lead`, with every value from `low` to `high`."""
    if type(value) is int and type(high) is int and low <= value <= high:
        return np.array(value, np.int64)  # 0.3 µs; what follows takes 3
    given = integers(name, "an int or an array of ints", value)
    if given.ndim and given.shape != lead:
        try:
            given = np.broadcast_to(given, lead)
        except ValueError:
            rule = f"{name} must be an int or broadcast to the leading dimensions {lead}"
            raise ValueError(f"{rule}, got shape {given.shape}") from None
    if type(high) is int and not low and given.dtype != object:
        found = given.astype(np.int64)
        if all_below(high + 1, found):
            return found
    bad = (given < low) | (given > high)
    if bad.any():
        number, low, high = (np.broadcast_to(a, bad.shape)[bad][0] for a in (given, low, high))
        raise ValueError(f"{name} must lie between {low} and {high}, got {number}")
    return given.astype(np.int64)


def lengths_of(
    lead: tuple[int, ...], seqlen_q: int, seqlen_k: int, given: Lengths, fold: bool
) -> tuple[np.ndarray | None, int, int, int]:
    """Return (ranges, kv_start, kv_stop, offset) for Operands.ranges.

    `ranges` is None where the other three serve the whole batch and no query row is missing: by the
    kind of argument, not by its values, as each kernel is compiled for one case. Unless `fold`,
    that is only so without lengths.
    """
    if given.q_len is given.kv_len is given.kv_start is None and _is_one(given.align):
        return None, 0, seqlen_k, offset_of(given.align, seqlen_q, seqlen_k)
    columns = _columns(lead, seqlen_q, seqlen_k, given)
    is_one_answer = fold and (prod(lead) == 1 or not any(column.ndim for column in columns))
    if is_one_answer and columns[0].flat[0] == seqlen_q:
        _, start, stop, offset = (int(column.flat[0]) for column in columns)
        return None, start, stop, offset
    return _table(lead, columns), 0, seqlen_k, seqlen_k - seqlen_q


def _is_one(align: Any) -> bool:
    """Whether one align serves the whole batch."""
    return isinstance(align, (str, int)) or numpy_view("align", align).ndim == 0


def ranges_of(lead: tuple[int, ...], seqlen_q: Any, seqlen_k: Any, given: Lengths) -> np.ndarray:
    """Return Operands.ranges; seqlen_q and seqlen_k may be arrays of shape `lead`."""
    return _table(lead, _columns(lead, seqlen_q, seqlen_k, given))


def _columns(
    lead: tuple[int, ...], seqlen_q: Any, seqlen_k: Any, given: Lengths
) -> tuple[np.ndarray, ...]:
    """Return (q_len, kv_start, kv_stop, offset), each int64 of no axes or of shape `lead`."""
    align, q_len, kv_len, kv_start, _ = given
    rows = per_batch("q_len", seqlen_q if q_len is None else q_len, lead, 0, seqlen_q)
    stop = per_batch("kv_len", seqlen_k if kv_len is None else kv_len, lead, 0, seqlen_k)
    start = ZERO if kv_start is None else per_batch("kv_start", kv_start, lead, 0, stop)
    if _is_one(align):
        offset = np.asarray(offset_of(align, rows, stop - start))
    else:
        offset = per_batch("align", align, lead, -ALIGN_LIMIT, ALIGN_LIMIT)
    return rows, start, stop, offset


def _table(lead: tuple[int, ...], columns: tuple[np.ndarray, ...]) -> np.ndarray:
    table = np.empty((*lead, len(columns)), np.int64)
    for n, column in enumerate(columns):
        table[..., n] = column
    return table.reshape(-1, len(columns))


def cumulative_of(name: str, value: Any, tokens: int | None) -> np.ndarray:
    """Return cumulative lengths as int64: from 0 to `tokens`, if given, never decreasing."""
    given = integers(name, "an array of ints", value)
    if given.ndim != 1 or not given.size or given[0] != 0:
        raise ValueError(f"{name} must have one axis and start at 0, got {given.tolist()}")
    falls = np.flatnonzero(given[1:] < given[:-1])
    if len(falls):
        before, after = given[falls[0]], given[falls[0] + 1]
        raise ValueError(f"{name} must not decrease, got {before} before {after}")
    if tokens is None and given[-1] > NO_LIMIT:
        raise ValueError(f"{name} must end at 2**40 or before, got {given[-1]}")
    if tokens is not None and given[-1] != tokens:
        raise ValueError(f"{name} must end at the number of tokens, {tokens}, got {given[-1]}")
    return given.astype(np.int64)
