"""The Attention node cases of the onnx package, through a small adapter, on every backend."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import fastattn

helper = pytest.importorskip("onnx.helper")
# The reference works in the dtype of its inputs, so its halves are rounded several times.
TOLERANCE = {"float32": (1e-5, 1e-6), "float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2)}
SIDES = ("left", "right")
PROBABILITIES = 3  # the qk_matmul_output_mode after softmax; what comes before it is never stored


def node_cases():
    with warnings.catch_warnings():
        # Making the cases of other operators divides by zero here and there.
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases("Attention") if "expanded" not in case.name]


CASES = node_cases()


def attention(node, inputs):
    """Return (arrays, flags, present) for fastattn of one Attention node."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    q, k, v = (
        with_heads(inputs[name], attributes.get(f"{kind}_num_heads"))
        for name, kind in (("Q", "q"), ("K", "kv"), ("V", "kv"))
    )
    flags = {
        "causal": bool(attributes.get("is_causal", 0)),
        "softcap": attributes.get("softcap", 0.0),
        "scale": attributes.get("scale"),
        "window": tuple(side(attributes.get(f"{name}_window_size", -1)) for name in SIDES),
        "align": "top_left",
    }
    if "past_key" in inputs:
        flags["align"] = inputs["past_key"].shape[2]
        k, v = (
            np.concatenate([inputs[name], a], axis=2)
            for name, a in (("past_key", k), ("past_value", v))
        )
    if "nonpad_kv_seqlen" in inputs:
        flags["kv_len"] = np.minimum(inputs["nonpad_kv_seqlen"], k.shape[2])
        flags["align"] = inputs["nonpad_kv_seqlen"] - q.shape[2]
    if "attn_mask" in inputs:
        flags |= mask_or_bias(inputs["attn_mask"], k.shape[2])
    return (q, k, v), flags


def side(size):
    return None if size < 0 else size


def with_heads(a, heads):
    """Return (batch, heads, seqlen, dim); packed heads stand in the last axis."""
    if a.ndim == 4:
        return a
    return a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2)


def mask_or_bias(mask, seqlen_k):
    """Return a mask as keyword; one that is too short hides the keys that it does not reach."""
    hides = False if mask.dtype == bool else -np.inf
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, seqlen_k - mask.shape[-1])]
    padded = np.pad(
        mask.astype(bool if mask.dtype == bool else np.float32), padding, constant_values=hides
    )
    return {"mask" if mask.dtype == bool else "bias": padded}


def assert_agrees(ours, theirs):
    rtol, atol = TOLERANCE[theirs.dtype.name]
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("test_"))
def test_node(case, backend):
    node = case.model.graph.node[0]
    for given, expected in case.data_sets:
        named = dict(zip((name for name in node.input if name), given, strict=True))
        results = dict(zip((name for name in node.output if name), expected, strict=True))
        arrays, flags = attention(node, named)
        y = fastattn.attention(*arrays, **flags, backend=backend)
        if results["Y"].ndim == 3:
            y = y.swapaxes(1, 2).reshape(results["Y"].shape)
        assert y.dtype == results["Y"].dtype
        assert_agrees(y, results["Y"])
        for name, a in zip(("present_key", "present_value"), arrays[1:], strict=True):
            if name in results:
                np.testing.assert_array_equal(a, results[name])
        mode = [a.i for a in node.attribute if a.name == "qk_matmul_output_mode"]
        if mode == [PROBABILITIES]:
            weights = fastattn.attention_weights(*arrays[:2], **flags)
            assert_agrees(weights, results["qk_matmul_output"])


def test_all_cases_are_here():
    """The package of 2025 has 93; a newer one may have more."""
    assert len(CASES) >= 93
