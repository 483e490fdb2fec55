"""torch's scaled_dot_product_attention, fastattn's for tensors in the memory of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from .. import guards, repeat
from .. import sdpa as core
from ..cpu.layout import address
from ..cpu.threads import get_num_threads
from ..errors import ArgumentTypeError, as_argument_error
from ..kinds import as_tensor
from .call import Call
from .dispatch import (
    array_of,
    autocast,
    check_tensors,
    is_direct,
    is_elsewhere,
    is_plain,
    number,
    seed_of,
)
from .ops import LIBRARY, run
from .threads import on_threads_of_torch

NAMES = core.TORCH_NAMES


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what torch.nn.functional.scaled_dot_product_attention returns: fastattn's answer for
    tensors of the CPU, torch's own for those of other devices.

    Parameters
    ----------
    query : (..., heads_q, seqlen_q, head_dim) float16, bfloat16, float32 or float64, rank 2 and up
    key, value : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v)
        dtype of query. Leading axes broadcast, and so do heads of 1.
    attn_mask : bool, True = may attend; or float32 or the dtype of query, added to the scores
        Broadcastable to (..., heads_q, seqlen_q, seqlen_k). Not together with is_causal. Or what
        torch.nn.attention.bias.causal_upper_left() or causal_lower_right() returned.
    dropout_p : float from 0 to 1
        Always applied, as in torch, from a seed that torch's generator of the CPU draws.
    is_causal : bool
        Row i sees keys j <= i: **top-left** alignment.
    scale : finite float, or a tensor without axes. Default head_dim ** -0.5.
    enable_gqa : bool
        Let heads_kv divide heads_q; without it they must be equal, or 1.

    Returns
    -------
    out : (..., heads_q, seqlen_q, head_dim_v), dtype of query
        Differentiable once by query, key, value and a float attn_mask; under torch.compile,
        torch.export, torch.func.grad and vmap, too.

    Raises
    ------
    ArgumentError, a ValueError and RuntimeError   shapes, values and dtypes that do not fit
    ArgumentTypeError, also a TypeError            types and dtypes that do not fit

    Notes
    -----
    NaN and infinity in a masked key do not reach the result, which in torch they do.
    """
    try:
        is_plain_call = type(dropout_p) is float and dropout_p == 0
        if is_plain_call and is_direct(query, key, value, attn_mask):
            known = (query, key, value, attn_mask, scale, is_causal, enable_gqa)
            return on_threads_of_torch(_directly, *known)
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if is_elsewhere(query, key, value):
            return functional.scaled_dot_product_attention(*arguments, **options)
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            if torch.onnx.is_in_onnx_export():  # which has a node for torch's own alone
                return functional.scaled_dot_product_attention(*arguments, **options)
            if not isinstance(attn_mask, CausalBias):
                return torch.ops.fastattn.scaled_dot_product_attention(*arguments, **options)
        return _through_operator(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise as_argument_error(error) from None


def _directly(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *options: Any
) -> Tensor:
    """Return the result of plain tensors; options: scale, is_causal, enable_gqa."""
    tensors = (query, key, value, attn_mask)
    call = _key_of(tensors, options)
    known = repeat.find(call)
    if known is not None:
        out = known.new_out()
        mask = bias = 0
        if attn_mask is not None:
            place = attn_mask.data_ptr()
            mask, bias = (place, 0) if attn_mask.dtype is torch.bool else (0, place)
        places = (query.data_ptr(), key.data_ptr(), value.data_ptr(), mask, bias, address(out))
        if known.write(places, (tensors, out)):
            return as_tensor(out)
    *arrays, added = map(array_of, NAMES, tensors)
    masks = core.mask_or_bias(added, options[1], arrays[0])
    return as_tensor(core.answer((*arrays, *masks), options, 0.0, call))


def _key_of(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> repeat.Key | None:
    """As repeat.key_of(): what a call depends on besides addresses."""
    if guards.ON:
        return None
    try:
        key: repeat.Key = (None, "torch", get_num_threads(), repeat.token_of(*options))
    except Exception:  # as in repeat.key_of()
        return None
    for t in tensors:
        if t is not None:
            key += (t.dtype, t.shape, t.stride())
    return key


def _through_operator(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Tensor:
    """Return the result by way of attention()'s operator."""
    check_tensors(NAMES[:3], (query, key, value))
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None if is_causal is True, got both")
    given = (query, key, value, attn_mask)
    align = "top_left"
    if isinstance(attn_mask, CausalBias):
        is_causal, lower = True, attn_mask.variant is CausalVariant.LOWER_RIGHT
        attn_mask, align = None, "bottom_right" if lower else "top_left"
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    mask, bias = _mask_or_bias(attn_mask, query)
    if not enable_gqa:
        heads = core.common_heads(query.shape, key.shape, value.shape)
        if heads:
            query, key, value = (
                a.expand(*a.shape[:-3], heads, *a.shape[-2:]) for a in (query, key, value)
            )
    call = Call(
        query,
        key,
        value,
        bias,
        mask,
        dropout_seed=seed_of(dropout_p),
        scale=number(scale),
        causal=is_causal,
        align=align,
        dropout_p=number(dropout_p),
    )
    try:
        return run(call)[0]
    except (TypeError, ValueError, RuntimeError, IndexError):
        if is_plain(*given):
            options = {"scale": scale, "enable_gqa": enable_gqa}
            with torch.no_grad():  # refuses under the names that the caller knows
                core.scaled_dot_product_attention(*given, dropout_p, is_causal, **options)
        raise


def _mask_or_bias(attn_mask: Any, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return attn_mask as (mask, bias), one of them None."""
    if attn_mask is None:
        return None, None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(attn_mask).__name__}")
    if attn_mask.dtype is torch.bool:
        return attn_mask, None
    if attn_mask.dtype not in (torch.float32, query.dtype):
        rule = "attn_mask must be bool, float32 or of the dtype of query"
        raise ArgumentTypeError(f"{rule} ({query.dtype}), got {attn_mask.dtype}")
    return None, attn_mask


# In graphs it has the name and the arguments of torch's own, so that one may be put for the other;
# the compiler takes it apart.
SCHEMA = (
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
    "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) "
    "-> Tensor"
)
LIBRARY.define(SCHEMA)
LIBRARY.impl(SCHEMA.partition("(")[0], _through_operator, "CompositeImplicitAutograd")
