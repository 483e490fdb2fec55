"""ONNX's LayerNormalization and RMSNormalization as functions of NumPy arrays."""

from __future__ import annotations

from math import isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arguments import integer, real
from ..nn.norms import LayerNormWeights, RMSNormWeights, add_norm
from .heads import float_array

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

FLOAT = 1  # onnx.TensorProto.FLOAT, the one value of stash_type


class LayerNormalizationOutputs(NamedTuple):
    """The outputs of layer_normalization(), under ONNX's names."""

    Y: np.ndarray
    Mean: np.ndarray | None
    InvStdDev: np.ndarray | None


def layer_normalization(
    X: ArrayLike,
    Scale: ArrayLike,
    B: ArrayLike | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = FLOAT,
    return_statistics: bool = False,
    backend: str = "auto",
) -> LayerNormalizationOutputs:
    """Return the outputs of ONNX's operator LayerNormalization, opset 17.

    Parameters
    ----------
    X : array of rank 1 and up, float16, bfloat16, float32 or float64
    Scale, B : broadcastable to X, dtype of X
    axis : int from -rank to rank - 1. The mean is taken over this axis and all after it.
    epsilon : finite float >= 0, added to the variance
    stash_type : 1. See Notes.
    return_statistics : bool. Return Mean and InvStdDev as well; None without it.
    backend : as in fastattn.attention

    Returns
    -------
    Y : array like X. (X - Mean) * InvStdDev * Scale + B
    Mean, InvStdDev : float32, of the shape of X with 1 for the axes of the mean

    Raises
    ------
    ValueError            shapes or values that do not fit together
    TypeError             dtypes that differ or are not supported
    NotImplementedError   another stash_type

    Notes
    -----
    Computed in float32, in float64 for float64, and rounded once.
    """
    x, scale = float_array("X", X), float_array("Scale", Scale)
    b = None if B is None else float_array("B", B)
    for name, a in (("Scale", scale), ("B", b)):
        if a is not None and a.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of X, {x.dtype}, got {a.dtype}")
    first = _check(x, axis, epsilon, stash_type)
    y = _normalized(LayerNormWeights, x, ("Scale", scale), b, first, epsilon, x.dtype, backend)
    statistics = _statistics(x, first, epsilon) if return_statistics else (None, None)
    return LayerNormalizationOutputs(y, *statistics)


def rms_normalization(
    X: ArrayLike,
    scale: ArrayLike,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = FLOAT,
    backend: str = "auto",
) -> np.ndarray:
    """Return the output of ONNX's operator RMSNormalization, opset 23.

    Parameters
    ----------
    X, axis, epsilon, stash_type, backend : as in layer_normalization()
    scale : broadcastable to X, of any of these dtypes

    Returns
    -------
    Y : shape of X, dtype of scale. X / sqrt(mean of the squares + epsilon) * scale

    Raises
    ------
    As layer_normalization().
    """
    x, weight = float_array("X", X), float_array("scale", scale)
    first = _check(x, axis, epsilon, stash_type)
    dtype = weight.dtype
    return _normalized(RMSNormWeights, x, ("scale", weight), None, first, epsilon, dtype, backend)


def _check(x: np.ndarray, axis: Any, epsilon: Any, stash_type: Any) -> int:
    """Return the first axis of the mean, or raise."""
    if stash_type != FLOAT:
        raise NotImplementedError(f"stash_type must be {FLOAT} (float32), got {stash_type!r}")
    eps = real("epsilon", epsilon)
    if not (isfinite(eps) and eps >= 0):
        raise ValueError(f"epsilon must be finite and not negative, got {epsilon!r}")
    if not x.ndim:
        raise ValueError("X must have rank 1 or more, got shape ()")
    rule = f"axis must lie between {-x.ndim} and {x.ndim - 1}, as X has shape {x.shape}"
    first = integer(rule, axis)
    if not -x.ndim <= first < x.ndim:
        raise ValueError(f"{rule}, got {first}")
    return first % x.ndim


def _normalized(
    kind: Any,
    x: np.ndarray,
    named_scale: tuple[str, np.ndarray],
    b: np.ndarray | None,
    first: int,
    epsilon: float,
    dtype: np.dtype,
    backend: str,
) -> np.ndarray:
    """Return the norm over axes `first` and on, scaled and shifted, in `dtype`."""
    name, scale = named_scale
    compute = np.result_type(x.dtype, scale.dtype, np.float32)
    parts = {name: scale} if b is None else {name: scale, "B": b}
    vectors = [_vector(part, a, x.shape, first, compute) for part, a in parts.items()]
    if not x.size:
        return np.empty(x.shape, dtype)
    features = prod(x.shape[first:])
    rows = x.astype(compute, copy=False).reshape(*x.shape[:first], features)
    is_own = any(vector is None for vector in vectors)  # a scale or B that differs between rows
    weights = [np.ones(features, compute)] if is_own else vectors
    y = add_norm(rows, kind(*weights, eps=float(epsilon)), backend=backend).reshape(x.shape)
    if not is_own and dtype == compute:
        return y
    with np.errstate(all="ignore"):
        if is_own:
            y *= scale.astype(compute, copy=False)
            if b is not None:
                y += b.astype(compute, copy=False)
        return y.astype(dtype, copy=False)


def _vector(
    name: str, a: np.ndarray, shape: tuple[int, ...], first: int, compute: np.dtype
) -> np.ndarray | None:
    """Return `a` as one vector for all rows; None where it differs between them."""
    a = a.astype(compute, copy=False)
    if a.shape == shape[first:]:
        return a.reshape(-1)
    try:
        np.broadcast_to(a, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to X, {shape}, got {a.shape}") from None
    extra = a.ndim - (len(shape) - first)
    if any(size != 1 for size in a.shape[: max(0, extra)]):
        return None
    own = a.reshape(a.shape[max(0, extra) :])
    return np.broadcast_to(own, shape[first:]).reshape(-1)


def _statistics(x: np.ndarray, first: int, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (Mean, InvStdDev) in float32."""
    axes = tuple(range(first, x.ndim))
    wide = x.astype(np.result_type(x.dtype, np.float32), copy=False)
    count = wide.dtype.type(prod(x.shape[first:]))
    with np.errstate(all="ignore"):
        mean = wide.sum(axis=axes, keepdims=True) / count
        centred = wide - mean
        variance = (centred * centred).sum(axis=axes, keepdims=True) / count
        inverse = 1 / np.sqrt(variance + wide.dtype.type(epsilon))
        return mean.astype(np.float32, copy=False), inverse.astype(np.float32, copy=False)
