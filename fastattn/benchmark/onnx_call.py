"""A model of one operator in ONNX Runtime, called with all memory bound beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Feeds = dict[str, np.ndarray | None]
Shapes = Mapping[str, tuple[int, ...]]


def onnx_call(
    op: str,
    feeds: Feeds,
    outputs: Shapes,
    num_threads: int,
    *,
    shared: dict[str, str] | None = None,
    **attributes: Any,
) -> Callable[[], dict[str, Any]]:
    """Return a call of a one-node model with all memory bound beforehand: it returns all values.

    feeds maps input names to arrays, None for an optional input left out; outputs maps names to
    shapes; shared maps outputs to the inputs whose memory they take over.
    """
    from onnxruntime import OrtValue

    session = _session(op, feeds, outputs, num_threads, attributes)
    binding = session.io_binding()
    values = {}
    for name, array in feeds.items():
        if array is not None:
            values[name] = OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, values[name])
    for name, shape in outputs.items():
        if shared and name in shared:
            values[name] = values[shared[name]]
        else:
            values[name] = OrtValue.ortvalue_from_shape_and_type(shape, np.float32)
        binding.bind_ortvalue_output(name, values[name])

    def run() -> dict[str, Any]:
        session.run_with_iobinding(binding)
        return values

    return run


def _session(
    op: str,
    feeds: Feeds,
    outputs: Shapes,
    num_threads: int,
    attributes: dict[str, Any],
) -> Any:
    import onnxruntime
    from onnx import helper

    def value(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return helper.make_tensor_value_info(name, kind, shape)

    given = {name: array for name, array in feeds.items() if array is not None}
    names = [name if name in given else "" for name in feeds]
    graph = helper.make_graph(
        [helper.make_node(op, names, list(outputs), **attributes)],
        op,
        [value(name, array.shape, array.dtype) for name, array in given.items()],
        [value(name, shape) for name, shape in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
