"""flash_attn_with_kvcache: append to a cache of keys and values, and attend to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..api import run
from ..arguments import flag, per_batch
from ..arrays import NAMES as CORE_NAMES
from ..arrays import canonical, integers
from ..check import check
from ..errors import raising_argument_errors
from ..kinds import is_tensor, like, numpy_view
from .arguments import NAMES, check_batch, dense, window_of
from .call import with_infinity
from .rotation import turned

CACHE_NAMES = CORE_NAMES._replace(k="k_cache", v="v_cache")
OF_CORE = {**NAMES, "kv_len": "cache_seqlens", "kv_start": "cache_leftpad"}


class Cache(NamedTuple):
    """Where the keys of a call are: row t of batch entry b is row t % page_size of page
    table[b, t // page_size].
    """

    k: np.ndarray  # (num_pages, page_size, heads_kv, head_dim)
    v: np.ndarray  # (num_pages, page_size, heads_kv, head_dim_v)
    table: np.ndarray  # (batch, max_pages) ints

    @property
    def capacity(self) -> int:
        """Rows that a batch entry has room for."""
        return self.table.shape[1] * self.k.shape[1]


@raising_argument_errors(**OF_CORE)
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Return attention to a cache, k and v appended to it, as flash_attn_with_kvcache does.

    Nothing is written before all arguments have been looked at.

    Parameters
    ----------
    q : (batch, seqlen_q, heads_q, head_dim) float16, bfloat16, float32 or float64
        NumPy array or tensor of torch in the memory of the CPU, and so are all others.
    k_cache, v_cache : (batch_cache, seqlen_cache, heads_kv, dim), dtype of q
        With block_table, pages: (num_pages, page_size, heads_kv, dim), page_size >= 1.
    k, v : (batch, seqlen_new, heads_kv, dim)
        Written to rows cache_seqlens[b] and on, in place. No two may go to one row.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2), dtype of q. Only used with k and v.
        k is turned to positions cache_seqlens[b] + t before it is written; q to cache_seqlens[b] +
        i with causal or a window, else to cache_seqlens[b].
    cache_seqlens : int, or (batch,) ints: rows in use before k and v. Default: all.
    cache_batch_idx : (batch,) ints: which row of the cache is whose. Default: b. Not with pages.
    cache_leftpad : int, or (batch,) ints: the first rows that are no keys. Default: 0.
    block_table : (batch, max_pages) ints: the pages of each; those without keys may be anything.
    softmax_scale, causal, window_size, softcap, alibi_slopes : as in flash_attn_func(), where
        seqlen_k is cache_seqlens[b] + seqlen_new - cache_leftpad[b], and j counts from there.
    rotary_interleaved : bool
        Pairs are features (2t, 2t + 1), not (t, t + rotary_dim / 2).
    num_splits : ignored
    return_softmax_lse : bool

    Returns
    -------
    out : (batch, seqlen_q, heads_q, head_dim_v), dtype and library of q, C-contiguous
    softmax_lse : (batch, heads_q, seqlen_q) float32 (float64 for float64), if return_softmax_lse
        Natural log; infinity for a row that sees no key.

    Raises
    ------
    As flash_attn_func().
    """
    rows = dense("q", q)
    has_new = _has_new(k, v, cache_seqlens)
    new = [dense(name, a).swapaxes(1, 2) for name, a in (("k", k), ("v", v))] if has_new else []
    cache = _cache_of(k_cache, v_cache, len(rows), cache_batch_idx, block_table)
    lengths = kv_len = cache_seqlens
    window = window_of(window_size)
    is_local = flag("causal", causal) or window != (None, None)
    if has_new:
        check_batch(q=rows, k=new[0], v=new[1])
        lengths = _lengths(cache_seqlens, len(rows), cache.capacity)
        kv_len = lengths + new[0].shape[1]
        _check_new(cache, k_cache, v_cache, lengths, new)
    if has_new and (rotary_cos is not None or rotary_sin is not None):
        angles = _angles(rotary_cos, rotary_sin)
        interleaved = flag("rotary_interleaved", rotary_interleaved)
        new[0] = _turned("k", new[0], lengths, angles, interleaved, True)
        q_turned = _turned("q", rows.swapaxes(1, 2), lengths, angles, interleaved, is_local)
        rows = q_turned.swapaxes(1, 2)
    options: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "window": window}
    options |= {
        "softcap": softcap,
        "alibi": alibi_slopes,
        "kv_len": kv_len,
        "kv_start": cache_leftpad,
    }
    places = _places(cache, lengths, new[0].shape[1]) if has_new else None
    out, lse = _attend(rows, cache, places, new, return_softmax_lse, options)
    return (like(q, out), with_infinity(like(q, lse))) if return_softmax_lse else like(q, out)


def _attend(
    rows: np.ndarray,
    cache: Cache,
    places: tuple[np.ndarray, np.ndarray] | None,
    new: list[np.ndarray],
    return_lse: bool,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray | None]:
    """Check what is left to be checked, write the new keys and values to their places, attend."""
    batch, heads, seqlen_q, _ = rows.shape
    out = np.empty((batch, seqlen_q, heads, cache.v.shape[-1]), rows.dtype)
    options |= {"out": out.swapaxes(1, 2), "return_lse": return_lse, "names": CACHE_NAMES}
    k, v = cache.k.swapaxes(1, 2), cache.v.swapaxes(1, 2)
    problem, operands = check(rows, k, v, block_table=cache.table, **options)
    if places is not None:
        cache.k[places], cache.v[places] = new
    run(problem, operands, "auto")
    return out, operands.lse


