"""The functions of this package as operators of onnx.reference."""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun

from .attention import attention
from .cache import tensor_scatter
from .norms import layer_normalization, rms_normalization
from .rotary import rotary_embedding

WINDOWED = 25  # the opset since which head counts are refused where Q has rank 4


class Operator(OpRun):
    """An operator that computes no output that its node does not name."""

    def wants(self, output: int) -> bool:
        """Whether the node names its output of this number."""
        names = self.onnx_node.output
        return output < len(names) and names[output] != ""

    def named(self, *outputs: Any) -> tuple[Any, ...]:
        """Return the outputs, None for those without a name."""
        return tuple(a if self.wants(n) else None for n, a in enumerate(outputs))

    def _check_and_fix_outputs(self, res: tuple[Any, ...]) -> tuple[Any, ...]:
        # The one of OpRun refuses None. But the evaluator keeps what is returned for an output
        # without a name, and gives it to later nodes as their optional inputs without a name.
        return res


class Attention(Operator):
    """fastattn.onnx.attention()"""

    def _run(self, *inputs: Any, qk_matmul_output_mode: int, **attributes: Any) -> Any:
        if self.run_params["opsets"][""] < WINDOWED and inputs[0].ndim == 4:
            attributes |= {"q_num_heads": None, "kv_num_heads": None}
        mode = qk_matmul_output_mode if self.wants(3) else None
        return self.named(*attention(*inputs, qk_matmul_output_mode=mode, **attributes))


class RotaryEmbedding(Operator):
    """fastattn.onnx.rotary_embedding()"""

    def _run(self, *inputs: Any, num_heads: int | None, **attributes: Any) -> Any:
        return self.named(rotary_embedding(*inputs, num_heads=num_heads or 0, **attributes))


class LayerNormalization(Operator):
    """fastattn.onnx.layer_normalization()"""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        statistics = self.wants(1) or self.wants(2)
        return self.named(*layer_normalization(*inputs, return_statistics=statistics, **attributes))


class RMSNormalization(Operator):
    """fastattn.onnx.rms_normalization()"""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        return self.named(rms_normalization(*inputs, **attributes))


class TensorScatter(Operator):
    """fastattn.onnx.tensor_scatter()"""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        return self.named(tensor_scatter(*inputs, **attributes))


ops: list[type[OpRun]] = [
    Attention,
    RotaryEmbedding,
    LayerNormalization,
    RMSNormalization,
    TensorScatter,
]
