"""Self-attention in the convention of the book "Understanding Deep Learning", chapter 12.

Tokens are columns: X is (D, N), N tokens of D features. Weights omega_* are (rows, D) and act from
the left, biases beta_* are columns (rows, 1). The core sees the same memory through transposed
views. Results have the dtype of X, float32 or float64; parameters are converted to it.

References
----------
Prince 2023, Understanding Deep Learning, MIT Press, chapter 12; its notebooks 12.1 and 12.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .api import attention

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class Head(NamedTuple):
    """Parameters of one head, in the order of the book's calls. Any tuple of six will do."""

    omega_v: ArrayLike  # (head_dim_v, D)
    omega_q: ArrayLike  # (head_dim, D)
    omega_k: ArrayLike  # (head_dim, D)
    beta_v: ArrayLike  # (head_dim_v, 1)
    beta_q: ArrayLike  # (head_dim, 1)
    beta_k: ArrayLike  # (head_dim, 1)


def softmax_cols(data_in: ArrayLike) -> np.ndarray:
    """Return the softmax of each column: equation 12.5 for all queries at once.

    Parameters
    ----------
    data_in : (rows, columns) float. Scores of any size: the column's maximum is subtracted first.

    Returns
    -------
    (rows, columns), columns that sum to 1
    """
    scores = np.asarray(data_in)
    weights = np.exp(scores - np.max(scores, axis=0))
    weights /= np.sum(weights, axis=0)
    return weights


def self_attention(
    X: ArrayLike,
    omega_v: ArrayLike,
    omega_q: ArrayLike,
    omega_k: ArrayLike,
    beta_v: ArrayLike,
    beta_q: ArrayLike,
    beta_k: ArrayLike,
    *,
    backend: str = "auto",
) -> np.ndarray:
    """Return V Softmax[Kᵀ Q], unscaled: equation 12.8, with V, Q and K of equation 12.6.

    Parameters
    ----------
    X : (D, N) float32 or float64
    omega_v, omega_q, omega_k : (head_dim_v, D), (head_dim, D), (head_dim, D)
    beta_v, beta_q, beta_k : (head_dim_v, 1), (head_dim, 1), (head_dim, 1)
    backend : as in fastattn.attention.

    Returns
    -------
    (head_dim_v, N), dtype of X

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   X is not float32 or float64
    """
    head = Head(omega_v, omega_q, omega_k, beta_v, beta_q, beta_k)
    return _attend(*_checked(X, [head], [""]), 1.0, backend)


def scaled_dot_product_self_attention(
    X: ArrayLike,
    omega_v: ArrayLike,
    omega_q: ArrayLike,
    omega_k: ArrayLike,
    beta_v: ArrayLike,
    beta_q: ArrayLike,
    beta_k: ArrayLike,
    *,
    backend: str = "auto",
) -> np.ndarray:
    """Return V Softmax[Kᵀ Q / sqrt(head_dim)]: equation 12.9. Otherwise as self_attention."""
    head = Head(omega_v, omega_q, omega_k, beta_v, beta_q, beta_k)
    return _attend(*_checked(X, [head], [""]), None, backend)


def multihead_scaled_self_attention(
    X: ArrayLike,
    omega_v1: ArrayLike,
    omega_q1: ArrayLike,
    omega_k1: ArrayLike,
    beta_v1: ArrayLike,
    beta_q1: ArrayLike,
    beta_k1: ArrayLike,
    omega_v2: ArrayLike,
    omega_q2: ArrayLike,
    omega_k2: ArrayLike,
    beta_v2: ArrayLike,
    beta_q2: ArrayLike,
    beta_k2: ArrayLike,
    omega_c: ArrayLike,
    *,
    backend: str = "auto",
) -> np.ndarray:
    """Return multi-head self-attention of two heads: the call of the book's notebook 12.2.

    Equations 12.10 to 12.12, as in multihead_self_attention, which takes any number of heads.
    """
    heads = (
        Head(omega_v1, omega_q1, omega_k1, beta_v1, beta_q1, beta_k1),
        Head(omega_v2, omega_q2, omega_k2, beta_v2, beta_q2, beta_k2),
    )
    return _multihead(X, heads, ["1", "2"], omega_c, backend)


