"""attention() as an operator of torch: for its compiler, for export, for autograd and torch.func.

torch.ops.fastattn.attention takes what a graph can hold of the arguments of attention(), in the
order of Call, and returns (out, lse). Its gradient is an operator, too: graphs of training hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import launch, repeat
from ..backward import attention_backward
from ..check import check
from ..check_backward import gives_its_order
from ..kinds import as_tensor
from .batching import batched_backward, batched_forward
from .call import ARRAYS, ON_DEMAND, TENSORS, Call
from .dispatch import array_of, is_plain, is_transformed, needs_gradient
from .threads import on_threads_of_torch

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi, Tensor? sinks, "
    "Tensor? q_len, Tensor? kv_len, Tensor? kv_start, Tensor? offset, Tensor? dropout_seed, "
    "float? scale, bool causal, str align, SymInt? left, SymInt? right, SymInt chunk, "
    "float softcap, float dropout_p"
)
# A library, and not torch.library.custom_op: an empty operator of these arguments takes 6 us, made
# by that 18, and 115 where it is recorded.
LIBRARY = torch.library.Library("fastattn", "DEF")
# Gradients lie as their tensors do, so the compiler may not lay these out anew.
TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),)
LIBRARY.define(f"attention({ARGUMENTS}) -> (Tensor, Tensor)", tags=TAGS)
LIBRARY.define(
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{ARGUMENTS}, bool[] wanted) -> Tensor[]",
    tags=TAGS,
)
OPERATOR = torch.ops.fastattn.attention.default
OPERATOR_OF_BACKWARD = torch.ops.fastattn.attention_backward.default
TENSORS_OF_BACKWARD = 4 + TENSORS


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Return (out, lse), by the shortest way: the dispatcher costs more than a small call."""
    tensors = tuple(call)[:TENSORS]  # a slice of a record is not compiled by torch 2.6
    if is_transformed():
        return Transformed.apply(*call)
    if not is_plain(*tensors):
        return OPERATOR(*call)
    return Recorded.apply(*call) if needs_gradient(*tensors) else forward(*call)


