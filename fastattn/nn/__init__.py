"""Layers around the core: projections, heads, normalisation and the per-token network.

Tokens are rows: x is (..., tokens, model_dim). Weight matrices are (out_features, in_features), as
torch and checkpoint files store them, so that a layer computes x @ weight.T + bias. The parameters
of a layer are one frozen record, checked once, when it is made; layers check only what they are
called with. float32 and float64; x, weights and result have one dtype.

KVCache keeps the keys and values of earlier tokens; nn.positions has the encodings of positions.
"""

from . import positions
from .activations import activate, gelu, gelu_tanh, relu, silu
from .backward import (
    activate_backward,
    linear_backward,
    multihead_attention_backward,
    norm_backward,
    transformer_layer_backward,
)
from .cache import KVCache
from .linear import LinearWeights, linear, stack_linear
from .loading import load_multihead
from .multihead import join_heads, multihead_attention, project_heads, project_keys
from .multihead_weights import MultiHeadWeights
from .norms import LayerNormWeights, RMSNormWeights, add_norm, layer_norm, rms_norm
from .transformer import TransformerLayerWeights, transformer_layer

__all__ = [
    "KVCache",
    "LayerNormWeights",
    "LinearWeights",
    "MultiHeadWeights",
    "RMSNormWeights",
    "TransformerLayerWeights",
    "activate",
    "activate_backward",
    "add_norm",
    "gelu",
    "gelu_tanh",
    "join_heads",
    "layer_norm",
    "linear",
    "linear_backward",
    "load_multihead",
    "multihead_attention",
    "multihead_attention_backward",
    "norm_backward",
    "positions",
    "project_heads",
    "project_keys",
    "relu",
    "rms_norm",
    "silu",
    "stack_linear",
    "transformer_layer",
    "transformer_layer_backward",
]
