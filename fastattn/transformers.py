"""Attention of Hugging Face Transformers: register(), then attn_implementation="fastattn"."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .optional import missing
from .torch import attention, scaled_dot_product_attention

NAME = "fastattn"
# What models pass to their own kernels and others do not have. To ignore it gives wrong answers.
REFUSED = {
    "output_attentions": "probabilities are never stored",
    "sinks": "sinks of each token",
    "indices": "keys chosen by index",
    "block_indices": "blocks of keys chosen by index",
}


def register() -> None:
    """Make "fastattn" an attention of Transformers, for models on the CPU.

    Then `from_pretrained(..., attn_implementation="fastattn")`, or `set_attn_implementation` of a
    model. Masks are those of "sdpa"; models that compute their attention themselves are refused
    when they ask for one.

    Raises
    ------
    ImportError   transformers is not installed
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        extra = "'fastattn[transformers]'"
        raise missing("fastattn.transformers", "transformers", extra) from error

    def mask(*sizes: Any, config: Any = None, **others: Any) -> Tensor | None:
        if _computes_itself(type(config)):
            rule = f"attn_implementation must be 'eager' for {type(config).__name__}"
            reason = "its model calls no registered attention, but has its own"
            raise ValueError(f"{rule} ({reason}), got {NAME!r}")
        return sdpa_mask(*sizes, config=config, **others)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


@torch.compiler.assume_constant_result  # and not traced, which it does not do to a cache
def _computes_itself(config_class: type) -> bool:
    """Whether the model of a configuration has attention of its own (BLOOM, MPT, GPT-Neo, ...).

    Such models take the masks of a registered one, and add them: zeros and ones, or, where it needs
    none, nothing. Transformers refuses "sdpa" for them, but no other name.
    """
    return _all_have_own_attention(config_class)


@cache  # 2 ms, with 6000 modules loaded
def _all_have_own_attention(config_class: type) -> bool:
    start = config_class.__module__.rpartition(".")[0] + ".modeling_"
    modules = [module for name, module in sys.modules.items() if name.startswith(start)]
    return bool(modules) and all(map(_has_own_attention, modules))


def _has_own_attention(module: ModuleType) -> bool:
    own = (c for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__)
    layers = (c for c in own if isinstance(c, type) and issubclass(c, torch.nn.Module))
    return not hasattr(module, "ALL_ATTENTION_FUNCTIONS") and any(
        "Attention" in layer.__name__ for layer in layers
    )


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return (out, None), as a layer of Transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        Its is_causal counts where the argument is None.
    query : (batch, heads_q, seqlen_q, head_dim)
    key, value : (batch, heads_kv, seqlen_k, head_dim) and (..., head_dim_v)
    attention_mask : bool, True = may attend, or float, added; broadcastable to
        (batch, heads_q, seqlen_q, seqlen_k). None: causal from the **top left** where is_causal and
        seqlen_q > 1, as sdpa_mask means it.
    dropout : float from 0 to 1
    scaling : float. Default head_dim ** -0.5.
    softcap, s_aux : the softcap and sinks of fastattn.attention()
    position_bias : float, broadcastable as the mask, added to the scores
    others : what does not change the result. The window is part of the mask already.

    Returns
    -------
    out : (batch, seqlen_q, heads_q, head_dim_v), contiguous

    Raises
    ------
    ValueError   shapes or values that do not fit together; output_attentions
    TypeError    dtypes that differ or are not supported
    """
    for name in REFUSED.keys() & others:
        if others[name] is not None and others[name] is not False:
            rule = f"{name} must be None in {NAME!r} attention ({REFUSED[name]})"
            raise ValueError(f'{rule}: call set_attn_implementation("eager") for this model')
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and query.shape[-2] > 1
    if softcap is None and s_aux is None and position_bias is None:
        # As torch's own: an output that lies as the query does, so that nothing is copied below.
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True
        )
    else:
        mask, bias = _mask_and_bias(attention_mask, position_bias)
        out = attention(
            query,
            key,
            value,
            scale=scaling,
            causal=causal,
            align="top_left",
            softcap=softcap,
            bias=bias,
            mask=mask,
            sinks=s_aux,
            dropout_p=dropout,
        )
    return out.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if attention_mask is None or not attention_mask.is_floating_point():
        return attention_mask, position_bias
    return None, attention_mask if position_bias is None else position_bias + attention_mask
