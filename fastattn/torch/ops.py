"""attention() as an operator of torch: for its compiler, for export, for autograd and torch.func.

torch.ops.fastattn.attention takes what a graph can hold of the arguments of attention(), in the
order of Call, and returns (out, lse). Its gradient is an operator, too: graphs of training hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..backward import attention_backward
from .batching import batched_backward, batched_forward
from .call import ON_DEMAND, TENSORS, Call
from .dispatch import is_plain, is_transformed, needs_gradient
from .threads import on_threads_of_torch

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi, Tensor? sinks, "
    "Tensor? q_len, Tensor? kv_len, Tensor? kv_start, Tensor? offset, Tensor? dropout_seed, "
    "float? scale, bool causal, str align, SymInt? left, SymInt? right, SymInt chunk, "
    "float softcap, float dropout_p"
)
OF_BACKWARD = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, bool[] wanted"


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse), by the shortest way: the dispatcher costs more than a small call."""
    tensors = call[:TENSORS]
    if is_transformed() or (needs_gradient(*tensors) and is_plain(*tensors)):
        return Recorded.apply(*call)
    return _forward_by_values(*call)


def _forward_by_values(*arguments: Any) -> tuple[Tensor, Tensor]:
    if is_plain(*arguments[:TENSORS]):
        return forward(*arguments)
    return torch.ops.fastattn.attention(*arguments)


# --- forward ------------------------------------------------------------------------------------


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse)."""
    call = Call(*arguments)
    with torch.no_grad():  # the operator's kernel is called with gradients enabled
        out = None if call.q.is_contiguous() else _empty_out(call.q, call.k, call.v)
        options = call.options() | {"return_lse": True, "out": out}
        return on_threads_of_torch(call[:3], attention, *call[:3], **options)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, k, v = arguments[:3]
    out = _empty_out(q, k, v)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return out, q.new_empty(out.shape[:-1], dtype=dtype)


def _empty_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A tensor for the result; as in torch, its axes lie as those of q if both have one shape."""
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    has_heads = q.ndim > 2 or k.ndim > 2 or v.ndim > 2
    heads = (q.shape[-3] if q.ndim > 2 else 1,) if has_heads else ()
    shape = (*lead, *heads, q.shape[-2], v.shape[-1])
    return torch.empty_like(q) if q.shape == shape else q.new_empty(shape)


# --- backward -----------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.others = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needed = dict(zip(Call._fields, ctx.needs_input_grad, strict=True))
    wanted = [needed[name] for name in ON_DEMAND]
    call = (*tensors, *ctx.others)
    found = _find_gradients(dout, dlse, out, lse, wanted, *call)
    names = ["q", "k", "v", *(name for name in ON_DEMAND if needed[name])]
    gradients = dict(zip(names, found, strict=True))
    return tuple(gradients.get(name) for name in Call._fields)


def _find_gradients(*arguments: Any) -> Any:
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    if is_transformed() or (needs_gradient(*tensors) and is_plain(*tensors)):
        return RecordedBackward.apply(*arguments)
    return _backward_by_values(*arguments)


def _backward_by_values(*arguments: Any) -> tuple[Tensor, ...]:
    if is_plain(*(a for a in arguments if isinstance(a, Tensor))):
        return tuple(backward(*arguments))
    return tuple(torch.ops.fastattn.attention_backward(*arguments))


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: list[bool],
    *arguments: Any,
) -> list[Tensor]:
    """Return dq, dk, dv and those of ON_DEMAND that are wanted."""
    call = Call(*arguments)
    asked = {f"return_d{name}": want for name, want in zip(ON_DEMAND, wanted, strict=True)}
    with torch.no_grad():
        dout = torch.zeros_like(out) if dout is None else dout
        of_call = call.options() | asked
        results = (dout, call.q, call.k, call.v, out, lse)
        of_call["dlse"] = dlse
        return list(on_threads_of_torch(call[:3], attention_backward, *results, **of_call))


def _fake_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, wanted: list[bool], *arguments: Any
) -> list[Tensor]:
    call = Call(*arguments)
    others = [getattr(call, name) for name, want in zip(ON_DEMAND, wanted, strict=True) if want]
    return [t.new_empty(t.shape) for t in (call.q, call.k, call.v, *others)]


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "fastattn has no second derivatives: call torch's own scaled_dot_product_attention, "
        "within torch.nn.attention.sdpa_kernel(SDPBackend.MATH), where they are needed"
    )


class Recorded(torch.autograd.Function):
    """The operator for autograd without the dispatcher, which costs 30 us, and for torch.func,
    which cannot differentiate operators from Python.
    """

    generate_vmap_rule = True
    forward = staticmethod(_forward_by_values)
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)


class RecordedBackward(torch.autograd.Function):
    """Likewise, its gradient: recorded to say that there is no second one."""

    generate_vmap_rule = True
    forward = staticmethod(_backward_by_values)
    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_no_second_derivative)


attention_op = torch.library.custom_op(
    "fastattn::attention",
    forward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({ARGUMENTS}) -> (Tensor, Tensor)",
)
attention_op.register_fake(_fake_forward)
attention_op.register_autograd(_backward, setup_context=_save)
attention_op.register_vmap(batched_forward)

backward_op = torch.library.custom_op(
    "fastattn::attention_backward",
    backward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({OF_BACKWARD}, {ARGUMENTS}) -> Tensor[]",
)
backward_op.register_fake(_fake_backward)
backward_op.register_autograd(_no_second_derivative)
backward_op.register_vmap(batched_backward)
