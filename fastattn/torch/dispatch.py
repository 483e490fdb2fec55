"""What a call is, to torch: recorded, traced, transformed, cast, or nothing of this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..kinds import view_of_tensor

PLAIN = {Tensor, torch.nn.Parameter}
# What torch does in 0.3 ms, by the multiplies and adds of both products or by the keys and values
# that are read. Within a model, where its data drive code out of the caches, a call of Python costs
# 0.1 ms more than one of C++ (bench/patched.py).
MUCH_FLOP, MUCH_BYTES = 50_000_000, 4 << 20


def check_tensors(names: Iterable[str], tensors: Iterable[Any]) -> None:
    """Raise unless all are tensors."""
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")


def is_plain(*tensors: Any) -> bool:
    """Whether nothing but values matters of these tensors (or None): no tracing, transform, mode,
    subclass, other device or pending sign.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
        return False
    if torch.overrides.has_torch_function(tensors):
        return False
    for t in tensors:  # any() and a function of one tensor take longer
        if t is None:
            continue
        if type(t) not in PLAIN or not t.is_cpu or t.is_neg():
            return False
        if t.layout is not torch.strided or t.is_nested:
            return False
    return True


def array_of(name: str, t: Tensor | None) -> Any:
    """Return a plain tensor (or None) as NumPy sees its memory; `name` is for errors."""
    if t is None:
        return None
    return view_of_tensor(name, t.detach() if t.requires_grad else t)


def is_elsewhere(*tensors: Any) -> bool:
    """Whether one is of another device than the CPU, and has more than a shape (`meta`)."""
    return any(isinstance(t, Tensor) and t.device.type not in ("cpu", "meta") for t in tensors)


def is_transformed() -> bool:
    """Whether a transform of torch.func, or differentiation in forward mode, is at work."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.autograd.forward_ad._current_level >= 0


def is_large(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call is long enough for its fixed costs not to matter."""
    if query is None or key is None or value is None:
        return False
    if key.nbytes + value.nbytes >= MUCH_BYTES:
        return True
    return query.ndim > 1 < key.ndim and 4 * query.numel() * key.shape[-2] >= MUCH_FLOP


def needs_gradient(*tensors: Any) -> bool:
    """Whether autograd has to record a function of these."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def is_direct(q: Any, k: Any, v: Any, *others: Any) -> bool:
    """Whether fastattn's own functions do, for these arguments."""
    if q is None or k is None or v is None or torch.is_autocast_enabled("cpu"):
        return False
    return is_plain(q, k, v, *others) and not needs_gradient(q, k, v, *others)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return float32 and half tensors in the dtype of autocast, where that is enabled, as torch
    does for its scaled_dot_product_attention.
    """
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    casts = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(
        t.to(dtype) if t is not None and t.dtype in casts and t.is_cpu else t for t in tensors
    )


def number(value: Any) -> Any:
    """Return a tensor without axes as a number, anything else as it is."""
    return value.item() if isinstance(value, Tensor) and not value.ndim else value


def seed_of(dropout_p: Any) -> Tensor | None:
    """Return a seed that torch's generator of the CPU draws; None without dropout."""
    return None if dropout_p == 0 else torch.randint(2**63 - 1, ())
