"""The ways in which flash_attn 4 is told of lengths, as the two of the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...kinds import is_tensor, numpy_view
from ..call import attend, attend_packed

Pair = tuple[Any, Any]


def attend_with_lengths(
    arrays: tuple[Any, Any, Any], edges: Pair, used: Pair, page_table: Any, options: dict[str, Any]
) -> Pair:
    """Return (out, lse or None). edges: cu_seqlens_q and _k; used: seqused_q and _k; or None."""
    q, k, v = arrays
    if edges[1] is not None and page_table is not None:
        raise ValueError("page_table must be None with cu_seqlens_k, got both")
    if edges[0] is not None:
        if used[0] is not None:
            raise ValueError("seqused_q must be None with cu_seqlens_q, got both")
        edges_k, more = _packed_keys(k, edges, used[1], page_table)
        return attend_packed(q, k, v, edges[0], edges_k, **options, **more)
    if edges[1] is not None:
        if used[0] is not None:
            raise ValueError("seqused_q must be None with cu_seqlens_k, got both")
        return _padded_queries(arrays, edges[1], used[1], options)
    more = {"block_table": page_table, "q_len": used[0], "kv_len": used[1]}
    options |= {name: value for name, value in more.items() if value is not None}
    return attend(q, k, v, **options)


def _packed_keys(k: Any, edges: Pair, used: Any, page_table: Any) -> tuple[Any, dict[str, Any]]:
    """Return cu_seqlens_k, and kv_len or block_table, for packed queries."""
    if edges[1] is not None:
        return edges[1], {} if used is None else {"kv_len": used}
    batch = len(edges[0]) - 1
    if page_table is None:  # padded keys are pages, one for each member
        page_table = np.arange(batch)[:, None]
        if len(k) != batch:
            raise ValueError(f"k must have the batch of cu_seqlens_q, {batch}, got {len(k)}")
    if used is None:
        used = np.full(batch, page_table.shape[-1] * k.shape[1])
    edges_k = np.concatenate([[0], np.cumsum(numpy_view("seqused_k", used))])
    return edges_k, {"block_table": page_table}


def _padded_queries(
    arrays: tuple[Any, Any, Any], edges_k: Any, used: Any, options: dict[str, Any]
) -> Pair:
    """Return attend_packed() of q (batch, seqlen_q, heads, head_dim) in its own shape."""
    q, k, v = arrays
    q = q if is_tensor(q) else numpy_view("q", q)
    if q.ndim != 4:
        shape = "(batch, seqlen_q, heads, head_dim)"
        raise ValueError(f"q must have shape {shape} without cu_seqlens_q, got {tuple(q.shape)}")
    batch, seqlen_q, *rest = q.shape
    edges_q = np.arange(batch + 1) * seqlen_q
    if used is not None:
        options["kv_len"] = used
    out, lse = attend_packed(q.reshape(-1, *rest), k, v, edges_q, edges_k, **options)
    if lse is not None:
        lse = lse.reshape(rest[0], batch, seqlen_q).swapaxes(0, 1)
    return out.reshape(batch, seqlen_q, *out.shape[1:]), lse
