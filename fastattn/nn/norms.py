"""Normalisation over the features of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .linear import check_float_array, check_tokens, check_vector


@dataclass(frozen=True, slots=True, eq=False)
class LayerNormWeights:
    """Parameters of layer_norm(): weight and bias (features,), eps added to the variance."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_float_array("weight", self.weight)
        if self.weight.ndim != 1:
            raise ValueError(f"weight must have shape (features,), got {self.weight.shape}")
        if self.bias is not None:
            check_vector("bias", self.bias, self.weight.shape[0], self.weight.dtype)
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be finite and not negative, got {self.eps}")


def layer_norm(
    x: np.ndarray, weights: LayerNormWeights, out: np.ndarray | None = None
) -> np.ndarray:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, per token.

    The variance is the biased one: the mean of the squares.

    Parameters
    ----------
    x : (..., features), dtype of the weights
    weights : LayerNormWeights
    out : array like x, written in place; may be x itself.

    Returns
    -------
    (..., features), dtype of x

    Raises
    ------
    ValueError  x does not fit the weights
    TypeError   dtypes that differ

    References
    ----------
    Ba, Kiros, Hinton 2016, Layer Normalization, arXiv:1607.06450.
    """
    check_tokens(x, weights.weight)
    # Centred before it is squared: mean(x²) - mean² loses all digits when the mean is large.
    y = np.subtract(x, x.mean(axis=-1, keepdims=True), out=out)
    variance = np.einsum("...i,...i->...", y, y)[..., None] / x.dtype.type(x.shape[-1])
    y *= 1 / np.sqrt(variance + x.dtype.type(weights.eps))
    y *= weights.weight
    if weights.bias is not None:
        y += weights.bias
    return y
