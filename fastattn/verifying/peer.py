"""PyTorch's answer to the problems that it can express: a second opinion on the oracle."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from . import oracle
from .case import Case
from .trial import Inputs, Results, Trial

NAME = "torch"
# PyTorch may round a little worse: this is for wrong answers, its own or the oracle's. It is not
# asked in half types: there it rounds the probabilities as well, and errs up to 150 times as much.
MOST_RATIO = 4.0
DTYPES = ("float32", "float64")


def installed() -> bool:
    """Whether there is a PyTorch to ask."""
    return importlib.util.find_spec("torch") is not None


def expresses(trial: Trial) -> bool:
    """Whether scaled_dot_product_attention() has the arguments. It lets NaN through masks."""
    case = trial.case
    more = case.softcap or case.alibi or case.sinks or case.dropout_p or case.modifiers
    mixed = case.bias and case.bias_dtype not in ("", case.dtype)
    plain = trial.kind == "forward" and case.dtype in DTYPES
    return plain and not (more or mixed or trial.poison)


def results(trial: Trial, x: Inputs) -> Results:
    """What PyTorch answers."""
    import torch

    case = trial.case
    q, k, v = map(torch.from_numpy, x.arrays)
    is_causal, masking = _masking(case, x.flags)
    with torch.inference_mode():
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if masking is None else torch.from_numpy(masking),
            is_causal=is_causal,
            scale=case.scale,
            enable_gqa=True,
        )
    return {"out": out.numpy()}


def _masking(case: Case, flags: dict[str, Any]) -> tuple[bool, np.ndarray | None]:
    """(is_causal, attn_mask): its own causal mask where nothing else hides keys."""
    causal_only = Case("", case.seqlen_q, case.seqlen_k, causal=True, align="top_left")
    same = ("causal", "align", "window", "chunk", "mask", "bias", "lengths")
    if all(getattr(case, name) == getattr(causal_only, name) for name in same):
        return True, None
    names = ("causal", "align", "window", "chunk", "q_len", "kv_len", "kv_start")
    given = {name: flags[name] for name in names if name in flags}
    visible = oracle.positions(case.seqlen_q, case.seqlen_k, **given)[2] & flags.get("mask", True)
    if case.bias:
        return False, np.where(visible, flags["bias"], flags["bias"].dtype.type(-np.inf))
    visible = np.broadcast_to(visible, case.shape("bhqk"))
    return False, None if visible.all() else visible.copy()
