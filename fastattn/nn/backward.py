"""Gradients of the layers, one function each: from that by the result to those by its arguments.

Nothing has to be kept of the forward pass: what is needed of it is computed again from x. The
gradient by parameters is a record of the type of the parameters, so that an optimiser may walk over
the two side by side.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..api import attention
from ..backward import attention_backward
from ..signatures import passing_keywords_to
from .activations import activate, check_activation
from .linear import LinearWeights, check_float_array, check_like, check_tokens, linear
from .multihead import FOREIGN, core_options, join_heads, project_heads
from .multihead_weights import MultiHeadWeights
from .norms import LayerNormWeights, NormWeights, add_norm
from .transformer import TransformerLayerWeights


def linear_backward(
    dy: np.ndarray, x: np.ndarray, weights: LinearWeights
) -> tuple[np.ndarray, LinearWeights]:
    """Return the gradients by x and by the weights of linear(x, weights).

    Parameters
    ----------
    dy : (..., out_features), the gradient by the result
    x, weights : as in linear()

    Returns
    -------
    dx : array like x
    dweights : LinearWeights, summed over all tokens

    Raises
    ------
    As linear().
    """
    check_tokens(x, weights.weight)
    out_features, in_features = weights.weight.shape
    _check_gradient(dy, (*x.shape[:-1], out_features), x.dtype)
    tokens = math.prod(x.shape[:-1])
    rows, flat = dy.reshape(tokens, out_features), x.reshape(tokens, in_features)
    bias = None if weights.bias is None else rows.sum(axis=0)
    return (rows @ weights.weight).reshape(x.shape), LinearWeights(rows.T @ flat, bias)


def norm_backward(
    dy: np.ndarray, x: np.ndarray, weights: NormWeights
) -> tuple[np.ndarray, NormWeights]:
    """Return the gradients by x and by the weights of layer_norm() or rms_norm().

    Parameters
    ----------
    dy : array like x, the gradient by the result
    x, weights : as in layer_norm() and rms_norm()

    Returns
    -------
    dx : array like x
    dweights : record of the type of weights, summed over all tokens

    Raises
    ------
    As add_norm().
    """
    check_tokens(x, weights.weight)
    _check_gradient(dy, x.shape, x.dtype)
    centred = isinstance(weights, LayerNormWeights)
    y = x - x.mean(axis=-1, keepdims=True) if centred else x
    variance = np.einsum("...i,...i->...", y, y)[..., None] / x.dtype.type(x.shape[-1])
    inverse = 1 / np.sqrt(variance + x.dtype.type(weights.eps))
    y = y * inverse
    leading = tuple(range(x.ndim - 1))
    dweight = (dy * y).sum(axis=leading)
    dx = dy * weights.weight
    dx = dx - y * (dx * y).mean(axis=-1, keepdims=True)
    if isinstance(weights, LayerNormWeights):
        dx -= (dy * weights.weight).mean(axis=-1, keepdims=True)
        bias = None if weights.bias is None else dy.sum(axis=leading)
        return dx * inverse, replace(weights, weight=dweight, bias=bias)
    return dx * inverse, replace(weights, weight=dweight)


def activate_backward(name: str, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient by x of activate(name, x): dy times the derivative. relu's at 0 is 0.

    Parameters
    ----------
    name : "relu", "gelu", "gelu_tanh" or "silu"
    dy : array like x, the gradient by the result
    x : float32 or float64, any shape and strides

    Raises
    ------
    As activate().
    """
    check_activation("name", name)
    check_float_array("x", x)
    _check_gradient(dy, x.shape, x.dtype)
    with np.errstate(over="ignore", under="ignore"):
        return dy * SLOPES[name](np.clip(x, -FAR, FAR))


