"""The rules of single arguments of JAX's function: each returns the canonical value, or raises."""

from __future__ import annotations

from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arguments import flag, scale_of
from ..arrays import FLOAT_RULE, float_name
from .options import Options


def operands_of(query: Any, key: Any, value: Any) -> list[jax.Array]:
    """Return the three with four axes and of one dtype."""
    found = [_with_batch(*pair) for pair in (("query", query), ("key", key), ("value", value))]
    query, key, value = found
    if not (query.dtype == key.dtype == value.dtype):
        rule = "query, key and value must have the same dtype"
        raise ValueError(f"{rule}, got {query.dtype}, {key.dtype} and {value.dtype}")
    if not float_name(query.dtype):
        raise TypeError(f"query must be {FLOAT_RULE}, got {query.dtype}")
    if key.shape != value.shape:
        rule = "key and value must have the same shape"
        raise ValueError(f"{rule}, got {key.shape} and {value.shape}")
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        rule = "query and key must have the same batch and head_dim"
        raise ValueError(f"{rule}, got {query.shape} and {key.shape}")
    heads_q, heads_kv = query.shape[2], key.shape[2]
    if heads_q % heads_kv if heads_kv else heads_q:
        rule = "query heads must be a multiple of key heads"
        raise ValueError(f"{rule}, got {heads_q} and {heads_kv}")
    return found


def _with_batch(name: str, a: Any) -> jax.Array:
    a = array(a)
    if a.ndim not in (3, 4):
        rule = "must have rank 4 (batch, seqlen, heads, head_dim), or 3 without the batch"
        raise ValueError(f"{name} {rule}, got shape {a.shape}")
    return a if a.ndim == 4 else a[None]


def array(a: Any) -> jax.Array:
    """Return an array of JAX."""
    return a if isinstance(a, jax.Array) else jnp.asarray(a)


def bias_of(bias: Any, scores: tuple[int, ...]) -> jax.Array:
    """Return a float array of four axes. JAX takes any numbers."""
    bias = array(bias)
    if bias.dtype.kind in "biu":
        bias = bias.astype(jnp.float32)
    if not float_name(bias.dtype):
        raise TypeError(f"bias must be {FLOAT_RULE} or of ints, got {bias.dtype}")
    return _of_scores("bias", bias, scores)


def mask_of(mask: Any, scores: tuple[int, ...]) -> jax.Array:
    """Return a bool array of four axes."""
    mask = array(mask)
    if mask.dtype != np.bool_:
        raise ValueError(f"mask must be bool, got {mask.dtype}. Pass a float array as bias.")
    return _of_scores("mask", mask, scores)


def _of_scores(name: str, a: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    sizes = (1,) * (4 - a.ndim) + a.shape
    pairs = zip(sizes, scores, strict=False)
    if len(sizes) > 4 or any(size not in (1, whole) for size, whole in pairs):
        rule = f"{name} must broadcast to (batch, heads_q, seqlen_q, seqlen_k)"
        raise ValueError(f"{rule}, here {scores}, got {a.shape}")
    return a.reshape(sizes)


def lengths_of(name: str, lengths: Any, batch: int) -> jax.Array:
    """Return (batch,) int32."""
    lengths = array(lengths)
    if lengths.dtype != np.int32 or lengths.shape != (batch,):
        rule = f"{name} must be int32 of shape {(batch,)}"
        raise ValueError(f"{rule}, got {lengths.dtype} of shape {lengths.shape}")
    return lengths


def scaled(query: jax.Array, scale: Any) -> tuple[jax.Array, float]:
    """Return (query, scale): a scale that is only known when the program runs goes into query."""
    if isinstance(scale, jax.core.Tracer):
        if scale.ndim:
            raise ValueError(f"scale must be a number, got shape {scale.shape}")
        return (query * scale).astype(query.dtype), 1.0
    dtype = "float64" if query.dtype == np.float64 else "float32"
    return query, scale_of(scale, query.shape[-1], dtype)


def options_with(
    names: tuple[str, ...],
    scale: float,
    is_causal: Any,
    local_window_size: Any,
    seqlen_q: int,
    seqlen_k: int,
) -> Options:
    """Return the options, causal and window in one band, which is None where it hides no key."""
    left, right = _window_of(local_window_size)
    if flag("is_causal", is_causal):
        right = 0 if right is None else min(right, 0)
    # Row i stands at position i. Beyond all positions, one number is as good as another.
    most = seqlen_q + seqlen_k
    if left is not None:
        left = None if left >= seqlen_q - 1 else max(left, -most)
    if right is not None:
        right = None if right >= seqlen_k - 1 else max(right, -most)
    return Options(names, scale, left, right)


def _window_of(local_window_size: Any) -> tuple[int | None, int | None]:
    if local_window_size is None:
        return None, None
    pair = local_window_size
    try:
        left, right = pair if isinstance(pair, (tuple, list)) else (pair, pair)
        return index(left), index(right)
    except (TypeError, ValueError):
        rule = "local_window_size must be an int or a pair of ints"
        raise TypeError(f"{rule}, got {local_window_size!r}") from None
