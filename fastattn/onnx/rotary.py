"""ONNX's RotaryEmbedding, opset 23, as a function of NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import integer
from ..arrays import all_below, integers
from ..nn.positions.rotary import turned
from .heads import PACKED, check_rank, count_of, float_array, split

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def rotary_embedding(
    X: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    backend: str = "auto",
) -> np.ndarray:
    """Return the output of ONNX's operator RotaryEmbedding, opset 23.

    Parameters
    ----------
    X : (batch, num_heads, tokens, head_size) float16, bfloat16, float32 or float64
        Or packed: (batch, tokens, num_heads * head_size).
    cos_cache, sin_cache : (positions, rotary_embedding_dim / 2), dtype of X
        Of each position's angles; without position_ids of each token's: (batch, tokens, ...).
    position_ids : (batch, tokens) ints from 0 to positions - 1
    interleaved : 0 or 1
        Pairs are features (2t, 2t + 1), not (t, t + rotary_embedding_dim / 2).
    num_heads : int, for packed arrays only; ignored for others
    rotary_embedding_dim : even int
        The first features of a head, which are turned. Default 0: all.
    backend : as in fastattn.attention

    Returns
    -------
    Y : array like X, C-contiguous

    Raises
    ------
    ValueError   shapes or values that do not fit together
    TypeError    dtypes that differ or are not supported

    Notes
    -----
    Computed in float32, or float64 for float64, and rounded once.
    """
    x, cos, sin = float_array("X", X), float_array("cos_cache", cos_cache), sin_cache
    sin = float_array("sin_cache", sin)
    check_rank("X", x)
    heads = x
    if x.ndim == PACKED:
        heads = split("X", x, "num_heads", count_of("num_heads", num_heads, "X"))
    pairs = _pairs(rotary_embedding_dim, heads.shape[3])
    if interleaved not in (0, 1):
        raise ValueError(f"interleaved must be 0 or 1, got {interleaved!r}")
    for name, cache in (("cos_cache", cos), ("sin_cache", sin)):
        _check_cache(name, cache, x.dtype, pairs, 3 if position_ids is None else 2)
    if cos.shape != sin.shape:
        rule = "cos_cache and sin_cache must have the same shape"
        raise ValueError(f"{rule}, got {cos.shape} and {sin.shape}")
    tokens = heads.shape[0], heads.shape[2]
    if position_ids is None:
        _check_tokens(cos, tokens)
    else:
        at = _positions(position_ids, tokens, len(cos))
        cos, sin = cos.take(at, axis=0), sin.take(at, axis=0)
    return _turned(x, heads, cos, sin, bool(interleaved), backend)


def _turned(
    x: np.ndarray,
    heads: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    interleaved: bool,
    backend: str,
) -> np.ndarray:
    """Return x turned; `heads` is its view (batch, heads, tokens, head_size)."""
    cos, sin = (a.astype(np.result_type(x.dtype, np.float32), copy=False) for a in (cos, sin))
    if x.ndim == PACKED:
        # One angle for all heads of a token: to apply_rotary(), heads are the tokens of many rows.
        rows, cos, sin = heads.swapaxes(1, 2), cos[:, :, None], sin[:, :, None]
    else:
        rows, cos, sin = heads, cos[:, None], sin[:, None]
    return turned(rows, cos, sin, interleaved=interleaved, backend=backend).reshape(x.shape)


def _pairs(rotary_embedding_dim: Any, head_size: int) -> int:
    rule = f"rotary_embedding_dim must be even, from 0 (all) to the head size {head_size}"
    width = integer(rule, rotary_embedding_dim) or head_size
    if width % 2 or not 0 <= width <= head_size:
        raise ValueError(f"{rule}, got {width}")
    return width // 2


def _check_cache(name: str, cache: np.ndarray, dtype: np.dtype, pairs: int, rank: int) -> None:
    if cache.dtype != dtype:
        raise TypeError(f"{name} must have the dtype of X, {dtype}, got {cache.dtype}")
    if cache.ndim != rank or cache.shape[-1] != pairs:
        lead = "positions" if rank == 2 else "batch, tokens"
        raise ValueError(f"{name} must have shape ({lead}, {pairs}), got {cache.shape}")


def _check_tokens(cos: np.ndarray, tokens: tuple[int, int]) -> None:
    if cos.shape[:2] != tokens:
        rule = f"cos_cache must have shape {(*tokens, cos.shape[2])} if position_ids is None"
        raise ValueError(f"{rule}, got {cos.shape}")


def _positions(position_ids: Any, tokens: tuple[int, int], positions: int) -> np.ndarray:
    at = integers("position_ids", "ints of shape (batch, tokens)", position_ids)
    if at.shape != tokens:
        raise ValueError(f"position_ids must have shape {tokens}, got {at.shape}")
    if not all_below(positions, at.astype(np.int64)):
        rule = f"position_ids must lie between 0 and {positions - 1}"
        raise ValueError(f"{rule}, got {at.min()} to {at.max()}")
    return at
