"""The public functions. Each does three things: check the arguments, plan, run the plan."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dropout, repeat
from .arguments import Lengths, dropout_of, flag
from .arrays import integers
from .check import check, check_backend, check_packed
from .kinds import array_view, is_device_view, like
from .launch import placement_of, run
from .plan import plan, plan_backward
from .problem import Plan
from .signatures import passing_keywords_to

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .block_mask import BlockMask


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | ArrayLike = "bottom_right",
    window: tuple[int | None, int | None] = (None, None),
    chunk: int = 0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    q_len: ArrayLike | None = None,
    kv_len: ArrayLike | None = None,
    kv_start: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: tuple[Any, ...] = (),
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str = "auto",
) -> Any:
    """Return softmax(scale * q @ k.T + bias) @ v without storing the score matrix.

    Parameters
    ----------
    q : (..., heads_q, seqlen_q, head_dim) float16, bfloat16, float32 or float64
        Rank 2 and up; (seqlen_q, head_dim) is one head. Any strides and byte order; never written.
        Of NumPy, or of a library that shows its arrays to NumPy: that of q returns the results.
    k, v : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v), dtype of q
        heads_kv must divide heads_q; query head h reads key head h // (heads_q // heads_kv).
        Axes before the heads broadcast, as do missing ones: they are the batch.
    scale : finite float, applied before the maximum. Default head_dim ** -0.5.
    causal : bool
        Row i sees keys j <= i + offset: the same as window=(left, 0).
    align : "bottom_right", "top_left", int, or ints that broadcast to the batch
        Query row i stands at key position i + offset: seqlen_k - seqlen_q, 0, or the int given.
        PyTorch's is_causal is "top_left".
    window : (left, right), ints >= 0 or None for no limit
        Row i sees keys i + offset - left <= j <= i + offset + right.
    chunk : int >= 0
        Row i sees keys with j // chunk == (i + offset) // chunk, rounded down. 0 is off.
    softcap : float
        Scaled scores s become softcap * tanh(s / softcap). None or <= 0 is off.
    bias : float, broadcastable to (..., heads_q, seqlen_q, seqlen_k)
        Added to the scores after softcap; -inf hides a key.
    mask : bool, broadcastable likewise. True = may attend.
    alibi : (heads_q,) or (..., heads_q) finite float
        Slopes: slope * abs(i + offset - j) is taken from the scores.
    sinks : (heads_q,) float
        One more score for every row of a head, neither scaled nor capped, that has no value: part
        of the maximum, of the sum and of lse.
    q_len, kv_len, kv_start : int, or ints that broadcast to the batch
        A batch entry has query rows i < q_len and keys from kv_start to kv_len, not included;
        others are never read. In all of the above, seqlen_q and seqlen_k are then their numbers and
        j counts from kv_start; only mask and bias keep the index of the array.
    block_table : (max_pages,) ints, or ints (..., max_pages) that broadcast with the batch of q
        k and v are then pages, (num_pages, heads_kv, page_size, dim), of any strides: key j of a
        batch entry is row j % page_size of page block_table[..., j // page_size], and seqlen_k is
        max_pages * page_size. Pages are read where they lie. Entries that hold no key from kv_start
        to kv_len are never looked at. One page for each entry chooses rows of a cache.
    score_mod : function (score, b, h, i, j, aux) -> score
        Applied to the scores after softcap, before bias and alibi; a score of -inf hides the key.
        b is the place in the batch, h the query head, i and j the row and key as mask and bias
        count them. See fastattn.mods for what it may use, and for ready-made ones.
    mask_mod : function (b, h, i, j, aux) -> bool. True = may attend.
    aux : tuple of arrays and numbers that score_mod and mask_mod index
    block_mask : BlockMask, in place of mask_mod
        What create_block_mask() made of one, with its own aux, for these sizes: the blocks of keys
        that it skips are not computed.
    dropout_p : float from 0 to 1
        Probabilities are dropped with this chance, the others divided by 1 - dropout_p; lse stays.
    dropout_seed : int from 0 to 2**63 - 1. Default: from the operating system, anew in every call.
        dropout_mask() shows what a seed keeps.
    precision : None or "tf32"
        "tf32" allows a backend to round the factors of both products to tf32, of 11 significant
        bits, where they are float32 and tensor cores multiply that: cuda, from compute capability
        8.0. Sums, softmax and results stay float32. All else computes as ever, and so do gradients.
        explain() says which.
    return_lse : bool
    out : array or torch tensor of the shape and dtype of the result, written in place; may not
        overlap an input.
    backend : "auto", "numpy", "cpu" or "cuda". Only "auto" falls back; explain() says to what.
        Arrays of a GPU stay there, on the caller's stream; those of the CPU are copied to it, and
        the result back, only where "cuda" is asked for. See docs/cuda.md.

    Returns
    -------
    out : (..., heads_q, seqlen_q, head_dim_v), dtype of q, C-contiguous unless given.
        A row that sees no key is 0, and so is one past q_len. A hidden key contributes nothing,
        even if it holds NaN or inf.
    lse : (..., heads_q, seqlen_q), float64 for float64, else float32. Only if return_lse.
        Natural log of the sum of exp(score) over the sink and the keys that a row sees; -inf if
        there are none.

    Raises
    ------
    ValueError   shapes or values that do not fit together
    TypeError    dtypes that differ or are not supported
    ImportError  the named backend cannot run here
    MemoryError  not even the smallest blocks find room; nothing has been computed
    NotImplementedError  the Numba that is installed translates kernels otherwise

    Notes
    -----
    Sums in the dtype of lse; out is rounded once. Memory beyond the output is O(block_m * block_n)
    per thread, never O(seqlen_q * seqlen_k).

    References
    ----------
    Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    given = q
    if type(q) is not np.ndarray:
        q, k, v = array_view("q", q), array_view("k", k), array_view("v", v)
    arrays: Any = (q, k, v, mask, bias)
    key = None  # of calls that may be repeated: see repeat.py
    if (
        (given is q or not any(map(is_device_view, arrays[:3])))
        and q_len is None
        and score_mod is mask_mod is None
        and block_mask is None
        and (type(aux) is tuple and not aux)
        and (type(dropout_p) is float and dropout_p == 0)
    ):
        lengths = repeat.NO_LENGTHS
        if not kv_len is kv_start is block_table is None:
            lengths = Lengths(align, None, kv_len, kv_start, block_table)
        numbers = (scale, causal, align, chunk, softcap, dropout_seed)
        scalars = (*numbers, precision, return_lse, backend)
        others = (out,) if alibi is sinks is None else (out, alibi, sinks)
        key = repeat.key_of((*arrays, *others), scalars, window, lengths)
        found = repeat.answer(key, arrays, lengths, out, alibi, sinks)
        if found is not None:
            if given is not q:
                result, lse = found
                found = like(given, result) if out is None else out, like(given, lse)
            return found if return_lse else found[0]
    check_backend(backend)
    problem, operands = check(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        align=align,
        window=window,
        chunk=chunk,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi=alibi,
        sinks=sinks,
        q_len=q_len,
        kv_len=kv_len,
        kv_start=kv_start,
        block_table=block_table,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux=aux,
        block_mask=block_mask,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        precision=precision,
        return_lse=return_lse,
        out=out,
    )
    chosen = run(problem, operands, backend)
    result, lse = operands.out, operands.lse
    if result.ndim == 3 and np.ndim(q) == np.ndim(k) == np.ndim(v) == 2:
        result, lse = result[0], None if lse is None else lse[0]
    repeat.keep(key, arrays, chosen, operands, result.shape)
    if out is None:
        out = like(given, result)
    return (out, like(given, lse)) if return_lse else out


def attention_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | ArrayLike = "bottom_right",
    window: tuple[int | None, int | None] = (None, None),
    chunk: int = 0,
    softcap: float | None = None,
    alibi: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_len: ArrayLike | None = None,
    kv_start: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: tuple[Any, ...] = (),
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str = "auto",
) -> Any:
    """Return attention() of each member of a batch whose tokens are packed one after another.

    Parameters
    ----------
    q : (tokens_q, heads_q, head_dim)
    k, v : (tokens_k, heads_kv, head_dim) and (tokens_k, heads_kv, head_dim_v), dtype of q
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) ints
        Member b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and so for k and v. From 0 to
        the number of tokens; members may be empty.
    block_table : (batch, max_pages) ints
        k and v are then pages, as in attention(); cu_seqlens_k says how many keys members have.
    others : as in attention(), where the batch is that of the members
        Modifiers get i and j within the member; a block mask has the sizes of the longest.

    Returns
    -------
    out : (tokens_q, heads_q, head_dim_v), dtype of q, C-contiguous unless given
    lse : (heads_q, tokens_q), float64 for float64, else float32. Only if return_lse.

    Raises
    ------
    As attention().
    """
    check_backend(backend)
    problem, operands = check_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=scale,
        causal=causal,
        align=align,
        window=window,
        chunk=chunk,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        kv_len=kv_len,
        kv_start=kv_start,
        block_table=block_table,
        score_mod=score_mod,
        mask_mod=mask_mod,
        aux=aux,
        block_mask=block_mask,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        precision=precision,
        return_lse=return_lse,
        out=out,
    )
    run(problem, operands, backend)
    result = like(q, operands.out[0].swapaxes(0, 1)) if out is None else out
    return result if operands.lse is None else (result, like(q, operands.lse[0]))


