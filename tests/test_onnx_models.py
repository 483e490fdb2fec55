"""Models with fastattn's operators: in onnx.reference, as an onnx.backend, exported by torch."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module

import numpy as np
import pytest

import fastattn.onnx as face

onnx = pytest.importorskip("onnx")
from onnx import helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_random import by_runtime, model_of  # noqa: E402

FLOAT = onnx.TensorProto.FLOAT


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def attention_feeds(rng):
    return {name: normal(rng, 2, 3, 4, 8) for name in "QKV"}


def test_face_without_onnx_has_the_functions():
    """And says what to install to those who want the rest."""
    code = (
        "import sys; sys.modules['onnx'] = None; import numpy as np, fastattn.onnx as face\n"
        "q = np.ones((1, 1, 2, 4), np.float32); face.attention(q, q, q, backend='numpy')\n"
        "try: face.ops\n"
        "except ImportError as error: print(error)\n"
        "try: face.prepare\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert (
        first
        == "fastattn.onnx.ops needs onnx, which is not installed: pip install 'fastattn[onnx]'"
    )
    assert second == first.replace("ops", "prepare")


def test_scores_are_computed_for_those_who_name_them_only(rng, monkeypatch):
    def refuse(*_):
        raise AssertionError("computed")

    monkeypatch.setattr(import_module("fastattn.onnx.attention"), "_scores", refuse)
    feeds = attention_feeds(rng)
    for outputs in (["Y"], ["Y", "", "present_value"], ["Y", "", "", ""]):
        model = model_of("Attention", feeds, {}, outputs=outputs)
        ReferenceEvaluator(model, new_ops=face.ops).run(None, feeds)
    model = model_of("Attention", feeds, {}, outputs=["Y", "", "", "scores"])
    with pytest.raises(AssertionError, match="computed"):
        ReferenceEvaluator(model, new_ops=face.ops).run(None, feeds)


def test_outputs_without_a_name_reach_no_later_node(rng):
    """In the evaluator they would be the inputs without a name of the second node."""
    feeds = attention_feeds(rng)
    nodes = [
        helper.make_node("Attention", ["Q", "K", "V"], ["A", "", "", "S"]),
        helper.make_node("Attention", ["A", "K", "V", "", "", ""], ["Y"]),
    ]
    values = [helper.make_tensor_value_info(name, FLOAT, [2, 3, 4, 8]) for name in "QKV"]
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in "SY"]
    graph = helper.make_graph(nodes, "two", values, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)
    scores, y = ReferenceEvaluator(model, new_ops=face.ops).run(None, feeds)
    first = face.attention(*feeds.values(), qk_matmul_output_mode=0)
    np.testing.assert_array_equal(scores, first.qk_matmul_output)
    np.testing.assert_array_equal(y, face.attention(first.Y, feeds["K"], feeds["V"]).Y)


@pytest.mark.parametrize("opset", [23, 24])
def test_head_counts_of_rank_4_are_ignored_before_opset_25(rng, opset):
    feeds = attention_feeds(rng)
    counts = {"q_num_heads": 3, "kv_num_heads": 3}
    model = model_of("Attention", feeds, counts, opset, ["Y"])
    (y,) = face.run_model(model, list(feeds.values()))
    np.testing.assert_array_equal(y, face.attention(*feeds.values()).Y)
    with pytest.raises(ValueError, match="q_num_heads must not be given where Q has rank 4, got 3"):
        face.run_model(model_of("Attention", feeds, counts, 25, ["Y"]), list(feeds.values()))


# --- onnx.backend -------------------------------------------------------------------------------


def test_run_node(rng):
    feeds = attention_feeds(rng)
    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1)
    expected = face.attention(*feeds.values(), is_causal=1).Y
    for options in ({}, {"opset_version": 23}):
        (y,) = face.run_node(node, list(feeds.values()), **options)
        np.testing.assert_array_equal(y, expected)
    (absolute,) = face.run_node(helper.make_node("Abs", ["X"], ["Y"]), [np.float32([-1])])
    assert absolute == 1


def with_initializer(rng):
    """Return a model whose input K has an initializer, and the value of that."""
    feeds = attention_feeds(rng)
    model = model_of("Attention", feeds, {}, outputs=["Y"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(feeds["K"], "K"))
    return model, feeds


def test_inputs_with_an_initializer_may_be_left_out(rng):
    model, feeds = with_initializer(rng)
    prepared = face.prepare(model)
    q, k, v = feeds.values()
    (y,) = prepared.run([q, v])
    np.testing.assert_array_equal(y, face.attention(q, k, v).Y)
    (y,) = prepared.run({"Q": q, "K": 2 * k, "V": v})
    np.testing.assert_array_equal(y, face.attention(q, 2 * k, v).Y)
    for inputs, count in ((q, 1), ([q, k, v], 3), ([], 0)):
        with pytest.raises(ValueError, match=f"inputs must have 2 values, for Q, V, got {count}"):
            prepared.run(inputs)


def test_operators_in_functions_of_the_model_are_fastattn_s(rng, monkeypatch):
    calls = []

    def attention(*inputs, **attributes):
        calls.append(attributes)
        return face.attention(*inputs, **attributes)

    monkeypatch.setattr("fastattn.onnx.operators.attention", attention)
    imports = [helper.make_opsetid("", 25), helper.make_opsetid("own", 1)]
    body = [helper.make_node("Attention", ["q", "k", "v"], ["y"])]
    function = helper.make_function("own", "Heads", ["q", "k", "v"], ["y"], body, imports[:1])
    feeds = attention_feeds(rng)
    graph = helper.make_graph(
        [helper.make_node("Heads", ["Q", "K", "V"], ["Y"], domain="own")],
        "graph",
        [helper.make_tensor_value_info(name, FLOAT, [2, 3, 4, 8]) for name in "QKV"],
        [helper.make_tensor_value_info("Y", FLOAT, [2, 3, 4, 8])],
    )
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    (y,) = face.run_model(model, list(feeds.values()))
    assert len(calls) == 1
    np.testing.assert_array_equal(y, face.attention(*feeds.values()).Y)


def test_devices_and_what_can_be_run(rng):
    assert face.supports_device("CPU")
    assert face.supports_device("CPU:0")
    assert not face.supports_device("CUDA")
    feeds = attention_feeds(rng)
    model = model_of("Attention", feeds, {}, outputs=["Y"])
    assert face.is_compatible(model)
    assert not face.is_compatible(model, "CUDA")
    with pytest.raises(ValueError, match="device must be 'CPU', got 'CUDA'"):
        face.prepare(model, "CUDA")
    with pytest.raises(ValueError, match="device must be 'CPU', got 'CUDA'"):
        face.run_node(model.graph.node[0], list(feeds.values()), "CUDA")
    model.graph.node[0].domain = "unknown"
    model.opset_import.append(helper.make_opsetid("unknown", 1))
    assert not face.is_compatible(model)


# --- a model of torch ---------------------------------------------------------------------------


def exported():
    """Return (model, inputs, what torch answers) of a block with two kinds of attention."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    attend = torch.nn.functional.scaled_dot_product_attention

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
            self.norm, self.norm_out = torch.nn.LayerNorm(32), torch.nn.RMSNorm(32)

        def forward(self, x, mask):
            tokens = x.shape[:2]
            q, k, v = self.qkv(self.norm(x)).view(*tokens, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = attend(q, k, v, attn_mask=mask) + attend(q, k, v, is_causal=True)
            return self.norm_out(x + self.out(y.transpose(1, 2).reshape(x.shape)))

    torch.manual_seed(0)
    block, x = Block().eval(), torch.randn(2, 7, 32)
    mask = torch.rand(2, 1, 7, 7) < 0.7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"dynamo": True, "opset_version": 23, "verbose": False}
        program = torch.onnx.export(block, (x, mask), **options)
    with torch.no_grad():
        expected = block(x, mask).numpy()
    return program.model_proto, [x.numpy(), mask.numpy()], expected


@pytest.mark.slow
def test_model_exported_by_torch():
    pytest.importorskip("onnxruntime")
    model, inputs, expected = exported()
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Attention") == 2
    assert {"LayerNormalization", "RMSNormalization"} <= set(kinds)
    (y,) = face.run_model(model, inputs)
    names = [value.name for value in model.graph.input]
    (theirs,) = by_runtime(model, dict(zip(names, inputs, strict=True))).values()
    np.testing.assert_allclose(y, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
