"""S_dmask: the probabilities of a call with dropout, for those who test it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..api import dropout_mask
from ..kinds import like, numpy_view
from ..weights import attention_weights
from .arguments import dense


def signed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Return (batch, heads_q, seqlen_q, seqlen_k), negative where dropout took them; (0,) without
    dropout.
    """
    dropout = {name: options.pop(name, None) for name in ("dropout_p", "dropout_seed")}
    rows, keys = dense("q", _detached(q)), dense("k", _detached(k))
    if not dropout["dropout_p"]:
        return like(q, np.zeros(0, rows.dtype))
    weights = attention_weights(rows, keys, **options)
    kept = dropout_mask(weights.shape, **dropout)
    return like(q, np.where(kept, weights, -weights))


def signed_packed(
    q: Any, k: Any, v: Any, edges_q: Any, edges_k: Any, block_table: Any, **options: Any
) -> Any:
    """Return the same for packed arrays, each member's in the first rows and keys of its own."""
    dropout = {name: options.pop(name, None) for name in ("dropout_p", "dropout_seed")}
    rows, keys = numpy_view("q", _detached(q)), numpy_view("k", _detached(k))
    if not dropout["dropout_p"]:
        return like(q, np.zeros(0, rows.dtype))
    if block_table is not None:
        raise ValueError("return_attn_probs must be False with dropout and block_table, got True")
    edges_q, edges_k = (np.asarray(numpy_view("cu_seqlens", e)) for e in (edges_q, edges_k))
    sizes = len(edges_q) - 1, rows.shape[1], np.diff(edges_q).max(), np.diff(edges_k).max()
    found = np.zeros(sizes, np.result_type(rows.dtype, np.float32))
    alibi = options.pop("alibi", None)
    slopes = None if alibi is None else np.broadcast_to(numpy_view("alibi", alibi), sizes[:2])
    for b in range(sizes[0]):
        q_b = rows[edges_q[b] : edges_q[b + 1]].swapaxes(0, 1)
        k_b = keys[edges_k[b] : edges_k[b + 1]].swapaxes(0, 1)
        if slopes is not None:
            options["alibi"] = slopes[b]
        weights = attention_weights(q_b, k_b, **options)
        found[b, :, : weights.shape[1], : weights.shape[2]] = weights
    return like(q, np.where(dropout_mask(sizes, **dropout), found, -found))


def _detached(a: Any) -> Any:
    """Return a tensor without its gradient, anything else as it is."""
    return a.detach() if hasattr(a, "detach") else a
