"""The transformer layer in its original, post-norm form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .activations import gelu, relu
from .linear import LinearWeights, linear
from .multihead import multihead_attention
from .multihead_weights import MultiHeadWeights
from .norms import LayerNormWeights, layer_norm

ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {"gelu": gelu, "relu": relu}


@dataclass(frozen=True, slots=True, eq=False)
class TransformerLayerWeights:
    """Parameters of transformer_layer().

    attention, attention_norm : of the attention and of the normalisation after it
    up, down : weights (hidden_dim, model_dim) and (model_dim, hidden_dim) of the per-token network
    mlp_norm : of the normalisation after it
    activation : "gelu" (the erf form) or "relu"
    """

    attention: MultiHeadWeights
    attention_norm: LayerNormWeights
    up: LinearWeights
    down: LinearWeights
    mlp_norm: LayerNormWeights
    activation: str = "gelu"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {tuple(ACTIVATIONS)}, got {self.activation!r}"
            )
        qkv = self.attention.q.weight
        model_dim, hidden_dim = qkv.shape[1], self.up.weight.shape[0]
        for name, weight, shape in (
            ("attention_norm", self.attention_norm.weight, (model_dim,)),
            ("up", self.up.weight, (hidden_dim, model_dim)),
            ("down", self.down.weight, (model_dim, hidden_dim)),
            ("mlp_norm", self.mlp_norm.weight, (model_dim,)),
        ):
            if weight.shape != shape:
                raise ValueError(
                    f"{name} weight must have shape {shape} to fit the weights before it, "
                    f"got {weight.shape}"
                )
            if weight.dtype != qkv.dtype:
                raise TypeError(
                    f"{name} weight must have the dtype of qkv weight, {qkv.dtype}, "
                    f"got {weight.dtype}"
                )


def transformer_layer(
    x: np.ndarray,
    weights: TransformerLayerWeights,
    *,
    causal: bool = False,
    key_mask: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return one post-norm transformer layer of x.

    Attention, add, LayerNorm, per-token network, add, LayerNorm.

    Parameters
    ----------
    x : (..., tokens, model_dim), dtype of the weights
    weights : TransformerLayerWeights
    causal, key_mask, backend : as in multihead_attention

    Returns
    -------
    (..., tokens, model_dim), dtype of x

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   dtypes that differ or are not supported

    References
    ----------
    Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.1.
    Prince 2023, Understanding Deep Learning, section 12.4.
    """
    y = multihead_attention(x, weights.attention, causal=causal, key_mask=key_mask, backend=backend)
    y += x
    attended = layer_norm(y, weights.attention_norm, out=y)
    hidden = linear(attended, weights.up)
    ACTIVATIONS[weights.activation](hidden, out=hidden)
    y = linear(hidden, weights.down)
    y += attended
    return layer_norm(y, weights.mlp_norm, out=y)
