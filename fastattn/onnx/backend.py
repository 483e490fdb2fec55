"""fastattn as a backend in the sense of onnx.backend: fastattn's operators, all others by NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, defs, helper
from onnx.backend.base import Backend, BackendRep
from onnx.checker import ValidationError
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

from .operators import ops


class Prepared(BackendRep):
    """A model, ready to run: what prepare() returns."""

    def __init__(self, evaluator: ReferenceEvaluator, names: Sequence[str]) -> None:
        self.evaluator = evaluator
        self.input_names = tuple(names)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs of the graph, in its order.

        inputs : one value for each input of the graph that has no initializer, in its order; or a
            mapping from names, which may set the others as well
        """
        if not isinstance(inputs, Mapping):
            if isinstance(inputs, np.ndarray) or len(inputs) != len(self.input_names):
                count = 1 if isinstance(inputs, np.ndarray) else len(inputs)
                names = ", ".join(self.input_names)
                rule = f"inputs must have {len(self.input_names)} values, for {names}"
                raise ValueError(f"{rule}, got {count}")
            inputs = dict(zip(self.input_names, inputs, strict=True))
        return tuple(self.evaluator.run(None, dict(inputs)))


class FastattnBackend(Backend):
    """The functions of this module, under the names of onnx.backend.base.Backend."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0] == "CPU"

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        try:
            cls.prepare(model, device, **kwargs)
        except (ValidationError, ValueError, NotImplementedError, RuntimeError):
            return False
        return True

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        cls._check_device(device)
        super().prepare(model, device, **kwargs)  # checks the model
        if model.functions:
            # In functions of a model, the evaluator does not look for new_ops.
            model = inline_local_functions(model)
        graph = model.graph
        own = {a.name for a in graph.initializer} | {
            a.values.name for a in graph.sparse_initializer
        }
        names = [a.name for a in graph.input if a.name not in own]
        return Prepared(ReferenceEvaluator(model, new_ops=ops), names)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        cls._check_device(device)
        super().run_node(node, inputs, device, outputs_info, **kwargs)  # checks the node
        opset = kwargs.get("opset_version", defs.onnx_opset_version() if not node.domain else 1)
        names = [name for name in node.input if name]
        graph = helper.make_graph(
            [node],
            "node",
            [helper.make_empty_tensor_value_info(name) for name in names],
            [helper.make_empty_tensor_value_info(name) for name in node.output if name],
        )
        evaluator = ReferenceEvaluator(graph, opsets={node.domain: opset}, new_ops=ops)
        return Prepared(evaluator, names).run(inputs)

    @classmethod
    def _check_device(cls, device: str) -> None:
        if not cls.supports_device(device):
            raise ValueError(f"device must be 'CPU', got {device!r}")


is_compatible = FastattnBackend.is_compatible
prepare = FastattnBackend.prepare
run_model = FastattnBackend.run_model
run_node = FastattnBackend.run_node
supports_device = FastattnBackend.supports_device
