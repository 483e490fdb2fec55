"""Multi-head self-attention: one projection to q, k and v, the core, one projection back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..api import attention
from .linear import LinearWeights, check_tokens, linear


@dataclass(frozen=True, slots=True, eq=False)
class MultiHeadWeights:
    """Parameters of multihead_attention().

    qkv : weight (3 * num_heads * head_dim, model_dim): the rows of q, then of k, then of v, each
        head after head, so that one matrix product makes all three
    out : weight (model_dim, num_heads * head_dim)
    """

    qkv: LinearWeights
    out: LinearWeights
    num_heads: int

    def __post_init__(self) -> None:
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}")
        rows, model_dim = self.qkv.weight.shape
        if rows % (3 * self.num_heads):
            raise ValueError(
                f"qkv weight must have a multiple of 3 * num_heads = {3 * self.num_heads} rows, "
                f"got shape {self.qkv.weight.shape}"
            )
        if self.out.weight.shape != (model_dim, rows // 3):
            raise ValueError(
                f"out weight must have shape {(model_dim, rows // 3)} to fit qkv weight "
                f"{self.qkv.weight.shape}, got {self.out.weight.shape}"
            )
        if self.out.weight.dtype != self.qkv.weight.dtype:
            raise TypeError(
                f"out weight must have the dtype of qkv weight, {self.qkv.weight.dtype}, "
                f"got {self.out.weight.dtype}"
            )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.qkv.weight.shape[0] // (3 * self.num_heads)


def multihead_attention(
    x: np.ndarray,
    weights: MultiHeadWeights,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return the self-attention of the tokens of x, several heads side by side.

    Parameters
    ----------
    x : (..., tokens, model_dim), dtype of the weights
    weights : MultiHeadWeights
    causal : bool
        Token i sees tokens j <= i.
    key_mask : (..., tokens) bool, True = may be attended: False marks padding.
        What padding tokens hold, NaN included, reaches no other token; their own rows of the
        result are computed like all others.
    backend : as in fastattn.attention.

    Returns
    -------
    (..., tokens, model_dim), dtype of x

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   dtypes that differ or are not supported

    References
    ----------
    Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    """
    check_tokens(x, weights.qkv.weight)
    if x.ndim < 2:
        raise ValueError(f"x must have shape (..., tokens, model_dim), got {x.shape}")
    mask = None if key_mask is None else _core_mask(key_mask, x.shape[:-1])
    heads = (*x.shape[:-1], weights.num_heads, weights.head_dim)
    qkv = linear(x, weights.qkv).reshape(*x.shape[:-1], 3, *heads[-2:])
    q, k, v = (qkv[..., i, :, :].swapaxes(-3, -2) for i in range(3))  # views: no head is copied
    mixed = np.empty(heads, x.dtype)
    attention(q, k, v, causal=causal, mask=mask, out=mixed.swapaxes(-3, -2), backend=backend)
    return linear(mixed.reshape(*x.shape[:-1], heads[-2] * heads[-1]), weights.out)


def _core_mask(key_mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """key_mask of exactly the given shape as (..., 1, 1, tokens), which the core broadcasts.

    Exactly: a (batch, tokens) mask of another meaning would broadcast silently if batch == tokens.
    """
    key_mask = np.asarray(key_mask)
    if key_mask.dtype != np.bool_:
        raise TypeError(f"key_mask must be bool, got {key_mask.dtype}")
    if key_mask.shape != shape:
        raise ValueError(
            f"key_mask must have the shape of x without its last dimension, {shape}, "
            f"got {key_mask.shape}"
        )
    return key_mask[..., None, None, :]
