"""Self-attention and cross-attention, one head or several, tokens as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..api import attention

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
    return _one_head(X, None, head, False, backend, 1.0)


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
    return _one_head(X, None, head, False, backend)


def masked_self_attention(
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
    """Return equation 12.9 where token n sees tokens m <= n only: section 12.7.2.

    That is, the entries of Kᵀ Q below its diagonal, of later keys (rows) for earlier queries
    (columns), are set to minus infinity before the softmax. Otherwise as self_attention.
    """
    head = Head(omega_v, omega_q, omega_k, beta_v, beta_q, beta_k)
    return _one_head(X, None, head, True, backend)


def cross_attention(
    X: ArrayLike,
    E: ArrayLike,
    omega_v: ArrayLike,
    omega_q: ArrayLike,
    omega_k: ArrayLike,
    beta_v: ArrayLike,
    beta_q: ArrayLike,
    beta_k: ArrayLike,
    *,
    backend: str = "auto",
) -> np.ndarray:
    """Return equation 12.9 with queries of X, keys and values of E: section 12.8.

    Parameters
    ----------
    X : (D, N) float32 or float64. The decoder's tokens.
    E : (D_e, N_e). The encoder's.
    omega_v, omega_q, omega_k : (head_dim_v, D_e), (head_dim, D), (head_dim, D_e)
    others : as in self_attention

    Returns
    -------
    (head_dim_v, N), dtype of X
    """
    head = Head(omega_v, omega_q, omega_k, beta_v, beta_q, beta_k)
    return _one_head(X, E, head, False, backend)


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
    return _multihead(X, None, heads, ["1", "2"], omega_c, False, backend)


def multihead_self_attention(
    X: ArrayLike,
    heads: Sequence[Head | tuple[ArrayLike, ...]],
    omega_c: ArrayLike,
    *,
    masked: bool = False,
    backend: str = "auto",
) -> np.ndarray:
    """Return omega_c [Sa_1ᵀ, Sa_2ᵀ, ...]ᵀ: equation 12.12, for any number of heads.

    Parameters
    ----------
    X : (D, N) float32 or float64
    heads : one Head each, all of the same shapes. V_h, Q_h and K_h are equation 12.10, and
        Sa_h = V_h Softmax[K_hᵀ Q_h / sqrt(head_dim)] is equation 12.11.
    omega_c : (rows, heads * head_dim_v); in the book (D, D)
    masked : bool. As in masked_self_attention, section 12.7.2.
    backend : as in fastattn.attention.

    Returns
    -------
    (rows, N), dtype of X

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   X is not float32 or float64
    """
    return _multihead(X, None, *_named(heads), omega_c, masked, backend)


def multihead_cross_attention(
    X: ArrayLike,
    E: ArrayLike,
    heads: Sequence[Head | tuple[ArrayLike, ...]],
    omega_c: ArrayLike,
    *,
    backend: str = "auto",
) -> np.ndarray:
    """Return equation 12.12 with queries of X, keys and values of E: section 12.8.

    X and E are as in cross_attention, the others as in multihead_self_attention.
    """
    return _multihead(X, E, *_named(heads), omega_c, False, backend)


def _named(heads: Sequence[Head | tuple[ArrayLike, ...]]) -> tuple[list[Head], list[str]]:
    """The heads, and how errors end the names of each one's parameters."""
    if not len(heads):
        raise ValueError("heads must hold at least one head, got none")
    for h, head in enumerate(heads):
        if len(head) != len(Head._fields):
            raise ValueError(f"heads[{h}] must hold 6 arrays {Head._fields}, got {len(head)}")
    return [Head(*head) for head in heads], [f" of heads[{h}]" for h in range(len(heads))]


def _one_head(
    X: ArrayLike,
    E: ArrayLike | None,
    head: Head,
    masked: bool,
    backend: str,
    scale: float | None = None,
) -> np.ndarray:
    return _attend(*_checked(X, E, [head], [""]), masked, backend, scale)


