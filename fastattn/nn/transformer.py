"""The transformer layer, post-norm and pre-norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..signatures import passing_keywords_to
from .activations import activate, check_activation
from .linear import LinearWeights, Record, linear
from .multihead import multihead_attention
from .multihead_weights import MultiHeadWeights
from .norms import NormWeights, add_norm


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TransformerLayerWeights(Record):
    """Parameters of transformer_layer().

    attention, attention_norm : of the attention and of its normalisation
    up, down : weights (hidden_dim, model_dim) and (model_dim, hidden_dim) of the per-token network.
        If gated, up has 2 * hidden_dim rows, those of the gate first: the network is
        down(f(gate(x)) * up(x)).
    mlp_norm : of its normalisation. Each norm is a LayerNormWeights or an RMSNormWeights.
    activation : "gelu" (the erf form), "gelu_tanh", "relu" or "silu"
    gated : bool
    norm_first : bool
        Pre-norm, x + f(norm(x)), in place of the original post-norm, norm(x + f(x)).
    """

    attention: MultiHeadWeights
    attention_norm: NormWeights
    up: LinearWeights
    down: LinearWeights
    mlp_norm: NormWeights
    activation: str = "gelu"
    gated: bool = False
    norm_first: bool = False

    def __post_init__(self) -> None:
        check_activation("activation", self.activation)
        qkv = self.attention.q.weight
        model_dim, hidden_dim = qkv.shape[1], self.up.weight.shape[0]
        if self.gated:
            if hidden_dim % 2:
                raise ValueError(
                    f"up weight must have an even number of rows if gated, got {hidden_dim}"
                )
            hidden_dim //= 2
        for name, weight, shape in (
            ("attention_norm", self.attention_norm.weight, (model_dim,)),
            ("up", self.up.weight, (self.up.weight.shape[0], model_dim)),
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


@passing_keywords_to(multihead_attention)
def transformer_layer(
    x: np.ndarray, weights: TransformerLayerWeights, *, backend: str = "auto", **options: Any
) -> np.ndarray:
    """Return one transformer layer of x.

    Post-norm: attention, add, norm, per-token network, add, norm. Pre-norm: norm, attention, add,
    norm, per-token network, add.

    Parameters
    ----------
    x : (..., tokens, model_dim), dtype of the weights
    weights : TransformerLayerWeights
    backend : "auto", "numpy" or "cpu", as in fastattn.attention
    options : causal, key_mask and the other keywords of multihead_attention

    Returns
    -------
    (..., tokens, model_dim), dtype of x

    Raises
    ------
    ValueError   shapes that do not fit together
    TypeError    dtypes that differ or are not supported
    ImportError  backend="cpu" and no compiler is installed

    References
    ----------
    Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.1: post-norm.
    Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, arXiv:2002.04745:
    pre-norm.
    Prince 2023, Understanding Deep Learning, section 12.4.
    """
    attention_norm, mlp_norm, down = weights.attention_norm, weights.mlp_norm, weights.down
    if not weights.norm_first:
        y = multihead_attention(x, weights.attention, backend=backend, **options)
        x = add_norm(y, attention_norm, residual=x, out=y, backend=backend)
        y = linear(_hidden(x, weights, backend), LinearWeights(down.weight))
        return add_norm(y, mlp_norm, bias=down.bias, residual=x, out=y, backend=backend)
    y = add_norm(x, attention_norm, backend=backend)
    y = multihead_attention(y, weights.attention, backend=backend, **options)
    normed = add_norm(y, mlp_norm, residual=x, total=y, backend=backend)
    y += linear(_hidden(normed, weights, backend), down)
    return y


def _hidden(x: np.ndarray, weights: TransformerLayerWeights, backend: str) -> np.ndarray:
    """The hidden units of the per-token network, (..., tokens, hidden_dim)."""
    name, bias = weights.activation, weights.up.bias
    if not weights.gated:
        hidden = linear(x, LinearWeights(weights.up.weight))
        return activate(name, hidden, bias=bias, out=hidden, backend=backend)
    hidden = linear(x, weights.up)
    hidden_dim = hidden.shape[-1] // 2
    gate, up = hidden[..., :hidden_dim], hidden[..., hidden_dim:]
    return activate(name, gate, up=up, backend=backend)
