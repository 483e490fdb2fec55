"""The same calls for tensors of torch that need a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_varlen
from ..backward import attention_backward, attention_varlen_backward
from ..kinds import is_tensor


def attend_recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of tensors (batch, seqlen, heads, dim)."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            rule = f"{name} must have shape (batch, seqlen, heads, dim)"
            raise ValueError(f"{rule}, got {tuple(t.shape)}")
    slopes = _slopes(options)

    def forward(q: Tensor, k: Tensor, v: Tensor, **sinks: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        first, second, third = (t.transpose(1, 2) for t in (q, k, v))
        given = options | sinks | {"return_lse": True, "out": out.transpose(1, 2)}
        return out, attention(first, second, third, **given)[1]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **sinks: Any
    ) -> list[Tensor]:
        dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
        found = attention_backward(dout, q, k, v, out, lse, **options, **slopes, **sinks)
        return [*(t.transpose(1, 2) for t in found[:3]), *found[3:]]

    return _record(forward, backward, (q, k, v), options)


def attend_packed_recorded(
    q: Tensor, k: Tensor, v: Tensor, edges_q: Any, edges_k: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of tensors (tokens, heads, dim)."""
    slopes = _slopes(options)

    def forward(q: Tensor, k: Tensor, v: Tensor, **sinks: Tensor) -> tuple[Tensor, Tensor]:
        given = options | sinks | {"return_lse": True}
        return attention_varlen(q, k, v, edges_q, edges_k, **given)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **sinks: Any
    ) -> Any:
        more = options | slopes | sinks
        return attention_varlen_backward(dout, q, k, v, out, lse, edges_q, edges_k, **more)

    return _record(forward, backward, (q, k, v), options)


def _slopes(options: dict[str, Any]) -> dict[str, Any]:
    """Take out of `options` what only the gradient is told of; refuse what it cannot do."""
    if options.pop("block_table", None) is not None:
        raise ValueError("block_table must be None where a gradient is needed, got one")
    return {name: options.pop(name) for name in ("score_mod_grad",) if name in options}


def _record(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Call, with the sinks, if they are a tensor, among the tensors."""
    if is_tensor(options.get("sinks")):
        tensors += (options.pop("sinks"),)
    return _Recorded.apply(forward, backward, *tensors)


class _Recorded(torch.autograd.Function):
    """forward(q, k, v, sinks=) -> (out, lse), and backward(dout, q, k, v, out, lse, sinks=,
    return_dsinks=) -> their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(*tensors[:3], **_sinks(tensors))
        ctx.save_for_backward(out, lse, *tensors)
        ctx.mark_non_differentiable(lse)
        ctx.backward_of = backward
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        sinks: dict[str, Any] = _sinks(tensors)
        if sinks:
            sinks["return_dsinks"] = True
        return None, None, *ctx.backward_of(dout, *tensors[:3], out, lse, **sinks)


def _sinks(tensors: Any) -> dict[str, Tensor]:
    return {"sinks": tensors[3]} if len(tensors) > 3 else {}
