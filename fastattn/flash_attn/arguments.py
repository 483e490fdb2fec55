"""The rules of flash_attn's arguments, where they are not the core's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import integer
from ..kinds import is_tensor, numpy_view

NAMES = {"scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes"}
NO_WINDOW = (None, None)
WINDOW_RULE = "window_size must be a pair of ints, of which a negative one is no limit"


def tokens_first(name: str, a: Any) -> np.ndarray:
    """Return a view of an array (batch, seqlen, heads, dim)."""
    a = numpy_view(name, a)
    if a.ndim != 4:
        raise ValueError(f"{name} must have shape (batch, seqlen, heads, dim), got {a.shape}")
    return a


def dense(name: str, a: Any) -> np.ndarray:
    """Return a view (batch, heads, seqlen, dim) of an array (batch, seqlen, heads, dim)."""
    return tokens_first(name, a).swapaxes(1, 2)


def check_batch(**arrays: np.ndarray) -> None:
    """Raise unless all have the first one's batch."""
    (first, a), *others = arrays.items()
    for name, b in others:
        if len(b) != len(a):
            rule = f"{first} and {name} must have the same batch"
            raise ValueError(f"{rule}, got {len(a)} and {len(b)}")


def parts_of(name: str, packed: Any, count: int, rank: int) -> list[Any]:
    """Return the arrays, or tensors, that are packed in the axis before the heads."""
    a = packed if is_tensor(packed) else numpy_view(name, packed)
    if a.ndim != rank or a.shape[-3] != count:
        tokens = "batch, seqlen" if rank == 5 else "tokens"
        rule = f"{name} must have shape ({tokens}, {count}, heads, dim)"
        raise ValueError(f"{rule}, got {tuple(a.shape)}")
    return [a[..., n, :, :] for n in range(count)]


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """Return the core's window."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"{WINDOW_RULE}, got {window_size!r}") from None
    return _side(left), _side(right)


def _side(size: Any) -> int | None:
    number = integer(WINDOW_RULE, size)
    return None if number < 0 else number
