"""ONNX's operators for attention and what stands around it, on fastattn.

As functions of NumPy arrays (attention, rotary_embedding, layer_normalization, rms_normalization,
tensor_scatter), which need no other package; as operators for onnx.reference:

    ReferenceEvaluator(model, new_ops=fastattn.onnx.ops)

and as a backend in the sense of onnx.backend, for whole models: prepare, run_model, run_node,
supports_device, is_compatible. Both need the onnx package.

Where they do not do what ONNX's reference does: docs/onnx.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..optional import missing
from .attention import AttentionOutputs, attention
from .cache import tensor_scatter
from .norms import LayerNormalizationOutputs, layer_normalization, rms_normalization
from .rotary import rotary_embedding

if TYPE_CHECKING:
    from .backend import is_compatible, prepare, run_model, run_node, supports_device
    from .operators import ops

__all__ = [
    "AttentionOutputs",
    "LayerNormalizationOutputs",
    "attention",
    "is_compatible",
    "layer_normalization",
    "ops",
    "prepare",
    "rms_normalization",
    "rotary_embedding",
    "run_model",
    "run_node",
    "supports_device",
    "tensor_scatter",
]
BACKEND = ("is_compatible", "prepare", "run_model", "run_node", "supports_device")


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name != "ops" and name not in BACKEND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(".operators" if name == "ops" else ".backend", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "onnx":
            raise
        raise missing(f"fastattn.onnx.{name}", "onnx", "'fastattn[onnx]'") from None
