"""Multi-head attention: projections to queries, keys and values, the core, one projection back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..api import attention, attention_varlen
from ..merging import merge
from ..signatures import passing_keywords_to
from .cache import KVCache
from .linear import LinearWeights, check_tokens, linear
from .multihead_weights import MultiHeadWeights
from .positions.rotary import Rotation

# Keywords of attention() that make no sense here.
FOREIGN = ("block_table", "return_lse", "out")
Rotations = Rotation | tuple[Rotation, Rotation] | None  # of queries and keys


@passing_keywords_to(attention, *FOREIGN)
def multihead_attention(
    x: np.ndarray,
    weights: MultiHeadWeights,
    *,
    keys: np.ndarray | KVCache | None = None,
    values: np.ndarray | None = None,
    causal: bool | None = None,
    key_mask: np.ndarray | None = None,
    rotary: Rotations = None,
    cache: KVCache | None = None,
    cu_seqlens: ArrayLike | None = None,
    backend: str = "auto",
    **options: Any,
) -> np.ndarray:
    """Return the attention of the tokens of x to themselves or to others, head beside head.

    Parameters
    ----------
    x : (..., tokens, model_dim), dtype of the weights
    weights : MultiHeadWeights
    keys : (..., tokens_k, features)
        What is attended to: cross-attention. Default x: self-attention. A KVCache that holds the
        result of project_keys() spares its projection where it is attended to again and again.
    values : (..., tokens_k, features). Default keys.
    causal : bool
        Token i sees tokens j <= i + tokens_k - tokens. Default False, with `cache` True.
    key_mask : (..., tokens_k) bool, True = may be attended: False marks padding.
        What padding tokens hold, NaN included, reaches no other token; their own rows of the
        result are computed like all others.
    rotary : Rotation, by which queries and keys are turned; Rope.rotation() makes one for all
        layers. Or two: of the queries and of the keys.
    cache : KVCache of this layer
        The tokens of x follow those in it, see them, and are appended. tokens_k is then
        cache.seqlen + tokens, also for mask and bias. Whatever is raised, the cache is what it was.
        Between calls of other lengths, the projections may round differently: they are BLAS's.
    cu_seqlens : (texts + 1,) ints
        x (tokens, model_dim) holds texts one after another, without padding: tokens cu_seqlens[t]
        to cu_seqlens[t + 1] are one, and see themselves. As in fastattn.attention_varlen, whose
        options are then those allowed.
    backend : as in fastattn.attention
    options : others of fastattn.attention: scale, window, bias, mask, alibi, score_mod, ...

    Returns
    -------
    (..., tokens, model_dim), dtype of x

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   dtypes that differ or are not supported

    References
    ----------
    Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.2.2.
    Ainslie et al. 2023, GQA, arXiv:2305.13245: heads_kv < num_heads.
    """
    _check_call(x, keys, values, weights, cache, options)
    if cu_seqlens is not None:
        others = {"keys": keys, "values": values, "key_mask": key_mask, "cache": cache}
        _check_packed(x, others | {"weights.extra": weights.extra})
    tokens_k = x.shape[-2] + cache.seqlen if cache is not None else _tokens_of(x, keys)
    options |= {"causal": cache is not None if causal is None else causal, "backend": backend}
    options = core_options(weights, key_mask, (*x.shape[:-2], tokens_k), options)
    q, k, v = _heads(x, keys, values, weights, rotary, backend)
    # Heads side by side in memory, as the projection back wants them.
    mixed = np.empty((*x.shape[:-1], weights.num_heads, weights.head_dim_v), x.dtype)
    out = mixed.swapaxes(-3, -2)
    if cu_seqlens is None:
        _attend(q, k, v, weights, cache, options, out)
    else:
        q, k, v = (a.swapaxes(0, 1) for a in (q, k, v))
        attention_varlen(q, k, v, cu_seqlens, cu_seqlens, out=mixed, **options)
    return join_heads(out, weights)


def project_heads(
    x: np.ndarray, weights: MultiHeadWeights, *, rotary: Rotations = None, backend: str = "auto"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what multihead_attention() gives to the core, for another one in its place.

    Returns
    -------
    q, k, v : (..., heads, tokens, dim): views of the projections of x (..., tokens, model_dim)
    """
    _check_call(x, None, None, weights, None, {})
    return _heads(x, None, None, weights, rotary, backend)


def join_heads(heads: np.ndarray, weights: MultiHeadWeights) -> np.ndarray:
    """Return (..., tokens, model_dim) from the results of all heads.

    Parameters
    ----------
    heads : (..., num_heads, tokens, head_dim_v), dtype of the weights
    """
    wanted = (weights.num_heads, weights.head_dim_v)
    if heads.ndim < 3 or (heads.shape[-3], heads.shape[-1]) != wanted:
        raise ValueError(
            f"heads must have shape (..., {wanted[0]}, tokens, {wanted[1]}), got {heads.shape}"
        )
    rows = heads.swapaxes(-3, -2)
    return linear(rows.reshape(*rows.shape[:-2], wanted[0] * wanted[1]), weights.out)


