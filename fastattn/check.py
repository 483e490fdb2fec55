"""Every rule about arguments, once: arguments of attention() -> Problem and canonical views."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import (
    chunk_of,
    cumulative_of,
    dropout_of,
    flag,
    lengths_of,
    packed_lengths_of,
    scale_of,
    shortened,
    softcap_of,
    window_of,
)
from .arrays import (
    NAMES,
    Names,
    bias_of,
    broadcast,
    check_overlap,
    check_sizes,
    float_name,
    mask_of,
    operands_of,
    result_of,
    share_leading_dimensions,
    sinks_of,
    slopes_of,
)
from .problem import Operands, Problem, Variant

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .modifying import Modifying

BACKENDS = ("auto", "numpy", "cpu")
COMPUTE = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}


def check(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: Any = False,
    align: Any = "bottom_right",
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    q_len: Any = None,
    kv_len: Any = None,
    kv_start: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Any = (),
    block_mask: Any = None,
    return_lse: Any = False,
    out: np.ndarray | None = None,
    names: Names = NAMES,
    fold: bool = True,
    **numbers: Any,
) -> tuple[Problem, Operands]:
    """Return the Problem and the canonical views of one call, or raise before anything is written.

    Parameters are those of attention(); `names` says what a face's caller called the arrays. Rank 2
    means one head: the views get a heads axis of 1. With `fold`, lengths that serve the whole batch
    become views of k, v, mask and bias. `out` and, if return_lse, `lse` are allocated C-contiguous.
    Nothing is copied but an input that is not native, aligned and in strides of whole elements.
    Raises TypeError for kinds and dtypes, ValueError for shapes and values.
    """
    q, k, v = operands_of(names, q, k, v)
    has_heads = q.ndim > 2 or k.ndim > 2 or v.ndim > 2
    q, k, v = share_leading_dimensions(names, q, k, v)
    check_sizes(names, q.shape, k.shape, v.shape)
    *lead, heads_q, seqlen_q, _ = q.shape
    seqlen_k, head_dim_v = v.shape[-2:]
    rows = (*lead, heads_q, seqlen_q)
    if mask is not None:
        mask = broadcast(names.mask, mask_of(names, mask), (*rows, seqlen_k), has_heads)
    if bias is not None:
        bias = broadcast(names.bias, bias_of(names, bias), (*rows, seqlen_k), has_heads)
    inputs = q, k, v, mask, bias
    scores = (prod(lead), heads_q, seqlen_q, seqlen_k)
    modifying = _modifying(score_mod, mask_mod, aux, block_mask, scores)
    spans = lengths_of(tuple(lead), seqlen_q, seqlen_k, align, q_len, kv_len, kv_start, fold)
    ranges, start, stop, offset = spans
    if stop - start < seqlen_k:
        k, v = k[..., start:stop, :], v[..., start:stop, :]
        mask = None if mask is None else mask[..., start:stop]
        bias = None if bias is None else bias[..., start:stop]
    problem, alibi, sinks = _problem_of(
        (q, v, ranges),
        (tuple(lead), seqlen_q, stop - start, offset, start),
        flag(names.causal, causal),
        modifying,
        **numbers,
    )
    if out is None:
        out = np.empty((*rows, head_dim_v), q.dtype)
    else:
        out = result_of(out, (*rows, head_dim_v), q.dtype, has_heads)
        check_overlap(out, names, inputs)
        _check_aux_overlap(out, modifying)
    lse = np.empty(rows, problem.variant.dtype) if flag("return_lse", return_lse) else None
    operands = Operands(q, k, v, mask, bias, out, lse, alibi, sinks, ranges)
    return problem, _with_modifying(operands, modifying)


def check_packed(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    causal: Any = False,
    align: Any = "bottom_right",
    kv_len: Any = None,
    kv_start: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Any = (),
    block_mask: Any = None,
    return_lse: Any = False,
    out: np.ndarray | None = None,
    **numbers: Any,
) -> tuple[Problem, Operands]:
    """Return what check() does, for the arguments of attention_varlen().

    The views are (1, heads, tokens, dim), members one after another: see Operands.starts.
    """
    q, k, v = operands_of(NAMES, q, k, v)
    for name, a in zip("qkv", (q, k, v), strict=True):
        if a.ndim != 3:
            raise ValueError(f"{name} must have shape (tokens, heads, dim), got {a.shape}")
    shape = (*q.shape[:2], v.shape[2])
    q, k, v = (a.swapaxes(0, 1)[None] for a in (q, k, v))
    check_sizes(NAMES, q.shape, k.shape, v.shape)
    edges_q = cumulative_of("cu_seqlens_q", cu_seqlens_q, q.shape[-2])
    edges_k = cumulative_of("cu_seqlens_k", cu_seqlens_k, k.shape[-2])
    if len(edges_q) != len(edges_k):
        rule = "cu_seqlens_q and cu_seqlens_k must have the same length"
        raise ValueError(f"{rule}, got {len(edges_q)} and {len(edges_k)}")
    lengths_q, lengths_k = np.diff(edges_q), np.diff(edges_k)
    ranges = packed_lengths_of(lengths_q, lengths_k, align, kv_len, kv_start)
    seqlen_q, seqlen_k = int(lengths_q.max(initial=0)), int(lengths_k.max(initial=0))
    scores = (len(lengths_q), q.shape[1], seqlen_q, seqlen_k)
    modifying = _modifying(score_mod, mask_mod, aux, block_mask, scores)
    problem, alibi, sinks = _problem_of(
        (q, v, ranges),
        (lengths_q.shape, seqlen_q, seqlen_k, seqlen_k - seqlen_q, 0),
        flag("causal", causal),
        modifying,
        **numbers,
    )
    if out is None:
        out = np.empty(shape, q.dtype)
    else:
        out = result_of(out, shape, q.dtype, True)
        check_overlap(out, NAMES, (q, k, v))
        _check_aux_overlap(out, modifying)
    out = out.swapaxes(0, 1)[None]
    has_lse = flag("return_lse", return_lse)
    lse = np.empty(out.shape[:-1], problem.variant.dtype) if has_lse else None
    starts = np.stack([edges_q[:-1], edges_k[:-1]], axis=1)
    operands = Operands(q, k, v, None, None, out, lse, alibi, sinks, ranges, starts)
    return problem, _with_modifying(operands, modifying)


def check_backend(backend: Any) -> None:
    """Raise unless `backend` is one of BACKENDS."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")