def _multihead(
    X: ArrayLike,
    E: ArrayLike | None,
    heads: Sequence[Head],
    suffixes: Sequence[str],
    omega_c: ArrayLike,
    masked: bool,
    backend: str,
) -> np.ndarray:
    X, E, heads = _checked(X, E, heads, suffixes)
    omega_c = np.asarray(omega_c, X.dtype)
    rows = sum(np.shape(head.omega_v)[0] for head in heads)
    if omega_c.ndim != 2 or omega_c.shape[1] != rows:
        raise ValueError(
            f"omega_c must have shape (rows, {rows}) to fit the heads, got {omega_c.shape}"
        )
    return omega_c @ _attend(X, E, heads, masked, backend)


def _attend(
    X: np.ndarray,
    E: np.ndarray | None,
    heads: Sequence[Head],
    masked: bool,
    backend: str,
    scale: float | None = None,
) -> np.ndarray:
    """All Sa_h below one another: (heads * head_dim_v, N)."""
    parameters = map(np.concatenate, zip(*heads, strict=True))
    omega_v, omega_q, omega_k, beta_v, beta_q, beta_k = parameters
    E = X if E is None else E
    # (heads, dim, tokens): equation 12.10, one product for all heads
    v, q, k = (
        (beta + omega @ tokens).reshape(len(heads), len(omega) // len(heads), tokens.shape[1])
        for omega, beta, tokens in (
            (omega_v, beta_v, E),
            (omega_q, beta_q, X),
            (omega_k, beta_k, E),
        )
    )
    out = np.empty((*v.shape[:2], X.shape[1]), X.dtype)
    attention(
        *(array.swapaxes(1, 2) for array in (q, k, v)),  # views with tokens as rows
        scale=scale,
        causal=masked,
        out=out.swapaxes(1, 2),
        backend=backend,
    )
    return out.reshape(out.shape[0] * out.shape[1], out.shape[2])


def _checked(
    X: ArrayLike, E: ArrayLike | None, heads: Sequence[Head], suffixes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray | None, list[Head]]:
    """X, E and the heads as arrays of one dtype. suffixes[h] ends the names of head h in errors."""
    X = tokens_of("X", X)
    E = None if E is None else tokens_of("E", E, X.dtype)
    heads = [Head(*(np.asarray(array, X.dtype) for array in head)) for head in heads]
    source = ("X", X) if E is None else ("E", E)
    _check_first("omega_v", heads[0].omega_v, suffixes[0], *source)
    _check_first("omega_q", heads[0].omega_q, suffixes[0], "X", X)
    head_dim_v, head_dim = np.shape(heads[0].omega_v)[0], np.shape(heads[0].omega_q)[0]
    rows = {"v": head_dim_v, "q": head_dim, "k": head_dim}
    columns = {"v": len(source[1]), "q": len(X), "k": len(source[1])}
    for head, suffix in zip(heads, suffixes, strict=True):
        for name, array in head._asdict().items():
            wide = columns[name[-1]] if name.startswith("omega") else 1
            if array.shape != (rows[name[-1]], wide):
                raise ValueError(
                    f"{name}{suffix} must have shape {(rows[name[-1]], wide)}, got {array.shape}"
                )
    return X, E, heads


def tokens_of(name: str, X: ArrayLike, dtype: np.dtype | None = None) -> np.ndarray:
    """X as an array of columns, of `dtype` or of one of FLOATS, or raise."""
    X = np.asarray(X, dtype)
    if X.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or float64, got {X.dtype}")
    if X.ndim != 2:
        raise ValueError(f"{name} must have shape (D, N), got {X.shape}")
    return X


def _check_first(name: str, omega: ArrayLike, suffix: str, source: str, tokens: np.ndarray) -> None:
    """Raise unless omega fits its tokens: its rows then say what all else must be."""
    shape = np.shape(omega)
    if len(shape) != 2 or shape[1] != len(tokens):
        raise ValueError(
            f"{name}{suffix} must have shape (rows, {len(tokens)}) to fit {source}, got {shape}"
        )
