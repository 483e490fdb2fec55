"""flash_attn_with_kvcache: append to a cache of keys and values, and attend to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import repeat
from ..arguments import Lengths, flag, per_batch
from ..arrays import NAMES as CORE_NAMES
from ..arrays import canonical, integers
from ..check import check
from ..errors import raising_argument_errors
from ..kinds import is_tensor, like, numpy_view
from ..launch import run
from ..problem import Operands, Problem
from .arguments import NAMES, NO_WINDOW, check_batch, tokens_first, window_of
from .call import with_infinity
from .rotation import angles_at, check_tables, turned

CACHE_NAMES = CORE_NAMES._replace(k="k_cache", v="v_cache")
OF_CORE = {**NAMES, "kv_len": "cache_seqlens", "kv_start": "cache_leftpad"}
OF_CORE["return_lse"] = "return_softmax_lse"

Places = tuple[np.ndarray, np.ndarray]  # pages and slots of rows


class Cache(NamedTuple):
    """Where the keys of a call are: row t of batch entry b is row t % page_size of page
    table[b, t // page_size].
    """

    k: np.ndarray  # (num_pages, page_size, heads_kv, head_dim)
    v: np.ndarray  # (num_pages, page_size, heads_kv, head_dim_v)
    table: np.ndarray  # (batch, max_pages) ints
    is_whole: bool  # one page for each entry, its own

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
    rows = tokens_first("q", q)
    cache = _cache_of(k_cache, v_cache, len(rows), cache_batch_idx, block_table)
    window = window_of(window_size)
    is_local = flag("causal", causal) or window != NO_WINDOW
    places, new, kv_len = None, [], cache_seqlens
    if _has_new(k, v, cache_seqlens):
        new = [tokens_first("k", k), tokens_first("v", v)]
        check_batch(q=rows, k=new[0], v=new[1])
        lengths = _lengths(cache_seqlens, len(rows), cache.capacity)
        kv_len = lengths + new[0].shape[1]
        places = _checked_places(cache, k_cache, v_cache, lengths, new)
        if rotary_cos is not None or rotary_sin is not None:
            angles = _angles(rotary_cos, rotary_sin)
            interleaved = flag("rotary_interleaved", rotary_interleaved)
            rows, new[0] = _turned(rows, new[0], lengths, angles, interleaved, is_local)
    options: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "softcap": softcap}
    options |= {"window": window, "alibi": alibi_slopes, "return_lse": return_softmax_lse}
    given = Lengths(kv_len=kv_len, kv_start=cache_leftpad, block_table=cache.table)
    out, lse = _attend(rows, cache, given, options, places, new)
    return (like(q, out), with_infinity(like(q, lse))) if return_softmax_lse else like(q, out)


def _attend(
    rows: np.ndarray,
    cache: Cache,
    lengths: Lengths,
    options: dict[str, Any],
    places: Places | None,
    new: list[np.ndarray],
) -> tuple[np.ndarray, np.ndarray | None]:
    """Check what is left to be checked, write the new keys and values to their places, attend."""
    views = rows.swapaxes(1, 2), cache.k.swapaxes(1, 2), cache.v.swapaxes(1, 2)
    key = ready = None
    if options["alibi"] is None and options["return_lse"] is False:
        scalars = ("kvcache", options["scale"], options["causal"], options["softcap"])
        key = repeat.key_of(views, scalars, options["window"], lengths)
    known = repeat.find(key)
    if known is not None:
        ready = repeat.others_of(known, views[1], lengths)
    checked = None if ready else _checked(views, lengths, options)
    if places is not None:
        cache.k[places], cache.v[places] = new
    found = known.run(views, None, ready) if known and ready else None
    if found is not None:
        return found[0].swapaxes(1, 2), None
    problem, operands = checked or _checked(views, lengths, options)
    repeat.keep(key, views, run(problem, operands, "auto"), operands, operands.out.shape)
    return operands.out.swapaxes(1, 2), operands.lse


def _checked(
    views: tuple[np.ndarray, np.ndarray, np.ndarray], lengths: Lengths, options: dict[str, Any]
) -> tuple[Problem, Operands]:
    """Check a call, its result to be C-contiguous with the heads behind the tokens."""
    (batch, heads, seqlen_q, _), dim = views[0].shape, views[2].shape[-1]
    out = np.empty((batch, seqlen_q, heads, dim), views[0].dtype).swapaxes(1, 2)
    options = {**lengths._asdict(), **options}
    return check(*views, **options, out=out, names=CACHE_NAMES)


def _cache_of(
    k_cache: Any, v_cache: Any, batch: int, cache_batch_idx: Any, block_table: Any
) -> Cache:
    """Return the cache, one page for each entry if it has no pages."""
    k, v = tokens_first("k_cache", k_cache), tokens_first("v_cache", v_cache)
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
    return Cache(k, v, table, block_table is None and cache_batch_idx is None)


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


def _checked_places(
    cache: Cache, k_cache: Any, v_cache: Any, lengths: np.ndarray, new: list[np.ndarray]
) -> Places:
    """Return where new keys and values belong; raise unless they can be written there."""
    count = new[0].shape[1]
    _check_written("k", cache.k, k_cache, new[0], count)
    _check_written("v", cache.v, v_cache, new[1], count)
    if np.count_nonzero(lengths > cache.capacity - count):
        rule = f"cache_seqlens must leave room for {count} rows of {cache.capacity}"
        raise ValueError(f"{rule}, got {lengths.max()}")
    rows, size = lengths[:, None], cache.k.shape[1]
    if count != 1:
        rows = rows + np.arange(count)
    if cache.is_whole:
        return cache.table, rows
    pages = cache.table[np.arange(len(rows))[:, None], rows // size]
    bad = (pages < 0) | (pages >= len(cache.k))
    if bad.any():
        rule = f"block_table must hold pages from 0 to {len(cache.k) - 1} where there are keys"
        raise ValueError(f"{rule}, got {pages[bad][0]}")
    slots = rows % size
    if len(rows) > 1:
        places = (pages.astype(np.int64) * size + slots).ravel().tolist()
        if len(set(places)) != len(places):
            raise ValueError(
                "k and v must go to rows of their own, got two for one row of the cache"
            )
    return pages, slots


def _check_written(name: str, rows: np.ndarray, owner: Any, new: np.ndarray, count: int) -> None:
    """Raise unless `new` can be written to `rows`, the cache that the caller passed."""
    if not isinstance(owner, np.ndarray) and not is_tensor(owner):
        rule = f"{name}_cache must be an array of NumPy or a tensor, to be written"
        raise TypeError(f"{rule}, got {type(owner).__name__}")
    if new.dtype != rows.dtype:
        rule = f"{name} must have the dtype of {name}_cache"
        raise TypeError(f"{rule}, {rows.dtype}, got {new.dtype}")
    if new.shape[2:] != rows.shape[2:] or new.shape[1] != count:
        wanted = (len(new), count, *rows.shape[2:])
        raise ValueError(f"{name} must have shape {wanted}, got {new.shape}")
    if not rows.flags.writeable:
        raise ValueError(f"{name}_cache must be writeable, got a read-only array")
    if canonical(rows) is not rows:
        rule = f"{name}_cache must be native and aligned"
        raise ValueError(f"{rule}, got {rows.dtype} with strides {rows.strides}")


def _angles(rotary_cos: Any, rotary_sin: Any) -> tuple[np.ndarray, np.ndarray]:
    if rotary_cos is None or rotary_sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together, got one")
    return numpy_view("rotary_cos", rotary_cos), numpy_view("rotary_sin", rotary_sin)


def _turned(
    q: np.ndarray,
    new_k: np.ndarray,
    lengths: np.ndarray,
    tables: tuple[np.ndarray, np.ndarray],
    interleaved: bool,
    in_steps: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return queries and new keys, (batch, tokens, heads, head_dim), turned: keys to positions
    lengths[b] + t, queries likewise or all to lengths[b].
    """
    for name, x in (("k", new_k), ("q", q)):
        check_tables(x, *tables, (name, "rotary_cos", "rotary_sin"))
    first, tokens, heads = lengths[:, None], new_k.shape[1], q.shape[2]
    angles = angles_at(*tables, first + np.arange(tokens), "rotary_cos")
    if (*q.shape[:2], q.shape[3]) == (*new_k.shape[:2], new_k.shape[3]) and (
        in_steps or tokens == 1
    ):
        both = turned(np.concatenate((q, new_k), axis=2), angles, interleaved)
        return both[:, :, :heads], both[:, :, heads:]
    of_q = angles_at(*tables, first + np.arange(q.shape[1] if in_steps else 1), "rotary_cos")
    return turned(q, of_q, interleaved), turned(new_k, angles, interleaved)