def _cache_of(
    k_cache: Any, v_cache: Any, batch: int, cache_batch_idx: Any, block_table: Any
) -> Cache:
    """Return the cache, one page for each entry if it has no pages."""
    k, v = (dense(*pair).swapaxes(1, 2) for pair in (("k_cache", k_cache), ("v_cache", v_cache)))
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx must be None with block_table, got both")
        table = integers("block_table", "ints of shape (batch, max_pages)", block_table)
        if table.ndim != 2 or len(table) != batch:
            rule = f"block_table must have shape ({batch}, max_pages)"
            raise ValueError(f"{rule}, got {table.shape}")
    elif cache_batch_idx is not None:
        table = _indices("cache_batch_idx", cache_batch_idx, batch, len(k) - 1)[:, None]
    elif len(k) < batch:
        raise ValueError(f"k_cache must have a row for each of {batch} of q, got {len(k)}")
    else:
        table = np.arange(batch)[:, None]
    return Cache(k, v, table)


def _lengths(cache_seqlens: Any, batch: int, capacity: int) -> np.ndarray:
    """Return (batch,) int64."""
    lengths = per_batch("cache_seqlens", cache_seqlens, (batch,), 0, capacity)
    return lengths if lengths.ndim else np.full(batch, lengths)


def _indices(name: str, value: Any, batch: int, last: int) -> np.ndarray:
    found = per_batch(name, value, (batch,), 0, last)
    if not found.ndim:
        raise ValueError(f"{name} must have shape {(batch,)}, got ()")
    return found


def _has_new(k: Any, v: Any, cache_seqlens: Any) -> bool:
    if k is None and v is None:
        return False
    if k is None or v is None:
        raise ValueError(f"k and v must be given together, got {'v' if k is None else 'k'} alone")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, got None")
    return True


def _check_new(
    cache: Cache, k_cache: Any, v_cache: Any, lengths: np.ndarray, new: list[np.ndarray]
) -> None:
    """Raise unless new keys and values can be written where they belong."""
    given = ("k", cache.k, k_cache, new[0]), ("v", cache.v, v_cache, new[1])
    for name, rows, owner, a in given:
        if not isinstance(owner, np.ndarray) and not is_tensor(owner):
            rule = f"{name}_cache must be an array of NumPy or a tensor, to be written"
            raise TypeError(f"{rule}, got {type(owner).__name__}")
        if a.dtype != rows.dtype:
            rule = f"{name} must have the dtype of {name}_cache"
            raise TypeError(f"{rule}, {rows.dtype}, got {a.dtype}")
        if a.shape[2:] != rows.shape[2:] or a.shape[1] != new[0].shape[1]:
            wanted = (len(a), new[0].shape[1], *rows.shape[2:])
            raise ValueError(f"{name} must have shape {wanted}, got {a.shape}")
        if not rows.flags.writeable or canonical(rows) is not rows:
            rule = f"{name}_cache must be writeable, native and aligned"
            raise ValueError(f"{rule}, got {rows.dtype} with strides {rows.strides}")
    room = cache.capacity - new[0].shape[1]
    if (lengths > room).any():
        rule = f"cache_seqlens must leave room for {new[0].shape[1]} rows of {cache.capacity}"
        raise ValueError(f"{rule}, got {lengths.max()}")
    pages, slots = _places(cache, lengths, new[0].shape[1])
    bad = (pages < 0) | (pages >= len(cache.k))
    if bad.any():
        rule = f"block_table must hold pages from 0 to {len(cache.k) - 1} where there are keys"
        raise ValueError(f"{rule}, got {pages[bad][0]}")
    places = (pages.astype(np.int64) * cache.k.shape[1] + slots).ravel()
    if len(places) > new[0].shape[1] and len(np.unique(places)) != len(places):
        raise ValueError("k and v must go to rows of their own, got two for one row of the cache")


def _places(cache: Cache, lengths: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (pages, slots), (batch, count) each, of the rows that follow those in use."""
    rows = lengths[:, None] + np.arange(count)
    pages = np.take_along_axis(cache.table, rows // cache.k.shape[1], axis=1)
    return pages, rows % cache.k.shape[1]


def _angles(rotary_cos: Any, rotary_sin: Any) -> tuple[np.ndarray, np.ndarray]:
    if rotary_cos is None or rotary_sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together, got one")
    return numpy_view("rotary_cos", rotary_cos), numpy_view("rotary_sin", rotary_sin)


def _turned(
    name: str,
    x: np.ndarray,
    first: np.ndarray,
    angles: tuple[np.ndarray, np.ndarray],
    interleaved: bool,
    in_steps: bool,
) -> np.ndarray:
    """Return x (batch, tokens, heads, head_dim), row i turned to position first[b] + i, or all to
    first[b].
    """
    positions = first[:, None] + np.arange(x.shape[1] if in_steps else 1)
    names = name, "rotary_cos", "rotary_sin"
    return turned(x, *angles, positions, interleaved, names)