# --- forward ------------------------------------------------------------------------------------


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of tensors in the memory of the CPU."""
    return on_threads_of_torch(_forward, Call(*arguments))


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    arrays = tuple(map(array_of, ARRAYS, (call.q, call.k, call.v, call.mask, call.bias)))
    key = None
    if call.has_no_other_tensors():
        key = repeat.key_of(arrays, ("operator", *call[TENSORS:]), ())
        again = repeat.answer(key, arrays)
        if again is not None:
            return as_tensor(again[0]), as_tensor(again[1])
    options = call.options() | {"mask": arrays[3], "bias": arrays[4], "return_lse": True}
    with torch.no_grad():  # the operator's kernel is called with gradients enabled
        out = None if call.q.is_contiguous() else _empty_out(call.q, call.k, call.v)
        problem, operands = check(*arrays[:3], **options, out=out)
        chosen = launch.run(problem, operands, "auto")
    found: Any = operands.out, operands.lse
    if call.q.ndim == call.k.ndim == call.v.ndim == 2:
        found = found[0][0], found[1][0]
    repeat.keep(key, arrays, chosen, operands, found[0].shape)
    return as_tensor(found[0]) if out is None else out, as_tensor(found[1])


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
    found = _find_gradients(dout, dlse, out, lse, *call, wanted)
    names = ["q", "k", "v", *(name for name in ON_DEMAND if needed[name])]
    gradients = dict(zip(names, found, strict=True))
    return tuple(gradients.get(name) for name in Call._fields)


def _find_gradients(*arguments: Any) -> Any:
    tensors = arguments[:TENSORS_OF_BACKWARD]
    if is_transformed():
        return TransformedBackward.apply(*arguments)
    if is_plain(*tensors) and not needs_gradient(*tensors):
        return backward(*arguments)
    return OPERATOR_OF_BACKWARD(*arguments)


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *arguments: Any,
) -> list[Tensor]:
    """Return dq, dk, dv and those of ON_DEMAND that are wanted: the last argument says which."""
    call, wanted = Call(*arguments[:-1]), arguments[-1]
    asked = {f"return_d{name}": want for name, want in zip(ON_DEMAND, wanted, strict=True)}
    with torch.no_grad():
        dout = torch.zeros_like(out) if dout is None else dout
        of_call = call.options() | asked
        results = (dout, call.q, call.k, call.v, out, lse)
        of_call["dlse"] = dlse
        return list(on_threads_of_torch(attention_backward, *results, **of_call))


def _fake_backward(dout: Any, dlse: Any, out: Any, lse: Any, *arguments: Any) -> list[Tensor]:
    call, wanted = Call(*arguments[:-1]), arguments[-1]
    others = [getattr(call, name) for name, want in zip(ON_DEMAND, wanted, strict=True) if want]
    main = [_empty_gradient(t, out.shape[:-3]) for t in call[:3]]
    return [*main, *(t.new_empty(t.shape) for t in others)]


def _empty_gradient(t: Tensor, lead: torch.Size) -> Tensor:
    """A tensor for the gradient by `t`, whose axes lie as attention_backward() lays them."""
    is_shared = t.shape[:-3].numel() != lead.numel()
    in_order = not is_shared and gives_its_order(t.shape, t.stride(), 1)
    return torch.empty_like(t) if in_order else t.new_empty(t.shape)


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "fastattn has no second derivatives: call torch's own scaled_dot_product_attention, "
        "within torch.nn.attention.sdpa_kernel(SDPBackend.MATH), where they are needed"
    )


# --- autograd -----------------------------------------------------------------------------------


class Recorded(torch.autograd.Function):
    """The operator for autograd."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        found = _forward_by_values(*arguments)
        _save(ctx, arguments, found)
        return found

    backward = staticmethod(_backward)


class RecordedBackward(torch.autograd.Function):
    """Likewise, its gradient: recorded to say that there is no second one."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_backward_by_values(*arguments))

    backward = staticmethod(_no_second_derivative)


class Transformed(torch.autograd.Function):
    """The operator for torch.func, which cannot differentiate operators from Python. It wants this
    form, whose calls take longer.
    """

    generate_vmap_rule = True
    forward = staticmethod(OPERATOR)
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)


class TransformedBackward(torch.autograd.Function):
    """Likewise, its gradient."""

    generate_vmap_rule = True
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(OPERATOR_OF_BACKWARD(*arguments))


def _forward_by_values(*arguments: Any) -> tuple[Tensor, Tensor]:
    if is_plain(*arguments[:TENSORS]):
        return forward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATOR(*arguments)


def _backward_by_values(*arguments: Any) -> list[Tensor]:
    if is_plain(*arguments[:TENSORS_OF_BACKWARD]):
        return backward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATOR_OF_BACKWARD(*arguments)


def _record(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator's kernel for autograd."""
    if needs_gradient(*arguments[:TENSORS]):
        return Recorded.apply(*arguments)
    return _forward_by_values(*arguments)


def _record_backward(*arguments: Any) -> list[Tensor]:
    if needs_gradient(*arguments[:TENSORS_OF_BACKWARD]):
        return list(RecordedBackward.apply(*arguments))
    return _backward_by_values(*arguments)


LIBRARY.impl("attention", forward, "CPU")
LIBRARY.impl("attention", _record, "Autograd")
LIBRARY.impl("attention_backward", backward, "CPU")
LIBRARY.impl("attention_backward", _record_backward, "Autograd")
torch.library.register_fake("fastattn::attention", _fake_forward, lib=LIBRARY)
torch.library.register_fake("fastattn::attention_backward", _fake_backward, lib=LIBRARY)
torch.library.register_vmap("fastattn::attention", batched_forward, lib=LIBRARY)
torch.library.register_vmap("fastattn::attention_backward", batched_backward, lib=LIBRARY)
