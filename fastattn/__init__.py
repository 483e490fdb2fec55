"""Fused attention for NumPy arrays, compiled for the CPU at hand.

attention() and its kin are here; print(explain(...)) says how a call would run. Beside them

nn            layers of transformers: multi-head attention, caches, positions, norms
mods          words for score_mod and mask_mod, and ready-made ones
plot          pictures of what a head looks at
torch, jax, dask, transformers, flash_attn, onnx, udl
              the same in the terms of other libraries, imported when they are first used
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api import attention, attention_varlen, dropout_mask, explain, explain_varlen
from .backward import attention_backward, attention_varlen_backward
from .cpu.threads import get_num_threads, num_threads, set_num_threads
from .merging import merge
from .sdpa import scaled_dot_product_attention
from .weights import attention_key_sums, attention_weights

if TYPE_CHECKING:
    from . import dask as dask
    from . import flash_attn, mods, nn, onnx, plot, udl
    from . import jax as jax
    from . import torch as torch
    from . import transformers as transformers
    from .block_mask import BlockMask, create_block_mask

__all__ = [
    "BlockMask",
    "__version__",
    "attention",
    "attention_backward",
    "attention_key_sums",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_weights",
    "create_block_mask",
    "dropout_mask",
    "explain",
    "explain_varlen",
    "flash_attn",
    "get_num_threads",
    "merge",
    "mods",
    "nn",
    "num_threads",
    "onnx",
    "plot",
    "scaled_dot_product_attention",
    "set_num_threads",
    "udl",
]

ON_DEMAND = (
    *("dask", "flash_attn", "jax", "mods", "nn", "onnx", "plot"),
    *("torch", "transformers", "udl"),
)


def __dir__() -> list[str]:
    # Not what needs other packages: help() fetches all that is named here.
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on demand: most callers have no modifiers, and importlib.metadata costs as much to
    # import as half of this package.
    if name in ON_DEMAND:
        return import_module(f".{name}", __name__)
    if name in ("BlockMask", "create_block_mask"):
        return getattr(import_module(".block_mask", __name__), name)
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cpu.cache import version

    return version(__name__)
