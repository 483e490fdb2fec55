"""The transformer layer and the encodings of positions, tokens as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .. import nn
from .attention import Head, multihead_self_attention, tokens_of


class TransformerLayer(NamedTuple):
    """Parameters of one layer."""

    heads: Sequence[Head | tuple[ArrayLike, ...]]  # as in multihead_self_attention
    omega_c: ArrayLike  # (D, heads * head_dim_v)
    gamma_1: ArrayLike  # (D, 1): scale and offset of the first LayerNorm
    delta_1: ArrayLike  # (D, 1)
    omega_0: ArrayLike  # (D_h, D): of the mlp
    omega_1: ArrayLike  # (D, D_h)
    beta_0: ArrayLike  # (D_h, 1)
    beta_1: ArrayLike  # (D, 1)
    gamma_2: ArrayLike  # (D, 1): of the second LayerNorm
    delta_2: ArrayLike  # (D, 1)


def transformer_layer(
    X: ArrayLike, layer: TransformerLayer, *, masked: bool = False, backend: str = "auto"
) -> np.ndarray:
    """Return the tokens after one transformer layer: equation 12.13, its four lines in turn.

        X <- X + MhSa[X]
        X <- LayerNorm[X]
        x_n <- x_n + mlp[x_n]       for all n
        X <- LayerNorm[X]

    Parameters
    ----------
    X : (D, N) float32 or float64
    layer : TransformerLayer
    masked : bool. As in masked_self_attention: the decoder's layer.
    backend : as in fastattn.attention.

    Returns
    -------
    (D, N), dtype of X

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   X is not float32 or float64
    """
    X = tokens_of("X", X)
    attended = multihead_self_attention(
        X, layer.heads, layer.omega_c, masked=masked, backend=backend
    )
    if attended.shape != X.shape:
        raise ValueError(f"omega_c must have {len(X)} rows to be added to X, got {len(attended)}")
    X = layer_norm(X + attended, layer.gamma_1, layer.delta_1, backend=backend)
    X = X + mlp(X, layer.omega_0, layer.omega_1, layer.beta_0, layer.beta_1)
    return layer_norm(X, layer.gamma_2, layer.delta_2, backend=backend)


def layer_norm(
    X: ArrayLike,
    gamma: ArrayLike,
    delta: ArrayLike,
    *,
    eps: float = 1e-5,
    backend: str = "auto",
) -> np.ndarray:
    """Return LayerNorm[X] of section 12.4: gamma (x_n - mean) / deviation + delta in each column.

    Parameters
    ----------
    X : (D, N) float32 or float64
    gamma, delta : (D, 1)
    eps : float, added to the variance
    backend : as in fastattn.attention.

    Returns
    -------
    (D, N), dtype of X
    """
    X = tokens_of("X", X)
    weight, bias = (
        _parameter(name, array, (len(X), 1), X.dtype)[:, 0]
        for name, array in (("gamma", gamma), ("delta", delta))
    )
    return nn.layer_norm(X.T, nn.LayerNormWeights(weight, bias, eps), backend=backend).T


def mlp(
    X: ArrayLike, omega_0: ArrayLike, omega_1: ArrayLike, beta_0: ArrayLike, beta_1: ArrayLike
) -> np.ndarray:
    """Return beta_1 + omega_1 ReLU[beta_0 + omega_0 x_n] of each column: mlp of section 12.4.

    Parameters
    ----------
    X : (D, N) float32 or float64
    omega_0, omega_1 : (D_h, D) and (rows, D_h); in the transformer layer, rows is D
    beta_0, beta_1 : (D_h, 1) and (rows, 1)

    Returns
    -------
    (rows, N), dtype of X
    """
    X = tokens_of("X", X)
    omega_0 = _parameter("omega_0", omega_0, (None, len(X)), X.dtype)
    omega_1 = _parameter("omega_1", omega_1, (None, len(omega_0)), X.dtype)
    beta_0 = _parameter("beta_0", beta_0, (len(omega_0), 1), X.dtype)
    beta_1 = _parameter("beta_1", beta_1, (len(omega_1), 1), X.dtype)
    hidden = omega_0 @ X
    hidden += beta_0
    y = omega_1 @ np.maximum(hidden, 0, out=hidden)
    y += beta_1
    return y


def positional_encodings(D: int, N: int, *, base: float = 10000.0) -> np.ndarray:
    """Return Π (D, N) float64 of section 12.3.1 with sines and cosines: nn.positions.sinusoidal.

    Column n is that of position n: no two are alike, and a token's place can be told from it.
    """
    return nn.positions.sinusoidal(np.arange(N), D, base=base, dtype=np.float64).T


def add_positions(X: ArrayLike, Pi: ArrayLike) -> np.ndarray:
    """Return X + Π: absolute encodings, section 12.3.1.

    Parameters
    ----------
    X : (D, N) float32 or float64
    Pi : (D, N or more), learned or positional_encodings(): a column for each position

    Returns
    -------
    (D, N), dtype of X
    """
    X = tokens_of("X", X)
    Pi = np.asarray(Pi, X.dtype)
    if Pi.ndim != 2 or len(Pi) != len(X) or Pi.shape[1] < X.shape[1]:
        raise ValueError(
            f"Pi must have shape ({len(X)}, {X.shape[1]} or more) to fit X, got {Pi.shape}"
        )
    return X + Pi[:, : X.shape[1]]


def _parameter(
    name: str, array: ArrayLike, shape: tuple[int | None, int], dtype: np.dtype
) -> np.ndarray:
    """The array in this dtype and shape, of which None is any size; or raise."""
    array = np.asarray(array, dtype)
    if array.ndim != 2 or array.shape[1] != shape[1] or shape[0] not in (None, len(array)):
        rows = "rows" if shape[0] is None else shape[0]
        raise ValueError(f"{name} must have shape ({rows}, {shape[1]}), got {array.shape}")
    return array