@passing_keywords_to(attention, *FOREIGN)
def multihead_attention_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weights: MultiHeadWeights,
    *,
    key_mask: np.ndarray | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[np.ndarray, MultiHeadWeights]:
    """Return the gradients by x and by the weights of multihead_attention(), self-attention.

    Parameters
    ----------
    dy : array like x, the gradient by the result
    x, weights, key_mask, backend : as in multihead_attention(). weights.extra must be None.
    options : others of fastattn.attention: causal, scale, window, bias, mask, ...

    Returns
    -------
    dx : array like x
    dweights : MultiHeadWeights

    Raises
    ------
    As multihead_attention(); NotImplementedError for weights.extra.
    """
    options = _core_options(x, weights, key_mask, backend, options)
    _check_gradient(dy, x.shape, x.dtype)
    return _heads_backward(dy, x, weights, _attend(x, weights, options), options)


@passing_keywords_to(attention, *FOREIGN)
def transformer_layer_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weights: TransformerLayerWeights,
    *,
    key_mask: np.ndarray | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[np.ndarray, TransformerLayerWeights]:
    """Return the gradients by x and by the weights of transformer_layer().

    Parameters
    ----------
    dy : array like x, the gradient by the result
    x, weights : as in transformer_layer()
    others : as in multihead_attention_backward()

    Returns
    -------
    dx : array like x
    dweights : TransformerLayerWeights

    Raises
    ------
    As transformer_layer().
    """
    options = _core_options(x, weights.attention, key_mask, backend, options)
    _check_gradient(dy, x.shape, x.dtype)
    run = _pre_norm_backward if weights.norm_first else _post_norm_backward
    return run(dy, x, weights, options)


# --- the parts ----------------------------------------------------------------------------------


class _Attended(NamedTuple):
    """What attention makes of a layer's tokens."""

    q: np.ndarray  # (..., num_heads, tokens, head_dim)
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray  # (..., num_heads, tokens, head_dim_v)
    lse: np.ndarray  # (..., num_heads, tokens)


