"""ONNX's TensorScatter, opset 24: how a cache that Attention reads with nonpad_kv_seqlen fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import integer
from ..arrays import integers
from ..kinds import numpy_view

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MODES = ("linear", "circular")


def tensor_scatter(
    past_cache: ArrayLike,
    update: ArrayLike,
    write_indices: ArrayLike | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> np.ndarray:
    """Return the output of ONNX's operator TensorScatter, opset 24.

    Parameters
    ----------
    past_cache : (batch, ..., capacity, ...) of any dtype
    update : array like past_cache but for `axis`, where it has at most capacity
    write_indices : (batch,) ints >= 0. Default 0.
        Where on `axis` the first of a batch entry's update goes; the others follow.
    axis : int, the axis of capacity; not 0. Default the last but one.
    mode : "linear", where the update must end within capacity, or "circular", where it goes on at 0

    Returns
    -------
    present_cache : array like past_cache, new

    Raises
    ------
    ValueError   shapes or values that do not fit together
    TypeError    dtypes that differ; indices that are not ints
    """
    cache, new = numpy_view("past_cache", past_cache), numpy_view("update", update)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    along = _axis(axis, cache)
    if new.dtype != cache.dtype:
        raise TypeError(f"update must have the dtype of past_cache, {cache.dtype}, got {new.dtype}")
    capacity = cache.shape[along]
    others = cache.shape[:along] + cache.shape[along + 1 :]
    if new.ndim != cache.ndim or new.shape[:along] + new.shape[along + 1 :] != others:
        rule = f"update must have the shape of past_cache, {cache.shape}, but for axis {axis}"
        raise ValueError(f"{rule}, got {new.shape}")
    tokens = new.shape[along]
    if tokens > capacity:
        raise ValueError(f"update must have at most {capacity} on axis {axis}, got {tokens}")
    where = _starts(write_indices, len(cache))[:, None] + np.arange(tokens)
    if mode == "circular":
        where %= max(1, capacity)
    elif where.size and where.max() >= capacity:
        rule = f"write_indices must leave room for {tokens} in a capacity of {capacity}"
        raise ValueError(f"{rule}, got {where[:, 0].max()}")
    present = cache.copy()
    np.moveaxis(present, along, 1)[np.arange(len(cache))[:, None], where] = np.moveaxis(
        new, along, 1
    )
    return present


def _axis(axis: Any, cache: np.ndarray) -> int:
    rule = f"axis must name one after the batch, as past_cache has shape {cache.shape}"
    along = integer(rule, axis)
    if not -cache.ndim < along < cache.ndim or along == 0:
        raise ValueError(f"{rule}, got {along}")
    return along % cache.ndim


def _starts(write_indices: Any, batch: int) -> np.ndarray:
    """Return (batch,) int64."""
    if write_indices is None:
        return np.zeros(batch, np.int64)
    rule = f"write_indices must be ints >= 0 of shape {(batch,)}"
    starts = integers("write_indices", "ints", write_indices)
    if starts.shape != (batch,):
        raise ValueError(f"{rule}, got shape {starts.shape}")
    if (starts < 0).any():
        raise ValueError(f"{rule}, got {starts.min()}")
    return starts.astype(np.int64)
