"""flash_attn's functions of queries, keys and values, in batches and packed one after another."""

from __future__ import annotations

from typing import Any

from ..errors import raising_argument_errors
from .arguments import NAMES, parts_of, window_of
from .call import attend, attend_packed, drawn_seed, with_infinity
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@raising_argument_errors(**NAMES)
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention as flash_attn.flash_attn_func does.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim) float16, bfloat16, float32 or float64
        NumPy array or tensor of torch in the memory of the CPU, and so are all others.
    k, v : (batch, seqlen_k, heads_kv, head_dim) and (batch, seqlen_k, heads_kv, head_dim_v)
        dtype of q. heads_kv must divide heads_q.
    dropout_p : float from 0 to 1. For tensors, torch's generator of the CPU draws the seed.
    softmax_scale : finite float. Default head_dim ** -0.5.
    causal : bool
        Row i sees keys j <= i + seqlen_k - seqlen_q: bottom-right.
    window_size : (left, right)
        Row i sees keys from i + seqlen_k - seqlen_q - left to ... + right; a negative number is no
        limit. causal makes right 0.
    softcap : float. Scaled scores s become softcap * tanh(s / softcap); <= 0 is off.
    alibi_slopes : (heads_q,) or (batch, heads_q) float
        slope * abs(i + seqlen_k - seqlen_q - j) is taken from the scores.
    deterministic : ignored: results and gradients always are.
    return_attn_probs : bool

    Returns
    -------
    out : (batch, seqlen_q, heads_q, head_dim_v), dtype and library of q, C-contiguous
        A row that sees no key is 0.
    softmax_lse : (batch, heads_q, seqlen_q) float32 (float64 for float64), if return_attn_probs
        Natural log; infinity for a row that sees no key. Not differentiable.
    S_dmask : empty without dropout, else (batch, heads_q, seqlen_q, seqlen_k), dtype of lse
        The probabilities, negative where they are dropped. If return_attn_probs.

    Raises
    ------
    ArgumentError       shapes or values that do not fit: a ValueError and RuntimeError
    ArgumentTypeError   dtypes that differ or are not supported: also a TypeError
    """
    options = _options(q, dropout_p, softmax_scale, causal, softcap, alibi_slopes)
    window = window_of(window_size)
    out, lse = attend(q, k, v, window=window, return_lse=return_attn_probs, **options)
    if not return_attn_probs:
        return out
    from .probabilities import signed

    return out, with_infinity(lse), signed(q, k, v, window=window, **options)


@raising_argument_errors(**NAMES)
def flash_attn_kvpacked_func(q: Any, kv: Any, *args: Any, **keywords: Any) -> Any:
    """Return flash_attn_func(q, k, v, ...) of kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    return flash_attn_func(q, *parts_of("kv", kv, 2, 5), *args, **keywords)


@raising_argument_errors(**NAMES)
def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **keywords: Any) -> Any:
    """Return flash_attn_func(q, k, v, ...) of qkv (batch, seqlen, 3, heads, head_dim)."""
    return flash_attn_func(*parts_of("qkv", qkv, 3, 5), *args, **keywords)


@raising_argument_errors(**NAMES)
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Return flash_attn_func() of each member of a batch, packed one after another.

    Parameters
    ----------
    q : (tokens_q, heads_q, head_dim)
    k, v : (tokens_k, heads_kv, head_dim) and (tokens_k, heads_kv, head_dim_v)
        With block_table, pages: (num_pages, page_size, heads_kv, dim).
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) ints
        Member b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and so for k and v; with
        block_table, cu_seqlens_k says how many keys a member has.
    max_seqlen_q, max_seqlen_k : ignored: cu_seqlens say it.
    block_table : (batch, max_pages) ints, the pages of each member
    others : as in flash_attn_func(); i, j and the lengths are those of a member.

    Returns
    -------
    out : (tokens_q, heads_q, head_dim_v)
    softmax_lse : (heads_q, tokens_q), if return_attn_probs
    S_dmask : empty without dropout, else (batch, heads_q, longest of q, longest of k), 0 where a
        member is shorter. If return_attn_probs.

    Raises
    ------
    As flash_attn_func().
    """
    options = _options(q, dropout_p, softmax_scale, causal, softcap, alibi_slopes)
    options |= {"window": window_of(window_size)}
    edges = cu_seqlens_q, cu_seqlens_k
    more = {"block_table": block_table, "return_lse": return_attn_probs} | options
    out, lse = attend_packed(q, k, v, *edges, **more)
    if not return_attn_probs:
        return out
    from .probabilities import signed_packed

    return out, with_infinity(lse), signed_packed(q, k, v, *edges, block_table, **options)


@raising_argument_errors(**NAMES)
def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Return flash_attn_varlen_func(q, k, v, ...) of kv (tokens_k, 2, heads_kv, head_dim)."""
    k, v = parts_of("kv", kv, 2, 4)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **keywords)


@raising_argument_errors(**NAMES)
def flash_attn_varlen_qkvpacked_func(
    qkv: Any, cu_seqlens: Any, max_seqlen: int | None = None, *args: Any, **keywords: Any
) -> Any:
    """Return flash_attn_varlen_func(q, k, v, ...) of qkv (tokens, 3, heads, head_dim)."""
    q, k, v = parts_of("qkv", qkv, 3, 4)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **keywords)


def _options(
    q: Any, dropout_p: Any, scale: Any, causal: Any, softcap: Any, alibi: Any
) -> dict[str, Any]:
    """Return the core's options, only those that are not their defaults beyond call.SCALARS."""
    options: dict[str, Any] = {"scale": scale, "causal": causal, "softcap": softcap}
    if alibi is not None:
        options["alibi"] = alibi
    if type(dropout_p) is not float or dropout_p != 0:
        options |= {"dropout_p": dropout_p, "dropout_seed": drawn_seed(q, dropout_p)}
    return options
