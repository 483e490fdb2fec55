"""Transformers in the convention of the book "Understanding Deep Learning", chapter 12.

Tokens are columns: X is (D, N), N tokens of D features. Weights omega_* are (rows, D) and act from
the left, biases beta_* are columns (rows, 1). The core sees the same memory through transposed
views. Results have the dtype of X, float32 or float64; parameters are converted to it.

section  equation        here
12.2     12.5            softmax_cols
12.2.3   12.6 to 12.8    self_attention
12.3.1   X + Π           positional_encodings, add_positions
12.3.2   12.9            scaled_dot_product_self_attention
12.3.3   12.10 to 12.12  multihead_self_attention, multihead_scaled_self_attention
12.4     12.13           transformer_layer of a TransformerLayer, layer_norm, mlp
12.7.2   masked          masked_self_attention, and masked=True where there are several heads
12.8     cross           cross_attention, multihead_cross_attention

References
----------
Prince 2023, Understanding Deep Learning, MIT Press, chapter 12; its notebooks 12.1 and 12.2.
"""

from .attention import (
    Head,
    cross_attention,
    masked_self_attention,
    multihead_cross_attention,
    multihead_scaled_self_attention,
    multihead_self_attention,
    scaled_dot_product_self_attention,
    self_attention,
    softmax_cols,
)
from .layers import (
    TransformerLayer,
    add_positions,
    layer_norm,
    mlp,
    positional_encodings,
    transformer_layer,
)

__all__ = [
    "Head",
    "TransformerLayer",
    "add_positions",
    "cross_attention",
    "layer_norm",
    "masked_self_attention",
    "mlp",
    "multihead_cross_attention",
    "multihead_scaled_self_attention",
    "multihead_self_attention",
    "positional_encodings",
    "scaled_dot_product_self_attention",
    "self_attention",
    "softmax_cols",
    "transformer_layer",
]