def _core_options(
    x: np.ndarray,
    weights: MultiHeadWeights,
    key_mask: np.ndarray | None,
    backend: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of attention() that the layer stands for."""
    if weights.extra is not None:
        raise NotImplementedError("weights.extra must be None, as it has no gradient here, got one")
    return core_options(weights, key_mask, x.shape[:-1], options | {"backend": backend})


def _attend(x: np.ndarray, weights: MultiHeadWeights, options: dict[str, Any]) -> _Attended:
    q, k, v = project_heads(x, weights)
    return _Attended(q, k, v, *attention(q, k, v, **options, return_lse=True))


def _heads_backward(
    dy: np.ndarray,
    x: np.ndarray,
    weights: MultiHeadWeights,
    attended: _Attended,
    options: dict[str, Any],
) -> tuple[np.ndarray, MultiHeadWeights]:
    q, k, v, out, lse = attended
    dmixed, dout_weights = linear_backward(dy, _side_by_side(out), weights.out)
    dout = dmixed.reshape(*dmixed.shape[:-1], weights.num_heads, -1).swapaxes(-3, -2)
    sinks = weights.sinks is not None
    dq, dk, dv, *dsinks = attention_backward(
        dout, q, k, v, out, lse, **options, return_dsinks=sinks
    )
    parts = [_side_by_side(a) for a in (dq, dk, dv)]
    dqkv: Any
    if isinstance(weights.qkv, LinearWeights):
        dx, dqkv = linear_backward(np.concatenate(parts, axis=-1), x, weights.qkv)
    else:
        pairs = [linear_backward(d, x, w) for d, w in zip(parts, weights.qkv, strict=True)]
        dx, dqkv = np.sum([dx for dx, _ in pairs], axis=0), tuple(dw for _, dw in pairs)
    found = MultiHeadWeights(
        dqkv, dout_weights, weights.num_heads, weights.num_heads_kv, dsinks[0] if sinks else None
    )
    return dx, found


def _side_by_side(heads: np.ndarray) -> np.ndarray:
    """(..., heads, tokens, dim) as (..., tokens, heads * dim)."""
    rows = heads.swapaxes(-3, -2)
    return rows.reshape(*rows.shape[:-2], -1)


def _pre_norm_backward(
    dy: np.ndarray, x: np.ndarray, weights: TransformerLayerWeights, options: dict[str, Any]
) -> tuple[np.ndarray, TransformerLayerWeights]:
    """x + f(norm(x)), twice."""
    backend = options["backend"]
    tokens = add_norm(x, weights.attention_norm, backend=backend)
    attended = _attend(tokens, weights.attention, options)
    middle = join_heads(attended.out, weights.attention)
    middle += x
    normed = add_norm(middle, weights.mlp_norm, backend=backend)
    dnormed, dup, ddown = _network_backward(dy, normed, weights, backend)
    dmiddle, dmlp_norm = norm_backward(dnormed, middle, weights.mlp_norm)
    dmiddle += dy
    dtokens, dattention = _heads_backward(dmiddle, tokens, weights.attention, attended, options)
    dx, dattention_norm = norm_backward(dtokens, x, weights.attention_norm)
    dx += dmiddle
    return dx, _like(weights, dattention, dattention_norm, dup, ddown, dmlp_norm)


def _post_norm_backward(
    dy: np.ndarray, x: np.ndarray, weights: TransformerLayerWeights, options: dict[str, Any]
) -> tuple[np.ndarray, TransformerLayerWeights]:
    """norm(x + f(x)), twice."""
    backend = options["backend"]
    attended = _attend(x, weights.attention, options)
    first = join_heads(attended.out, weights.attention)
    first += x
    middle = add_norm(first, weights.attention_norm, backend=backend)
    second = linear(_hidden(middle, weights, backend)[-1], weights.down)
    second += middle
    dsecond, dmlp_norm = norm_backward(dy, second, weights.mlp_norm)
    dmiddle, dup, ddown = _network_backward(dsecond, middle, weights, backend)
    dmiddle += dsecond
    dfirst, dattention_norm = norm_backward(dmiddle, first, weights.attention_norm)
    dx, dattention = _heads_backward(dfirst, x, weights.attention, attended, options)
    dx += dfirst
    return dx, _like(weights, dattention, dattention_norm, dup, ddown, dmlp_norm)


def _hidden(
    x: np.ndarray, weights: TransformerLayerWeights, backend: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """(what is activated, what that is multiplied by if gated, the hidden units)."""
    units, up = linear(x, weights.up), None
    if weights.gated:
        units, up = np.split(units, 2, axis=-1)
    return units, up, activate(weights.activation, units, up=up, backend=backend)


def _network_backward(
    dy: np.ndarray, x: np.ndarray, weights: TransformerLayerWeights, backend: str
) -> tuple[np.ndarray, LinearWeights, LinearWeights]:
    """(dx, dup, ddown) of the per-token network."""
    units, up, hidden = _hidden(x, weights, backend)
    dhidden, ddown = linear_backward(dy, hidden, weights.down)
    name = weights.activation
    if up is None:
        dunits = activate_backward(name, dhidden, units)
    else:
        dgate = activate_backward(name, dhidden * up, units)
        dunits = np.concatenate([dgate, dhidden * activate(name, units, backend=backend)], axis=-1)
    dx, dup = linear_backward(dunits, x, weights.up)
    return dx, dup, ddown


def _like(weights: TransformerLayerWeights, *gradients: Any) -> TransformerLayerWeights:
    """The gradients as a record like the weights."""
    names = ("attention", "attention_norm", "up", "down", "mlp_norm")
    return replace(weights, **dict(zip(names, gradients, strict=True)))


def _check_gradient(dy: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    check_like("dy", dy, "the result", np.broadcast_to(np.empty((), dtype), shape))


# --- derivatives --------------------------------------------------------------------------------


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu_slope(x: np.ndarray) -> np.ndarray:
    y = _sigmoid(x)
    return y + x * y * (1 - y)


def _gelu_slope(x: np.ndarray) -> np.ndarray:
    """Phi(x) + x phi(x)."""
    below = np.divide(activate("gelu", x), x, out=np.full_like(x, 0.5), where=x != 0)
    return below + x * np.exp(-0.5 * x * x) / x.dtype.type(math.sqrt(2 * math.pi))


def _gelu_tanh_slope(x: np.ndarray) -> np.ndarray:
    y = _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))
    return y + x * y * (1 - y) * (math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x))


# Beyond this, slopes are those of the limits in every dtype, and nothing here is infinite.
FAR = 750
SLOPES = {
    "relu": lambda x: (x > 0).astype(x.dtype),
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "silu": _silu_slope,
}
