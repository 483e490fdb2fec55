"""flash_attn 4: sinks, modifiers, and a pair as result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arguments import integer
from ...errors import raising_argument_errors
from ...kinds import is_tensor, numpy_view
from ..arguments import NAMES
from ..call import attend
from .lengths import attend_with_lengths

OF_CORE = {**NAMES, "sinks": "learnable_sink", "block_table": "page_table"}
OF_CORE |= {"q_len": "seqused_q", "kv_len": "seqused_k"}
WINDOW_RULE = "window_size must be a pair of ints >= 0 or None (no limit)"


@raising_argument_errors(**OF_CORE)
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Any, Any]:
    """Return (out, lse or None) as flash_attn.cute.flash_attn_func does.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim) float16, bfloat16, float32 or float64
        NumPy array or tensor of torch in the memory of the CPU, and so are all others.
    k, v : (batch, seqlen_k, heads_kv, head_dim) and (batch, seqlen_k, heads_kv, head_dim_v)
        dtype of q. heads_kv must divide heads_q.
    qv : (batch, seqlen_q, heads_q, head_dim_v)
        Its product with v is added to that of q and k. Copies of q, k and v are made.
    softmax_scale : finite float. Default head_dim ** -0.5; with qv, of both widths together.
    causal, softcap : as in fastattn.flash_attn.flash_attn_func()
    window_size : (left, right)
        Row i sees keys from i + seqlen_k - seqlen_q - left to ... + right; None is no limit, and
        two ints whose sum is below 0 are none. causal makes right 0.
    learnable_sink : (heads_q,) float: one more score of every row, without a value; part of lse
    score_mod : function (score, b, h, i, j, aux) -> score, as in fastattn.attention()
    mask_mod : function (b, h, i, j, aux) -> bool, likewise. True = may attend.
    aux_tensors, aux_scalars : sequences of arrays and of numbers: together aux, in this order
    block_sparse_tensors : fastattn.BlockMask, in place of mask_mod
    return_lse : bool
    num_splits, pack_gqa, deterministic, block_sparse_tensors_bwd : ignored
    score_mod_bwd : function (score, b, h, i, j, aux) -> derivative of score_mod by the score
        Default: found from what score_mod does.
    gather_kv_indices : must be None

    Returns
    -------
    out : (batch, seqlen_q, heads_q, head_dim_v), dtype and library of q, C-contiguous
    lse : (batch, heads_q, seqlen_q), with qv (batch, seqlen_q, heads_q), float32 (float64 for
        float64), natural log; -inf for a row that sees no key and no sink. None unless return_lse.
        Not differentiable.

    Raises
    ------
    ArgumentError, ArgumentTypeError   as fastattn.flash_attn.flash_attn_func()
    """
    options: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "softcap": softcap}
    options |= _modifying(score_mod, score_mod_bwd, mask_mod, (aux_tensors, aux_scalars))
    options |= _given(sinks=learnable_sink, block_mask=block_sparse_tensors)
    _check_refused(gather_kv_indices=gather_kv_indices)
    if qv is not None:
        q, k, options["scale"] = with_qv(q, k, v, qv, softmax_scale)
    window = window_of(window_size, causal)
    out, lse = attend(q, k, v, window=window, return_lse=return_lse, **options)
    if qv is not None and return_lse:
        lse = lse.swapaxes(-1, -2)
    return out, lse if return_lse else None


@raising_argument_errors(**OF_CORE)
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: None = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Any, Any]:
    """Return (out, lse or None) of sequences of unlike lengths, packed or padded.

    Parameters
    ----------
    q : (tokens_q, heads_q, head_dim) with cu_seqlens_q, else (batch, seqlen_q, heads_q, head_dim)
    k, v : (tokens_k, heads_kv, dim) with cu_seqlens_k; with page_table pages, (num_pages,
        page_size, heads_kv, dim); else (batch, seqlen_k, heads_kv, dim)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) ints, where members begin
    seqused_q : (batch,) ints: rows of q in use, where it is padded. The others give 0.
    seqused_k : (batch,) ints: keys in use
    page_table : (batch, max_pages) ints: the pages of each. Not with cu_seqlens_k.
    max_seqlen_q, max_seqlen_k, min_seqlen_k, scheduler_metadata, seqlen_k_per_split,
        disable_scheduler_metadata : ignored
    others : as in flash_attn_func(); i, j and the lengths are those of a member. qv must be None.

    Returns
    -------
    out : like q, with head_dim_v
    lse : (heads_q, tokens_q), or (batch, heads_q, seqlen_q) where q is padded. None unless
        return_lse.

    Raises
    ------
    As flash_attn_func().
    """
    options: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "softcap": softcap}
    options |= _modifying(score_mod, score_mod_bwd, mask_mod, (aux_tensors, aux_scalars))
    options |= _given(sinks=learnable_sink, block_mask=block_sparse_tensors)
    options |= {"window": window_of(window_size, causal), "return_lse": return_lse}
    _check_refused(gather_kv_indices=gather_kv_indices, qv=qv)
    edges, used = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    out, lse = attend_with_lengths((q, k, v), edges, used, page_table, options)
    return out, lse if return_lse else None


def window_of(window_size: Any, causal: Any) -> tuple[int | None, int | None]:
    """Return the core's window; two ints whose sum is negative are none."""
    try:
        left, right = (None if n is None else integer(WINDOW_RULE, n) for n in window_size)
    except ValueError:
        raise ValueError(f"{WINDOW_RULE}, got {window_size!r}") from None
    right = 0 if causal is True else right
    if left is not None and right is not None and left + right < 0:
        return None, None
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"{WINDOW_RULE}, got {window_size!r}")
    return left, right


def with_qv(q: Any, k: Any, v: Any, qv: Any, scale: Any) -> tuple[Any, Any, Any]:
    """Return q and k with qv and v behind them, and the scale."""
    if scale is None:
        scale = (q.shape[-1] + v.shape[-1]) ** -0.5
    return _joined("qv", q, qv), _joined("v", k, v), scale


def _joined(name: str, a: Any, b: Any) -> Any:
    if tuple(a.shape[:-1]) != tuple(b.shape[:-1]):
        whole = "q" if name == "qv" else "k"
        rule = f"{name} must have the shape of {whole} but for the last axis"
        raise ValueError(f"{rule}, got {tuple(b.shape)} and {tuple(a.shape)}")
    if is_tensor(a):
        import torch

        return torch.cat([a, b], dim=-1)
    return np.concatenate([numpy_view(name, a), numpy_view(name, b)], axis=-1)


def _modifying(score_mod: Any, slopes: Any, mask_mod: Any, aux: tuple[Any, Any]) -> dict[str, Any]:
    """Return the core's options of modifiers, those that are given."""
    arrays = tuple(a for some in aux if some is not None for a in some)
    found = _given(score_mod=score_mod, score_mod_grad=slopes, mask_mod=mask_mod)
    return found | ({"aux": arrays} if arrays else {})


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _check_refused(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None: fastattn has no such function, got one")
