"""Calls of the core in flash_attn's layout, heads behind the tokens, and in its kinds of arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import repeat
from ..api import attention_varlen
from ..arguments import dropout_of
from ..arrays import Names
from ..check import check
from ..kinds import is_tensor, like, numpy_view
from ..launch import run
from .arguments import check_batch, dense

NAMES = Names()
SCALARS = ("scale", "causal", "softcap")


def attend(
    q: Any, k: Any, v: Any, *, window: Any, return_lse: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Return (out, lse or None) of the core for arrays (batch, seqlen, heads, dim).

    options: the core's, but kv_len and the like; those that are not given must be absent.
    """
    if needs_gradient(q, k, v, options.get("sinks")):
        from .recorded import attend_recorded

        return attend_recorded(q, k, v, window=window, **options)
    options.pop("score_mod_grad", None)
    views = dense("q", q), dense("k", k), dense("v", v)
    key = None
    if not return_lse and len(options) == len(SCALARS):
        scalars = ("flash_attn", *map(options.get, SCALARS))
        key = repeat.key_of(views, scalars, window)
        found = repeat.answer(key, views)
        if found is not None:
            return like(q, found[0].swapaxes(1, 2)), None
    if "block_table" not in options:
        check_batch(q=views[0], k=views[1], v=views[2])
    batch, heads, seqlen_q, _ = views[0].shape
    out = np.empty((batch, seqlen_q, heads, views[2].shape[-1]), views[0].dtype)
    options |= {"window": window, "out": out.swapaxes(1, 2), "return_lse": return_lse}
    problem, operands = check(*views, names=NAMES, **options)
    repeat.keep(key, views, run(problem, operands, "auto"), operands, operands.out.shape)
    return like(q, out), like(q, operands.lse)


def attend_packed(
    q: Any, k: Any, v: Any, edges_q: Any, edges_k: Any, *, return_lse: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Return (out, lse or None) for arrays (tokens, heads, dim), or k and v (pages, page_size,
    heads, dim) with a block_table.
    """
    if needs_gradient(q, k, v, options.get("sinks")):
        from .recorded import attend_packed_recorded

        return attend_packed_recorded(q, k, v, edges_q, edges_k, **options)
    options.pop("score_mod_grad", None)
    views = [numpy_view(name, a) for name, a in (("q", q), ("k", k), ("v", v))]
    if options.get("block_table") is not None:
        views[1:] = (pages(name, a) for name, a in zip("kv", views[1:], strict=True))
    q_view, k_view, v_view = views
    options["return_lse"] = return_lse
    found = attention_varlen(q_view, k_view, v_view, edges_q, edges_k, **options)
    out, lse = found if return_lse else (found, None)
    return like(q, out), like(q, lse)


def pages(name: str, a: np.ndarray) -> np.ndarray:
    """Return a view (num_pages, heads, page_size, dim)."""
    if a.ndim != 4:
        rule = f"{name} must have shape (num_pages, page_size, heads, dim)"
        raise ValueError(f"{rule}, got {a.shape}")
    return a.swapaxes(1, 2)


def needs_gradient(*arrays: Any) -> bool:
    """Whether autograd has to record a function of these."""
    if type(arrays[0]) is np.ndarray or "torch" not in sys.modules:
        return False
    torch = sys.modules["torch"]
    return torch.is_grad_enabled() and any(is_tensor(a) and a.requires_grad for a in arrays)


def drawn_seed(q: Any, dropout_p: Any) -> int:
    """Return a seed of dropout: from torch's generator for tensors, else from the system."""
    if is_tensor(q):
        return int(sys.modules["torch"].randint(2**63 - 1, ()))
    return dropout_of(dropout_p, None)[1]


def with_infinity(lse: Any) -> Any:
    """Return lse as flash_attn 2 has it: infinity for a row that sees no key."""
    lse = lse.clone() if is_tensor(lse) else lse  # a gradient may need the one there is
    lse[lse == -np.inf] = np.inf
    return lse
