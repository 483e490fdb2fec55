"""Models of one ONNX operator, random calls of Attention, and what other engines answer."""

from __future__ import annotations

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator

INPUTS = {
    "Attention": ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"],
    "RotaryEmbedding": ["X", "cos_cache", "sin_cache", "position_ids"],
    "LayerNormalization": ["X", "Scale", "B"],
    "RMSNormalization": ["X", "scale"],
    "TensorScatter": ["past_cache", "update", "write_indices"],
}
OUTPUTS = {
    "Attention": ["Y", "present_key", "present_value", "qk_matmul_output"],
    "LayerNormalization": ["Y", "Mean", "InvStdDev"],
}


def model_of(op, feeds, attributes, opset=25, outputs=None):
    """Return a model of one node; feeds are its inputs by name, without those that are absent.

    outputs: names, "" for one that is left out. Default all.
    """
    names = [name if name in feeds else "" for name in INPUTS[op]]
    while not names[-1]:
        names.pop()
    outputs = outputs or OUTPUTS.get(op, ["Y"])
    node = helper.make_node(op, names, outputs, **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(a.dtype) for name, a in feeds.items()}
    given = [helper.make_tensor_value_info(name, kinds[name], a.shape) for name, a in feeds.items()]
    found = []
    for name in filter(None, outputs):
        rank = feeds[names[0]].ndim if name in ("Y", "Mean", "InvStdDev") else 4
        found.append(helper.make_tensor_value_info(name, kinds[names[0]], [None] * rank))
    graph = helper.make_graph([node], op, given, found)
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def by_reference(model, feeds):
    """Return the outputs by name that onnx.reference computes, with its own operators."""
    with np.errstate(all="ignore"):
        return named(model, ReferenceEvaluator(model).run(None, feeds))


def by_fastattn(model, feeds):
    """Return the outputs by name that onnx.reference computes with fastattn's operators."""
    import fastattn.onnx

    return named(model, ReferenceEvaluator(model, new_ops=fastattn.onnx.ops).run(None, feeds))


def by_runtime(model, feeds):
    """Return the outputs by name that ONNX Runtime computes on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return named(model, session.run(None, feeds))


def named(model, outputs):
    return dict(zip((output.name for output in model.graph.output), outputs, strict=True))


def attention_call(rng, dtype, for_runtime=False):
    """Return (feeds, attributes) of a random Attention node of opset 25.

    for_runtime: only what ONNX Runtime accepts.
    """
    batch, heads_kv, group = (int(n) for n in rng.integers(1, 4, 3))
    seqlen_q, seqlen_k, dim, dim_v = (int(n) for n in rng.integers(1, 9, 4))
    heads = group * heads_kv

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    feeds = {
        "Q": normal(batch, heads, seqlen_q, dim),
        "K": normal(batch, heads_kv, seqlen_k, dim),
        "V": normal(batch, heads_kv, seqlen_k, dim_v),
    }
    past_len = 0
    match rng.integers(3):
        case 1:
            past_len = int(rng.integers(0, 6)) + for_runtime
            feeds["past_key"] = normal(batch, heads_kv, past_len, dim)
            feeds["past_value"] = normal(batch, heads_kv, past_len, dim_v)
        case 2:
            feeds["nonpad_kv_seqlen"] = rng.integers(0, seqlen_k + 1, batch).astype(np.int64)
    if rng.random() < 0.6:
        shape = (batch, heads, seqlen_q, past_len + seqlen_k)
        feeds["attn_mask"] = random_mask(rng, shape, dtype, for_runtime)
    attributes = random_attributes(rng, for_runtime)
    if rng.random() < 0.5:
        for name in "QKV":
            feeds[name] = feeds[name].swapaxes(1, 2).reshape(batch, feeds[name].shape[2], -1)
        attributes |= {"q_num_heads": heads, "kv_num_heads": heads_kv}
    return feeds, attributes


def random_attributes(rng, for_runtime):
    attributes = {"qk_matmul_output_mode": int(rng.integers(4))}
    if rng.random() < 0.4:
        attributes["is_causal"] = 1
    if rng.random() < 0.4:
        attributes["scale"] = float(rng.uniform(0.1, 1))
    if rng.random() < 0.3:
        attributes["softcap"] = float(rng.uniform(0.5, 3))
    for side in ("left", "right"):
        if rng.random() < 0.3 and not for_runtime:
            attributes[f"{side}_window_size"] = int(rng.integers(0, 5))
    return attributes


def random_mask(rng, shape, dtype, for_runtime):
    """Return a bool or float mask that broadcasts to `shape`, or whose last axis is too short."""
    sizes = [1 if rng.random() < 0.3 else n for n in shape]
    sizes[-1] = int(rng.integers(1, shape[-1] + 1))
    if for_runtime:
        sizes[-2:] = shape[-2:]
    sizes = sizes[int(rng.integers(3)) :]
    hidden = rng.random(sizes) < 0.3
    if rng.random() < 0.5:
        return ~hidden
    return np.where(hidden, -np.inf, rng.standard_normal(sizes)).astype(dtype)
