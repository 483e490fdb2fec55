"""Multi-head attention of checkpoints: the layouts that they keep it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .linear import LinearWeights, stack_linear
from .multihead_weights import MultiHeadWeights


def load_multihead(
    tensors: Mapping[str, Any],
    num_heads: int,
    *,
    prefix: str = "",
    num_heads_kv: int | None = None,
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
    add_zero_attn: bool = False,
) -> MultiHeadWeights:
    """Return the weights of one layer of a checkpoint that has one of the layouts below.

    Parameters
    ----------
    tensors : mapping of names to arrays, or to what np.asarray() takes: a state_dict() of torch
    num_heads, num_heads_kv : int. As in MultiHeadWeights; num_heads_kv of the third layout only.
    prefix : of the layer's names, with its dot: "encoder.layers.0.self_attn."
    names : of the four maps in the third layout
    add_zero_attn : bool. As in torch.nn.MultiheadAttention, which keeps no tensor of it.

    Returns
    -------
    MultiHeadWeights. q, k and v are stacked if their inputs have the same features, so that one
    product makes all three; what is stacked already is not copied.

    Raises
    ------
    ValueError  a tensor is missing, or its shape does not fit: by name, with both shapes
    TypeError   dtypes that differ or are not supported

    Notes
    -----
    torch.nn.MultiheadAttention  in_proj_weight, in_proj_bias, out_proj.weight, out_proj.bias
    the same with kdim or vdim   q_proj_weight, k_proj_weight, v_proj_weight, the others as above
    one linear map each          q_proj.weight, q_proj.bias, ..., out_proj.weight, out_proj.bias

    Any bias may be missing. bias_k and bias_v of the first two become `extra`.
    """
    layer = _Layer(tensors, prefix)
    heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    if not layer.has("in_proj_weight") and not layer.has("q_proj_weight"):
        parts, out = _separate_layout(layer, names, num_heads, heads_kv)
    elif heads_kv != num_heads:
        raise ValueError(
            f"num_heads_kv must be num_heads = {num_heads} for {prefix}in_proj_weight or "
            f"q_proj_weight, got {num_heads_kv}"
        )
    else:
        parts, out = _torch_layout(layer, num_heads)
    extra = None
    if layer.has("bias_k"):
        width = out.weight.shape[1]
        rows = (layer.tensor(name, (1, 1, width)) for name in ("bias_k", "bias_v"))
        k, v = (row.reshape(num_heads, width // num_heads) for row in rows)
        extra = k, v
    sinks = np.zeros(num_heads, out.weight.dtype) if add_zero_attn else None
    return MultiHeadWeights(_stacked(parts), out, num_heads, num_heads_kv, sinks, extra)


Parts = LinearWeights | tuple[LinearWeights, LinearWeights, LinearWeights]


class _Layer:
    """The tensors of one layer, which are checked as they are taken."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def tensor(self, name: str, shape: tuple[int | None, ...], why: str = "") -> np.ndarray:
        """The tensor, if it has this shape, None being any size; else raise, with the reason."""
        full = self.prefix + name
        if full not in self.tensors:
            found = ", ".join(sorted(n for n in self.tensors if n.startswith(self.prefix)))
            raise ValueError(f"tensors must hold {full!r}, got {found or 'none of that prefix'}")
        array = np.asarray(self.tensors[full])
        sizes = zip(array.shape, shape, strict=False)
        if array.ndim != len(shape) or any(w is not None and n != w for n, w in sizes):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"{full} must have shape ({wanted}){why}, got {array.shape}")
        return array

    def linear(
        self, weight: str, bias: str, shape: tuple[int | None, int | None], why: str = ""
    ) -> LinearWeights:
        array = self.tensor(weight, shape, why)
        rows = (array.shape[0],)
        return LinearWeights(array, self.tensor(bias, rows) if self.has(bias) else None)

    def split(self, name: str, axis: int, heads: int, shape: tuple[int, ...]) -> int:
        """Features of one head along an axis of the tensor, or raise."""
        if shape[axis] % heads:
            kind = ("rows", "columns")[axis]
            raise ValueError(
                f"{self.prefix}{name} must have a multiple of {heads} {kind}, for as many heads, "
                f"got shape {shape}"
            )
        return shape[axis] // heads


def _torch_layout(layer: _Layer, num_heads: int) -> tuple[Parts, LinearWeights]:
    """q, k, v and out of torch.nn.MultiheadAttention; rows of the projections are model_dim."""
    out = layer.linear("out_proj.weight", "out_proj.bias", (None, None))
    model_dim, rows = out.weight.shape
    why = f" to fit {layer.prefix}out_proj.weight {out.weight.shape}"
    layer.split("out_proj.weight", 1, num_heads, out.weight.shape)
    if layer.has("in_proj_weight"):
        shape = (3 * rows, model_dim)
        return layer.linear("in_proj_weight", "in_proj_bias", shape, why), out
    bias = layer.tensor("in_proj_bias", (3 * rows,), why) if layer.has("in_proj_bias") else None
    q, k, v = (
        LinearWeights(
            layer.tensor(f"{name}_proj_weight", (rows, model_dim if name == "q" else None), why),
            None if bias is None else bias[n * rows : (n + 1) * rows],
        )
        for n, name in enumerate("qkv")
    )
    return (q, k, v), out


def _separate_layout(
    layer: _Layer, names: tuple[str, str, str, str], num_heads: int, heads_kv: int
) -> tuple[Parts, LinearWeights]:
    """q, k, v and out, a linear map each; heads of keys and values may be fewer."""
    weights = [f"{name}.weight" for name in names]
    biases = [f"{name}.bias" for name in names]
    q = layer.linear(weights[0], biases[0], (None, None))
    model_dim = q.weight.shape[1]
    head_dim = layer.split(weights[0], 0, num_heads, q.weight.shape)
    why = f" to fit {layer.prefix}{weights[0]} {q.weight.shape} and {num_heads} heads"
    grouped = f"{why} over {heads_kv}"
    k = layer.linear(weights[1], biases[1], (heads_kv * head_dim, None), grouped)
    v = layer.linear(weights[2], biases[2], (None, None))
    head_dim_v = layer.split(weights[2], 0, heads_kv, v.weight.shape)
    out = layer.linear(weights[3], biases[3], (model_dim, num_heads * head_dim_v), why)
    return (q, k, v), out


def _stacked(parts: Parts) -> Parts:
    """The three maps as one, if they can be."""
    if isinstance(parts, LinearWeights):
        return parts
    q, k, v = parts
    one_input = q.weight.shape[1] == k.weight.shape[1] == v.weight.shape[1]
    return stack_linear(q, k, v) if one_input and k.weight.shape == v.weight.shape else parts