def multihead_self_attention(
    X: ArrayLike,
    heads: Sequence[Head | tuple[ArrayLike, ...]],
    omega_c: ArrayLike,
    *,
    backend: str = "auto",
) -> np.ndarray:
    """Return omega_c [Sa_1ᵀ, Sa_2ᵀ, ...]ᵀ: equation 12.12, for any number of heads.

    Parameters
    ----------
    X : (D, N) float32 or float64
    heads : one Head each, all of the same shapes. V_h, Q_h and K_h are equation 12.10, and
        Sa_h = V_h Softmax[K_hᵀ Q_h / sqrt(head_dim)] is equation 12.11.
    omega_c : (rows, heads * head_dim_v); in the book (D, D)
    backend : as in fastattn.attention.

    Returns
    -------
    (rows, N), dtype of X

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   X is not float32 or float64
    """
    if not len(heads):
        raise ValueError("heads must hold at least one head, got none")
    for h, head in enumerate(heads):
        if len(head) != len(Head._fields):
            raise ValueError(f"heads[{h}] must hold 6 arrays {Head._fields}, got {len(head)}")
    names = [f" of heads[{h}]" for h in range(len(heads))]
    return _multihead(X, [Head(*head) for head in heads], names, omega_c, backend)


def _multihead(
    X: ArrayLike,
    heads: Sequence[Head],
    suffixes: Sequence[str],
    omega_c: ArrayLike,
    backend: str,
) -> np.ndarray:
    X, heads = _checked(X, heads, suffixes)
    omega_c = np.asarray(omega_c, X.dtype)
    rows = sum(np.shape(head.omega_v)[0] for head in heads)
    if omega_c.ndim != 2 or omega_c.shape[1] != rows:
        raise ValueError(
            f"omega_c must have shape (rows, {rows}) to fit the heads, got {omega_c.shape}"
        )
    return omega_c @ _attend(X, heads, None, backend)


def _attend(X: np.ndarray, heads: Sequence[Head], scale: float | None, backend: str) -> np.ndarray:
    """All Sa_h below one another: (heads * head_dim_v, N)."""
    omega_v, omega_q, omega_k, beta_v, beta_q, beta_k = map(np.stack, zip(*heads, strict=True))
    v = beta_v + omega_v @ X  # (heads, head_dim_v, N): equation 12.10, as are q and k
    q = beta_q + omega_q @ X
    k = beta_k + omega_k @ X
    out = np.empty_like(v)
    rows = (array.swapaxes(1, 2) for array in (q, k, v))  # views with tokens as rows
    attention(*rows, scale=scale, out=out.swapaxes(1, 2), backend=backend)
    return out.reshape(v.shape[0] * v.shape[1], v.shape[2])


def _checked(
    X: ArrayLike, heads: Sequence[Head], suffixes: Sequence[str]
) -> tuple[np.ndarray, list[Head]]:
    """X and the heads as arrays of one dtype. suffixes[h] ends the names of head h in errors."""
    X = np.asarray(X)
    if X.dtype not in FLOATS:
        raise TypeError(f"X must be float32 or float64, got {X.dtype}")
    if X.ndim != 2:
        raise ValueError(f"X must have shape (D, N), got {X.shape}")
    heads = [Head(*(np.asarray(array, X.dtype) for array in head)) for head in heads]
    _check_first_head(heads[0], suffixes[0], X.shape[0])
    head_dim_v, head_dim = np.shape(heads[0].omega_v)[0], np.shape(heads[0].omega_q)[0]
    rows = {"v": head_dim_v, "q": head_dim, "k": head_dim}
    for head, suffix in zip(heads, suffixes, strict=True):
        for name, array in head._asdict().items():
            shape = (rows[name[-1]], X.shape[0] if name.startswith("omega") else 1)
            if array.shape != shape:
                raise ValueError(f"{name}{suffix} must have shape {shape}, got {array.shape}")
    return X, heads


def _check_first_head(head: Head, suffix: str, features: int) -> None:
    """Raise unless omega_v and omega_q fit X: their rows then say what all else must be."""
    for name in ("omega_v", "omega_q"):
        shape = np.shape(getattr(head, name))
        if len(shape) != 2 or shape[1] != features:
            raise ValueError(
                f"{name}{suffix} must have shape (rows, {features}) to fit X, got {shape}"
            )