@passing_keywords_to(attention)
def explain(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    gradients: bool = False,
    backend: str = "auto",
    **arguments: Any,
) -> Plan:
    """Return how attention() would run these arguments, and why. Print it.

    Parameters and errors are those of attention(). Nothing is computed and `out` is not written.
    With `gradients`, how attention_backward() would run them, for a dout that lies as out does.
    """
    check_backend(backend)
    problem, operands = check(q, k, v, **arguments, fold=not flag("gradients", gradients))
    planned = plan_backward if gradients else plan
    return planned(problem, backend, placement_of(operands, backend))


@passing_keywords_to(attention_varlen)
def explain_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    gradients: bool = False,
    backend: str = "auto",
    **arguments: Any,
) -> Plan:
    """Return what explain() does, of attention_varlen() and attention_varlen_backward().

    The numbers of queries and keys are those of the longest members.
    """
    check_backend(backend)
    problem, operands = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **arguments)
    planned = plan_backward if flag("gradients", gradients) else plan
    return planned(problem, backend, placement_of(operands, backend))


def dropout_mask(
    shape: tuple[int, ...], *, dropout_p: float, dropout_seed: int | None = None
) -> np.ndarray:
    """Return which probabilities attention() keeps, as bool of `shape`.

    Parameters
    ----------
    shape : (..., heads_q, seqlen_q, seqlen_k), rank 2 and up, as the scores
    dropout_p, dropout_seed : as in attention()

    Notes
    -----
    An element depends on the seed and on its index in the batch (leading axes in C order), head,
    row and key, counted from kv_start, not on `shape`.
    """
    sizes = integers("shape", "a tuple of ints", shape)
    if sizes.ndim != 1 or len(sizes) < 2 or (sizes < 0).any():
        raise ValueError(f"shape must have two axes or more, of sizes >= 0, got {shape}")
    *lead, seqlen_q, seqlen_k = sizes.tolist()
    heads = lead.pop() if lead else 1
    p, seed = dropout_of(dropout_p, dropout_seed)
    head_keys = dropout.head_keys(seed, prod(lead), heads)
    row_keys = dropout.chained(head_keys[..., None], np.arange(seqlen_q))
    keep = dropout.kept(row_keys, np.arange(seqlen_k), p) & (p < 1)
    return keep.reshape(shape)
