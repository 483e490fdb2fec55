"""Normalisation over the features of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .compiled import compiled
from .linear import Record, check_float_array, check_like, check_tokens, check_vector


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerNormWeights(Record):
    """Parameters of layer_norm(): weight and bias (features,), eps added to the variance."""

    function: ClassVar[str] = "layer_norm"
    weight: np.ndarray
    bias: np.ndarray | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        _check_scale(self.weight, self.eps)
        if self.bias is not None:
            check_vector("bias", self.bias, self.weight.shape[0], self.weight.dtype)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RMSNormWeights(Record):
    """Parameters of rms_norm(): weight (features,), eps added to the mean of the squares."""

    function: ClassVar[str] = "rms_norm"
    bias: ClassVar[None] = None
    weight: np.ndarray
    eps: float = 1e-5

    def __post_init__(self) -> None:
        _check_scale(self.weight, self.eps)


NormWeights = LayerNormWeights | RMSNormWeights


def layer_norm(
    x: np.ndarray,
    weights: LayerNormWeights,
    *,
    out: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, per token.

    The variance is the biased one: the mean of the squares. Arguments and errors as in add_norm().

    References
    ----------
    Ba, Kiros, Hinton 2016, Layer Normalization, arXiv:1607.06450.
    """
    return add_norm(x, weights, out=out, backend=backend)


def rms_norm(
    x: np.ndarray, weights: RMSNormWeights, *, out: np.ndarray | None = None, backend: str = "auto"
) -> np.ndarray:
    """Return x / sqrt(mean of the squares + eps) * weight, per token.

    Arguments and errors as in add_norm().

    References
    ----------
    Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    return add_norm(x, weights, out=out, backend=backend)


def add_norm(
    x: np.ndarray,
    weights: NormWeights,
    *,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    total: np.ndarray | None = None,
    out: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return layer_norm() or rms_norm() of x + bias + residual in one pass.

    Parameters
    ----------
    x : (..., features), dtype of the weights
    weights : LayerNormWeights or RMSNormWeights, which decide the norm
    bias : (features,), dtype of x. Default 0.
    residual : array like x. Default 0.
    total : array like x, receives x + bias + residual; may be x or residual.
    out : array like x, written in place; may be x or residual, not total.
    backend : "auto", "numpy" or "cpu", as in fastattn.attention

    Returns
    -------
    (..., features), dtype of x

    Raises
    ------
    ValueError   shapes that do not fit together; total and out share memory
    TypeError    dtypes that differ or are not supported
    ImportError  backend="cpu" and no compiler is installed
    """
    check_tokens(x, weights.weight)
    if bias is not None:
        check_vector("bias", bias, x.shape[-1], x.dtype, "x")
    for name, array in (("residual", residual), ("total", total), ("out", out)):
        if array is not None:
            check_like(name, array, "x", x)
    if out is not None and total is not None and np.may_share_memory(out, total):
        raise ValueError("total must not share memory with out, got overlapping arrays")
    run = compiled(weights.function, x.dtype, backend)
    fresh = out is total is None
    out = np.empty_like(x) if out is None else out
    if run is None:
        with np.errstate(all="ignore"):  # infinities go where they go, as in the kernel
            _norm_in_numpy(x, weights, bias, residual, total, out)
    else:
        scale = (weights.weight, weights.bias)
        run(weights.function, out, x, bias, residual, total, *scale, eps=weights.eps, fresh=fresh)
    return out


def _norm_in_numpy(
    x: np.ndarray,
    weights: NormWeights,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    total: np.ndarray | None,
    out: np.ndarray,
) -> None:
    for term in (bias, residual):
        x = x if term is None else x + term
    if total is not None:
        total[...] = x
    if isinstance(weights, LayerNormWeights):
        # Centred before it is squared: mean(x²) - mean² loses all digits when the mean is large.
        x = x - x.mean(axis=-1, keepdims=True)
    variance = np.einsum("...i,...i->...", x, x)[..., None] / x.dtype.type(x.shape[-1])
    np.multiply(x, 1 / np.sqrt(variance + x.dtype.type(weights.eps)), out=out)
    out *= weights.weight
    if weights.bias is not None:
        out += weights.bias


def _check_scale(weight: np.ndarray, eps: float) -> None:
    check_float_array("weight", weight)
    if weight.ndim != 1:
        raise ValueError(f"weight must have shape (features,), got {weight.shape}")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and not negative, got {eps}")
