"""PyTorch's scaled_dot_product_attention for NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import repeat
from .arguments import flag
from .arrays import Names
from .check import check
from .kinds import array_view, is_device_view, like
from .launch import run

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

TORCH_NAMES = Names("query", "key", "value", "attn_mask", "attn_mask", "is_causal")


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return what torch.nn.functional.scaled_dot_product_attention returns, for NumPy arrays.

    Parameters
    ----------
    query : (..., heads_q, seqlen_q, head_dim) float16, bfloat16, float32 or float64, rank 2 and up
    key, value : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v)
        dtype of query. Leading axes broadcast, and so do heads of 1.
    attn_mask : bool, True = may attend; or float32 or the dtype of query, added to the scores
        Broadcastable to (..., heads_q, seqlen_q, seqlen_k). Not together with is_causal.
    dropout_p : float from 0 to 1
        Always applied, as in PyTorch, from a seed of its own in every call.
    is_causal : bool
        Row i sees keys j <= i: **top-left** alignment, unlike attention(causal=True).
    scale : finite float. Default head_dim ** -0.5.
    enable_gqa : bool
        Let heads_kv divide heads_q; without it they must be equal, or 1.

    Returns
    -------
    out : (..., heads_q, seqlen_q, head_dim_v), dtype and library of query
        As in PyTorch, its axes lie in memory as those of query, if both have one shape.

    Raises
    ------
    ValueError   shapes or values that do not fit together
    TypeError    dtypes that differ or are not supported

    Notes
    -----
    NaN and infinity in a masked key do not reach the result, which in PyTorch they do.
    """
    given = query
    arrays: Any = tuple(map(array_view, TORCH_NAMES[:3], (query, key, value)))
    mask, bias = mask_or_bias(attn_mask, is_causal, arrays[0])
    kept, call, options = (*arrays, mask, bias), None, (scale, is_causal, enable_gqa)
    on_host = type(query) is type(key) is type(value) is np.ndarray and attn_mask is None
    on_host = on_host or not any(a is not None and is_device_view(a) for a in kept)
    if on_host and type(dropout_p) is float and dropout_p == 0:
        call = repeat.key_of(kept, options, ())
        found = repeat.answer(call, kept)
        if found is not None:
            return like(given, found[0])
    return like(given, answer(kept, options, dropout_p, call))


def answer(
    arrays: tuple[Any, ...], options: tuple[Any, ...], dropout_p: Any, key: repeat.Key | None
) -> np.ndarray:
    """Return the result for query, key, value, mask and bias, and keep the call under `key`.

    options: scale, is_causal and enable_gqa
    """
    *operands_given, mask, bias = arrays
    scale, is_causal, enable_gqa = options
    problem, operands = check(
        *(operands_given if flag("enable_gqa", enable_gqa) else _broadcast_heads(*operands_given)),
        scale=scale,
        causal=is_causal,
        align="top_left",
        bias=bias,
        mask=mask,
        dropout_p=dropout_p,
        names=TORCH_NAMES,
        in_order_of_q=True,
    )
    chosen = run(problem, operands, "auto")
    is_one_head = all(a.ndim == 2 for a in operands_given)
    result = operands.out[0] if is_one_head else operands.out
    repeat.keep(key, arrays, chosen, operands, result.shape)
    return result


# --- PyTorch's rules ----------------------------------------------------------------------------


def mask_or_bias(
    attn_mask: Any, is_causal: Any, query: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return attn_mask as (mask, bias), one of them None."""
    if attn_mask is None:
        return None, None
    if is_causal:
        raise ValueError("attn_mask must be None if is_causal is True, got both")
    attn_mask = array_view(TORCH_NAMES.mask, attn_mask)
    if attn_mask.dtype.char == "?":
        return attn_mask, None
    if attn_mask.dtype.char not in ("f", query.dtype.char):
        rule = "attn_mask must be bool, float32 or of the dtype of query"
        raise TypeError(f"{rule} ({query.dtype}), got {attn_mask.dtype}")
    return None, attn_mask


def _broadcast_heads(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return views with the same heads, or key and value with one."""
    heads = common_heads(*(a.shape for a in arrays))
    if not heads:
        return arrays
    return tuple(np.broadcast_to(a, (*a.shape[:-3], heads, *a.shape[-2:])) for a in arrays)


def common_heads(*shapes: tuple[int, ...]) -> int:
    """Return the heads to which query, key and value of these shapes broadcast; 0 if they need not,
    as all have the same, or key and value one. Rank 2 counts as one head; less is for check() to
    refuse.
    """
    if min(map(len, shapes)) < 2:
        return 0
    heads_q, heads_k, heads_v = (shape[-3] if len(shape) > 2 else 1 for shape in shapes)
    if heads_q == heads_k == heads_v or heads_k == heads_v == 1:
        return 0
    counts = {heads_q, heads_k, heads_v} - {1}
    if len(counts) > 1:
        rule = "query, key and value must have the same heads, or 1, unless enable_gqa is True"
        raise ValueError(f"{rule}, got {heads_q}, {heads_k} and {heads_v}")
    return counts.pop()
