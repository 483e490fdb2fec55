"""The node cases of the onnx package: the functions on every backend, and onnx.backend's runner."""

from __future__ import annotations

import re
import unittest
import warnings

import numpy as np
import pytest

import fastattn.onnx as face

helper = pytest.importorskip("onnx.helper")
FUNCTIONS = {
    "Attention": face.attention,
    "RotaryEmbedding": face.rotary_embedding,
    "LayerNormalization": face.layer_normalization,
    "RMSNormalization": face.rms_normalization,
    "TensorScatter": face.tensor_scatter,
}
PATTERN = r"^test_(attention|rotary_embedding|layer_normalization|rms_normalization|tensorscatter)_"
# The reference works in the dtype of its inputs, so its halves are rounded several times.
TOLERANCE = {"float32": (1e-5, 1e-6), "float16": (1e-3, 1e-3), "bfloat16": (1e-2, 1e-2)}


def official():
    """Return (cases of these operators, what onnx.backend makes a test of one, by its name)."""
    with warnings.catch_warnings():
        # Making the cases of other operators divides by zero here and there.
        warnings.simplefilter("ignore")
        from onnx.backend.test import BackendTest
        from onnx.backend.test.loader import load_model_tests

        runner = BackendTest(face, __name__).include(PATTERN)
        # What a case is made of besides: the operator written in others, which are not ours.
        cases = [case for case in load_model_tests(kind="node") if "expanded" not in case.name]
        tests = runner.test_cases["OnnxBackendNodeModelTest"]
    # As a function, since pytest would collect the class: with thousands of skipped tests.
    return [case for case in cases if re.match(PATTERN, case.name)], lambda name: tests(name)


CASES, OFFICIAL = official()
NAMES = [f"{case.name}_cpu" for case in CASES]


def called(node, inputs, backend):
    """Return the outputs by name of the function that is one node."""
    given = iter(inputs)
    arrays = [next(given) if name else None for name in node.input]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attributes = {n: a.decode() if type(a) is bytes else a for n, a in attributes.items()}
    if node.op_type == "LayerNormalization":
        attributes["return_statistics"] = True
    if node.op_type == "Attention" and len(node.output) > 3:
        attributes.setdefault("qk_matmul_output_mode", 0)
    if node.op_type != "TensorScatter":
        attributes["backend"] = backend
    result = FUNCTIONS[node.op_type](*arrays, **attributes)
    result = result if isinstance(result, tuple) else (result,)
    return dict(zip(node.output, result, strict=False))


def assert_agrees(ours, theirs):
    rtol, atol = TOLERANCE.get(theirs.dtype.name, (0, 0))
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    if rtol:
        ours, theirs = ours.astype(float), theirs.astype(float)
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.removeprefix("test_"))
def test_function(case, backend):
    node = case.model.graph.node[0]
    for given, expected in case.data_sets:
        results = called(node, given, backend)
        names = [name for name in node.output if name]
        for name, theirs in zip(names, expected, strict=True):
            assert_agrees(results[name], theirs)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.removeprefix("test_"))
def test_backend(name):
    result = unittest.TestResult()
    OFFICIAL(name).run(result)
    assert result.wasSuccessful(), (result.failures + result.errors)[0][1]
    assert not result.skipped


def test_all_cases_are_here():
    """The package of 2025 has 93 of Attention and 33 of the others; a newer one may have more."""
    attention = [name for name in NAMES if name.startswith("test_attention")]
    assert len(attention) >= 93
    assert len(NAMES) - len(attention) >= 33
