"""torch's own scaled_dot_product_attention, answered by fastattn where it can."""

from __future__ import annotations

from contextlib import ContextDecorator
from functools import wraps
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from ..errors import ArgumentError
from .dispatch import is_large, is_plain
from .sdpa import scaled_dot_product_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ORIGINAL = functional.scaled_dot_product_attention


@wraps(ORIGINAL)
def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if _fits(query, key, value, attn_mask):
        try:
            return scaled_dot_product_attention(*arguments, **options)
        except ArgumentError:  # torch answers it otherwise, or says why not
            pass
    if type(attn_mask) is CausalBias:
        # It knows torch's function as the attribute of its module, which now is this one.
        tensors = (query, key, value, attn_mask)
        return torch.overrides.handle_torch_function(routed, tensors, *arguments, **options)
    return ORIGINAL(*arguments, **options)


def _fits(query: Any, key: Any, value: Any, attn_mask: Any) -> bool:
    """Whether a call is for fastattn to try."""
    if torch.compiler.is_compiling():  # no second try: only what is sure to work
        if torch.onnx.is_in_onnx_export():  # which has no node for fastattn's operator
            return False
        same = query.dtype == key.dtype == value.dtype and query.dtype in DTYPES
        on_cpu = all(t.device.type == "cpu" for t in (query, key, value))
        kinds = (torch.bool, torch.float32, query.dtype)
        return same and on_cpu and (attn_mask is None or attn_mask.dtype in kinds)
    if torch.jit.is_tracing():
        return False
    plain_mask = None if type(attn_mask) is CausalBias else attn_mask
    return is_plain(query, key, value, plain_mask) and is_large(query, key, value)


class patch(ContextDecorator):
    """Route torch.nn.functional.scaled_dot_product_attention through fastattn: within `with`, or
    within the function that it decorates.

    Calls with plain tensors in the memory of the CPU are answered by
    fastattn.torch.scaled_dot_product_attention, all others by torch, as are those that it refuses
    and small ones, at which torch is faster.
    Meanwhile the fast path of torch.nn's attention layers is off, which does not call that
    function. Both hold for all threads, from when the first enters until the last has left.
    """

    _lock = Lock()
    _entered = 0
    _had_fast_path = True

    def __enter__(self) -> patch:
        with patch._lock:
            if patch._entered == 0:
                functional.scaled_dot_product_attention = routed
                patch._had_fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            patch._entered += 1
        return self

    def __exit__(self, *error: Any) -> None:
        with patch._lock:
            patch._entered -= 1
            if patch._entered == 0:
                functional.scaled_dot_product_attention = ORIGINAL
                torch.backends.mha.set_fastpath_enabled(patch._had_fast_path)