def _modifying(
    score_mod: Any, mask_mod: Any, aux: Any, block_mask: Any, scores: tuple[int, int, int, int]
) -> Modifying | None:
    """Return what modifiers add to the call; None without them."""
    if score_mod is mask_mod is block_mask is None and type(aux) is tuple and not aux:
        return None
    from .modifying import modifying_of

    return modifying_of(score_mod, mask_mod, aux, block_mask, scores)


def _check_aux_overlap(out: np.ndarray, modifying: Modifying | None) -> None:
    if modifying is not None:
        for arrays in (modifying.score_aux, modifying.mask_aux):
            check_overlap(out, (f"aux[{slot}]" for slot in range(len(arrays))), arrays)


def _with_modifying(operands: Operands, modifying: Modifying | None) -> Operands:
    if modifying is None:
        return operands
    score_aux, mask_aux, block_mask = modifying[1:4]
    return operands._replace(score_aux=score_aux, mask_aux=mask_aux, block_mask=block_mask)


def _problem_of(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    spans: tuple[tuple[int, ...], int, int, int, int],
    causal: bool,
    modifying: Modifying | None,
    *,
    scale: Any = None,
    window: Any = (None, None),
    chunk: Any = 0,
    softcap: Any = None,
    alibi: Any = None,
    sinks: Any = None,
    dropout_p: Any = 0.0,
    dropout_seed: Any = None,
) -> tuple[Problem, np.ndarray | None, np.ndarray | None]:
    """Return (problem, alibi, sinks) of (q, v, ranges) and (lead, lengths, offset,
    first key).
    """
    q, v, ranges = arrays
    lead, seqlen_q, seqlen_k, offset, first_key = spans
    heads_q, head_dim = q.shape[-3], q.shape[-1]
    storage = float_name(q.dtype)
    dtype = COMPUTE[storage]
    left, right = window_of(window, causal)
    if ranges is None:
        left, right = shortened(left, right, offset, seqlen_q, seqlen_k)
    scale, softcap, chunk = (
        scale_of(scale, head_dim, dtype),
        softcap_of(softcap, dtype),
        chunk_of(chunk),
    )
    dropout_p, dropout_seed = dropout_of(dropout_p, dropout_seed)
    if alibi is not None:
        alibi = slopes_of(alibi, lead, heads_q, dtype)
    if sinks is not None:
        sinks = sinks_of(sinks, heads_q, dtype)
    sizes = (prod(lead), heads_q, v.shape[-3], seqlen_q, seqlen_k, head_dim, v.shape[-1])
    numbers: tuple[Any, ...] = (scale, offset, left, right, chunk, softcap, dropout_p, dropout_seed)
    variant: tuple[Any, ...] = (dtype, storage)
    if modifying is not None:
        variant += modifying.modifiers
        numbers += (first_key, *modifying.block)
    return _problem(variant, *sizes, *numbers), alibi, sinks


@lru_cache(maxsize=1024)
def _problem(variant: tuple[Any, ...], *fields: Any) -> Problem:
    # Cached: making the two frozen records costs 2 µs, finding them again 0.4 µs.
    return Problem(Variant(*variant), *fields)
