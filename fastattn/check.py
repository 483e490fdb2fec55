"""Every rule about arguments, once: arguments of attention() -> Problem and canonical views."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dropout
from .arguments import (
    Lengths,
    chunk_of,
    cumulative_of,
    dropout_of,
    flag,
    lengths_of,
    ranges_of,
    scale_of,
    shortened,
    softcap_of,
    tf32_of,
    window_of,
)
from .arrays import (
    NAMES,
    Names,
    bias_of,
    broadcast,
    check_overlap,
    check_places,
    check_sizes,
    empty_in_order_of,
    float_name,
    mask_of,
    operands_of,
    result_of,
    share_leading_dimensions,
    sinks_of,
    slopes_of,
)
from .kinds import new_array
from .paging import check_pages, packed_table, places_of, share_batch, table_of, used_pages
from .problem import Operands, Problem, Variant

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .modifying import Modifying

BACKENDS = ("auto", "numpy", "cpu", "cuda")
CPU_BACKENDS = ("auto", "numpy", "cpu")  # of what has no kernel for a GPU
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
    block_table: Any = None,
    return_lse: Any = False,
    out: np.ndarray | None = None,
    names: Names = NAMES,
    fold: bool = True,
    in_order_of_q: bool = False,
    results: bool = True,
    **others: Any,
) -> tuple[Problem, Operands]:
    """Return the Problem and the canonical views of one call, or raise before anything is written.

    Parameters are those of attention(); `names` says what a face's caller called the arrays. Rank 2
    means one head: the views get a heads axis of 1. With `fold`, lengths that serve the whole batch
    become views of k, v, mask and bias. `out` and, if return_lse, `lse` are allocated C-contiguous;
    `in_order_of_q` lets the axes of `out` lie as those of q where both have one shape; without
    `results`, `out` is a view of a single 0, for calls that are only looked at. Nothing is copied
    but an input that is not native, aligned and in strides of whole elements.
    Raises TypeError for kinds and dtypes, ValueError for shapes and values.
    """
    q, k, v = operands_of(names, q, k, v)
    has_heads = q.ndim > 2 or k.ndim > 2 or v.ndim > 2
    if block_table is None:
        q, k, v = share_leading_dimensions(names, q, k, v)
        seqlen_k = k.shape[-2]
    else:
        check_pages(names, k, v)
        q, block_table = share_batch(names, q, table_of(block_table))
        seqlen_k = block_table.shape[-1] * k.shape[-2]
    check_sizes(names, q.shape, k.shape, v.shape)
    rows, lead, seqlen_q = q.shape[:-1], q.shape[:-3], q.shape[-2]
    if mask is not None or bias is not None:
        mask, bias = _masks(names, mask, bias, (*rows, seqlen_k), has_heads)
    inputs = q, k, v, mask, bias
    check_places(names, q, zip(names, inputs, strict=False))
    lengths = Lengths(align, q_len, kv_len, kv_start)
    if block_table is None:
        ranges, start, stop, offset = lengths_of(lead, seqlen_q, seqlen_k, lengths, fold)
    else:
        pages = k.shape[::2]
        ranges, block_table, stop = places_of(block_table, pages, lead, seqlen_q, lengths)
        start, offset = 0, stop - seqlen_q
    of_call = (lead, seqlen_q, stop - start, offset, start, seqlen_k)
    flags = flag(names.causal, causal), block_table is not None
    problem, alibi, sinks, modifying = _problem_of(q, v, ranges, of_call, *flags, **others)
    has_lse, shape = flag("return_lse", return_lse), (*rows, v.shape[-1])
    if not results:
        out = np.broadcast_to(np.zeros((), q.dtype), shape)
    elif in_order_of_q and out is None and shape == q.shape:
        out = empty_in_order_of(q)
    else:
        out = _output(out, shape, has_heads, names, inputs, modifying)
    lse = new_array(q, rows, problem.variant.dtype) if has_lse and results else None
    if ranges is None and stop - start < seqlen_k:
        k, v, mask, bias = _cut(k, v, mask, bias, slice(start, stop))
    operands = Operands(
        q, k, v, mask, bias, out, lse, alibi, sinks, ranges, block_table=block_table
    )
    return problem, _with_options(operands, problem, modifying)


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
    block_table: Any = None,
    return_lse: Any = False,
    out: np.ndarray | None = None,
    **others: Any,
) -> tuple[Problem, Operands]:
    """Return what check() does, for the arguments of attention_varlen().

    The views are (1, heads, tokens, dim), members one after another: see Operands.starts.
    """
    paged = block_table is not None
    q, k, v = inputs = _packed(operands_of(NAMES, q, k, v), paged)
    check_places(NAMES, q, zip(NAMES, inputs, strict=False))
    if paged:
        check_pages(NAMES, k, v)
    check_sizes(NAMES, q.shape, k.shape, v.shape)
    edges_q = cumulative_of("cu_seqlens_q", cu_seqlens_q, q.shape[-2])
    edges_k = cumulative_of("cu_seqlens_k", cu_seqlens_k, None if paged else k.shape[-2])
    _check_same_batch(edges_q, edges_k)
    lengths_q, lengths_k = np.diff(edges_q), np.diff(edges_k)
    given = Lengths(align, None, kv_len, kv_start)
    ranges = ranges_of(lengths_q.shape, lengths_q, lengths_k, given)
    if paged:
        table = packed_table(block_table, lengths_k, k.shape[2])
        block_table = used_pages(table, ranges, k.shape[::2], int(lengths_k.max(initial=0)))
        edges_k = np.zeros_like(edges_k)  # keys count from the first page of a member
    seqlen_q, seqlen_k = int(lengths_q.max(initial=0)), int(lengths_k.max(initial=0))
    of_call = (lengths_q.shape, seqlen_q, seqlen_k, seqlen_k - seqlen_q, 0, seqlen_k)
    flags = flag("causal", causal), paged
    problem, alibi, sinks, modifying = _problem_of(q, v, ranges, of_call, *flags, **others)
    shape = (q.shape[2], q.shape[1], v.shape[3])
    out = _output(out, shape, True, NAMES, inputs, modifying).swapaxes(0, 1)[None]
    has_lse = flag("return_lse", return_lse)
    lse = new_array(q, out.shape[:-1], problem.variant.dtype) if has_lse else None
    starts = np.stack([edges_q[:-1], edges_k[:-1]], axis=1)
    operands = Operands(
        q, k, v, None, None, out, lse, alibi, sinks, ranges, starts, block_table=block_table
    )
    return problem, _with_options(operands, problem, modifying)


def check_backend(backend: Any, known: tuple[str, ...] = BACKENDS) -> None:
    """Raise unless `backend` is one of those known."""
    if not isinstance(backend, str) or backend not in known:
        raise ValueError(f"backend must be one of {known}, got {backend!r}")


def _masks(
    names: Names, mask: Any, bias: Any, scores: tuple[int, ...], has_heads: bool
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return mask and bias as views in the shape of the scores."""
    if mask is not None:
        mask = broadcast(names.mask, mask_of(names, mask), scores, has_heads)
    if bias is not None:
        bias = broadcast(names.bias, bias_of(names, bias), scores, has_heads)
    return mask, bias


