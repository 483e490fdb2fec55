"""attention() for tensors, recorded by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api
from ..errors import as_argument_error
from ..kinds import as_tensor
from .call import Call
from .dispatch import (
    array_of,
    autocast,
    check_tensors,
    is_direct,
    is_elsewhere,
    number,
    seed_of,
)
from .ops import run
from .threads import on_threads_of_torch


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Any = "bottom_right",
    window: tuple[int | None, int | None] = (None, None),
    chunk: int = 0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    q_len: Any = None,
    kv_len: Any = None,
    kv_start: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Return fastattn.attention() of tensors: differentiable, and an operator of torch.

    Parameters
    ----------
    As fastattn.attention(), which explains them; tensors in the memory of the CPU. Lengths and
    align may be ints or tensors. Modifiers and block masks have no place in a graph of torch.
    dropout_seed : int. Default: torch's generator of the CPU draws it.

    Returns
    -------
    out, and lse if return_lse. Both are differentiable, once, by q, k, v, bias, alibi and sinks.

    Raises
    ------
    ArgumentError, ArgumentTypeError   as scaled_dot_product_attention()
    NotImplementedError                tensors of another device than the CPU
    """
    try:
        options: dict[str, Any] = {"bias": bias, "mask": mask, "alibi": alibi, "sinks": sinks}
        # update(), and not |=, which torch 2.6 cannot compile
        options.update(q_len=q_len, kv_len=kv_len, kv_start=kv_start, scale=number(scale))
        options.update(causal=causal, align=align, chunk=chunk, softcap=softcap)
        is_plain_call = type(dropout_p) is float and dropout_p == 0
        if is_plain_call and is_direct(q, k, v, bias, mask, alibi, sinks):
            options.update(window=window, return_lse=return_lse)
            return on_threads_of_torch(_directly, q, k, v, **options)
        check_tensors("qkv", (q, k, v))
        if is_elsewhere(q, k, v):
            rule = f"q, k and v must be in the memory of the CPU, got {q.device}"
            gpu = "fastattn.attention() takes tensors of an NVIDIA GPU, without gradients"
            raise NotImplementedError(f"{rule}. {gpu}.")
        for name in ("q_len", "kv_len", "kv_start"):
            options[name] = _ints(options[name])
        if not isinstance(align, str):
            options.update(align="bottom_right", offset=_ints(align))
        options["softcap"] = 0.0 if softcap is None else number(softcap)
        seed = seed_of(dropout_p) if dropout_seed is None else _ints(dropout_seed)
        options["dropout_seed"] = seed
        left, right = window
        q, k, v, options["bias"] = autocast(q, k, v, bias)
        call = Call(q, k, v, **options, left=left, right=right, dropout_p=number(dropout_p))
        found = run(call)
        return found if return_lse else found[0]
    except (TypeError, ValueError) as error:
        raise as_argument_error(error) from None


def _directly(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Return the result of plain tensors."""
    for name in ("mask", "bias"):
        options[name] = array_of(name, options[name])
    found = api.attention(*map(array_of, "qkv", (q, k, v)), **options)
    return tuple(map(as_tensor, found)) if options["return_lse"] else as_tensor(found)


def _ints(value: Any) -> Tensor | None:
    return None if value is None else torch.as_tensor(value)