def project_keys(
    keys: np.ndarray,
    weights: MultiHeadWeights,
    *,
    values: np.ndarray | None = None,
    rotary: Rotation | None = None,
    backend: str = "auto",
) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and values of cross-attention, for KVCache.append().

    Parameters
    ----------
    keys, values, backend : as in multihead_attention()
    rotary : Rotation of the keys

    Returns
    -------
    k, v : (..., heads_kv, tokens_k, head_dim) and (..., heads_kv, tokens_k, head_dim_v)
    """
    check_tokens(keys, weights.k.weight, "keys")
    heads = weights.heads_kv
    if values is None and weights.kv is not None:  # one product for both
        k, v = np.split(_split(linear(keys, weights.kv), 2 * heads), 2, axis=-3)
    else:
        values = keys if values is None else values
        check_tokens(values, weights.v.weight, "values")
        k, v = _split(linear(keys, weights.k), heads), _split(linear(values, weights.v), heads)
    if rotary is not None:
        rotary.apply(k, out=k, backend=backend)
    return k, v


def _heads(
    x: np.ndarray,
    keys: np.ndarray | KVCache | None,
    values: np.ndarray | None,
    weights: MultiHeadWeights,
    rotary: Rotations,
    backend: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v, (..., heads, tokens, dim), turned: views of as few products as can be."""
    heads_q, heads_k = weights.num_heads, weights.heads_kv
    if keys is None and values is None and isinstance(weights.qkv, LinearWeights):
        heads = _split(linear(x, weights.qkv), heads_q + 2 * heads_k)
        if isinstance(rotary, Rotation):  # queries and keys lie side by side: one pass
            turned = heads[..., : heads_q + heads_k, :, :]
            rotary.apply(turned, out=turned, backend=backend)
            rotary = None
        q, k, v = np.split(heads, [heads_q, heads_q + heads_k], axis=-3)
        if rotary is not None:
            rotary[0].apply(q, out=q, backend=backend)
            rotary[1].apply(k, out=k, backend=backend)
        return q, k, v
    of_q, of_k = (rotary, rotary) if isinstance(rotary, Rotation) else rotary or (None, None)
    q = _split(linear(x, weights.q), heads_q)
    if of_q is not None:
        of_q.apply(q, out=q, backend=backend)
    if isinstance(keys, KVCache):
        return q, keys.keys, keys.values
    return q, *project_keys(
        x if keys is None else keys, weights, values=values, rotary=of_k, backend=backend
    )


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    weights: MultiHeadWeights,
    cache: KVCache | None,
    options: dict[str, Any],
    out: np.ndarray,
) -> None:
    """Write what the heads see to out (..., heads, tokens, head_dim_v)."""
    attend = attention if cache is None else cache.attend
    if weights.extra is None:
        attend(q, k, v, out=out, **options)
        return
    # The extra key is one more part of the keys: no array of keys has to make room for it.
    seen, lse = attend(q, k, v, return_lse=True, **options)
    group = weights.num_heads // weights.heads_kv
    extra_k, extra_v = (np.repeat(a, group, axis=0) for a in weights.extra)
    scale = options.get("scale")
    scale = weights.head_dim**-0.5 if scale is None else scale
    score = np.einsum("...hnd,hd->...hn", q, extra_k * q.dtype.type(scale))
    out[...] = merge(seen, lse, np.broadcast_to(extra_v[:, None], seen.shape), score)[0]


def _split(y: np.ndarray, heads: int) -> np.ndarray:
    """(..., tokens, heads * dim) as (..., heads, tokens, dim): a view, no head is copied."""
    return y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads).swapaxes(-3, -2)


def _tokens_of(x: np.ndarray, keys: np.ndarray | KVCache | None) -> int:
    if isinstance(keys, KVCache):
        return keys.keys.shape[-2]
    return (x if keys is None else keys).shape[-2]


def _check_call(
    x: np.ndarray,
    keys: np.ndarray | KVCache | None,
    values: np.ndarray | None,
    weights: MultiHeadWeights,
    cache: KVCache | None,
    options: dict[str, Any],
) -> None:
    check_tokens(x, weights.q.weight)
    if x.ndim < 2:
        raise ValueError(f"x must have shape (..., tokens, model_dim), got {x.shape}")
    if weights.extra is not None and options.get("dropout_p"):
        raise ValueError("dropout_p must be 0 with an extra key, which would not be dropped")
    if cache is not None and not (keys is None and values is None):
        raise ValueError("cache must be None with keys or values: it holds tokens of x")
    if isinstance(keys, KVCache):
        if values is not None:
            raise ValueError("values must be None where keys is a KVCache, which holds both")
        return
    for name, array in (("keys", keys), ("values", values)):
        if array is None:
            continue
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
        if array.ndim != x.ndim or array.shape[:-2] != x.shape[:-2]:
            raise ValueError(
                f"{name} must have the leading dimensions of x, {x.shape}, got {array.shape}"
            )


def _check_packed(x: np.ndarray, others: dict[str, Any]) -> None:
    if x.ndim != 2:
        raise ValueError(f"x must have shape (tokens, model_dim) with cu_seqlens, got {x.shape}")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} must be None with cu_seqlens, got {type(value).__name__}")


def core_options(
    weights: MultiHeadWeights,
    key_mask: np.ndarray | None,
    shape: tuple[int, ...],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the options of attention(): key_mask, of this shape, has become part of the mask, and
    the sinks are those of the weights unless others are given.
    """
    found = dict(options)
    if key_mask is not None:
        visible, given = _core_mask(key_mask, shape), options.get("mask")
        found["mask"] = visible if given is None else visible & given
    if weights.sinks is not None:
        found.setdefault("sinks", weights.sinks)
    return found


def _core_mask(key_mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """key_mask of exactly the given shape as (..., 1, 1, tokens), which the core broadcasts.

    Exactly: a (batch, tokens) mask of another meaning would broadcast silently if batch == tokens.
    """
    key_mask = np.asarray(key_mask)
    if key_mask.dtype != np.bool_:
        raise TypeError(f"key_mask must be bool, got {key_mask.dtype}")
    if key_mask.shape != shape:
        raise ValueError(
            f"key_mask must have one element for each key, {shape}, got {key_mask.shape}"
        )
    return key_mask[..., None, None, :]