def _cut(
    k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, bias: np.ndarray | None, keys: slice
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return views of these keys alone."""
    mask, bias = (None if a is None else a[..., keys] for a in (mask, bias))
    return k[..., keys, :], v[..., keys, :], mask, bias


def _packed(arrays: list[np.ndarray], paged: bool) -> list[np.ndarray]:
    """Return q, k and v as views (1, heads, tokens, dim); k and v as they are if on pages."""
    for name, a in zip("q" if paged else "qkv", arrays, strict=False):
        if a.ndim != 3:
            raise ValueError(f"{name} must have shape (tokens, heads, dim), got {a.shape}")
    views = [a.swapaxes(0, 1)[None] for a in arrays[: 1 if paged else 3]]
    return views + arrays[len(views) :]


def _check_same_batch(edges_q: np.ndarray, edges_k: np.ndarray) -> None:
    if len(edges_q) != len(edges_k):
        rule = "cu_seqlens_q and cu_seqlens_k must have the same length"
        raise ValueError(f"{rule}, got {len(edges_q)} and {len(edges_k)}")


def _output(
    out: Any,
    shape: tuple[int, ...],
    has_heads: bool,
    names: Names,
    inputs: Sequence[Any],
    modifying: Modifying | None,
) -> np.ndarray:
    """Return a new array of the dtype of q, or a view of the caller's `out`."""
    dtype = inputs[0].dtype
    if out is None:
        return new_array(inputs[0], shape, dtype)
    out = result_of(out, shape, dtype, has_heads)
    check_places(names, inputs[0], [("out", out)])
    check_overlap(out, names, inputs)
    if modifying is not None:
        for arrays in (modifying.score_aux, modifying.mask_aux):
            check_overlap(out, (f"aux[{slot}]" for slot in range(len(arrays))), arrays)
    return out


def _with_options(operands: Operands, problem: Problem, modifying: Modifying | None) -> Operands:
    if problem.dropout_p:
        keys = dropout.head_keys(problem.dropout_seed, problem.batch, problem.heads_q)
        operands = operands._replace(dropout_keys=keys)
    if modifying is None:
        return operands
    return operands._replace(
        score_aux=modifying.score_aux,
        mask_aux=modifying.mask_aux,
        block_mask=modifying.block_mask,
    )


def _problem_of(
    q: np.ndarray,
    v: np.ndarray,
    ranges: np.ndarray | None,
    of_call: tuple[tuple[int, ...], int, int, int, int, int],
    causal: bool,
    paged: bool,
    *,
    scale: Any = None,
    window: Any = (None, None),
    chunk: Any = 0,
    softcap: Any = None,
    alibi: Any = None,
    sinks: Any = None,
    dropout_p: Any = 0.0,
    dropout_seed: Any = None,
    precision: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Any = (),
    block_mask: Any = None,
) -> tuple[Problem, np.ndarray | None, np.ndarray | None, Modifying | None]:
    """Return (problem, alibi, sinks, what modifiers add); `of_call` is (lead, lengths, offset,
    first key, keys of the array), of the longest entry where there are several.
    """
    lead, seqlen_q, seqlen_k, offset, first_key, all_keys = of_call
    batch, heads_q, head_dim = prod(lead), q.shape[-3], q.shape[-1]
    storage = float_name(q.dtype)
    dtype = COMPUTE[storage]
    left, right = window_of(window, causal)
    if ranges is None:
        left, right = shortened(left, right, offset, seqlen_q, seqlen_k)
    if alibi is not None:
        alibi = slopes_of(alibi, lead, heads_q, dtype)
    if sinks is not None:
        sinks = sinks_of(sinks, heads_q, dtype)
    sizes = (batch, heads_q, v.shape[-3], seqlen_q, seqlen_k, head_dim, v.shape[-1])
    numbers: tuple[Any, ...] = (scale_of(scale, head_dim, dtype), offset, left, right)
    numbers += (chunk_of(chunk), 0, softcap_of(softcap, dtype))
    numbers += (*dropout_of(dropout_p, dropout_seed), tf32_of(precision, storage))
    variant: tuple[Any, ...] = (dtype, storage, paged)
    scores = (batch, heads_q, seqlen_q, all_keys)
    modifying = _modifying(score_mod, mask_mod, aux, block_mask, scores)
    if modifying is not None:
        variant += modifying.modifiers
        numbers += (first_key, *modifying.block)
    return _problem(variant, *sizes, *numbers), alibi, sinks, modifying


def _modifying(
    score_mod: Any, mask_mod: Any, aux: Any, block_mask: Any, scores: tuple[int, int, int, int]
) -> Modifying | None:
    """Return what modifiers add to the call; None without them."""
    if score_mod is mask_mod is block_mask is None and type(aux) is tuple and not aux:
        return None
    from .modifying import modifying_of

    return modifying_of(score_mod, mask_mod, aux, block_mask, scores)


@lru_cache(maxsize=1024)
def _problem(variant: tuple[Any, ...], *fields: Any) -> Problem:
    # Cached: making the two frozen records costs 2 µs, finding them again 0.4 µs.
    return Problem(Variant(*variant), *fields)
