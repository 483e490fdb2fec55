"""The two layouts of ONNX's attention: heads in an axis, or packed in the last one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import count
from ..arrays import FLOAT_RULE, float_name
from ..kinds import numpy_view

PACKED = 3  # the rank of (batch, tokens, heads * dim); that of (batch, heads, tokens, dim) is 4


def float_array(name: str, a: Any) -> np.ndarray:
    """Return an array of a dtype that fastattn has, in the byte order of this machine."""
    a = numpy_view(name, a)
    if not float_name(a.dtype):
        raise TypeError(f"{name} must be {FLOAT_RULE}, got {a.dtype}")
    return a if a.dtype.isnative else a.astype(a.dtype.newbyteorder("="))


def check_rank(name: str, a: np.ndarray) -> None:
    """Raise unless `a` has one of the two ranks."""
    if a.ndim not in (PACKED, 4):
        raise ValueError(f"{name} must have rank 3 or 4, got shape {a.shape}")


def count_of(name: str, heads: Any, owner: str) -> int:
    """Return the number of heads in packed arrays, the attribute `name`."""
    if heads is None:
        raise ValueError(f"{name} must be given where {owner} has rank 3, got None")
    return count(name, heads, 1)


def split(name: str, a: np.ndarray, rule: str, heads: int) -> np.ndarray:
    """Return a view (batch, heads, tokens, dim) of a packed array; `rule` names the attribute."""
    batch, tokens, features = a.shape
    if features % heads:
        raise ValueError(f"{rule} must divide the last axis of {name}, got {heads} and {a.shape}")
    return a.reshape(batch, tokens, heads, features // heads).swapaxes(1, 2)


def packed(a: np.ndarray) -> np.ndarray:
    """Return (batch, tokens, heads * dim), C-contiguous, of (batch, heads, tokens, dim)."""
    batch, heads, tokens, dim = a.shape
    return a.swapaxes(1, 2).reshape(batch, tokens, heads * dim)
