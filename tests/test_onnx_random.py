"""Random calls of ONNX's operators against onnx.reference and ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
ml_dtypes = pytest.importorskip("ml_dtypes")
from onnx_random import attention_call, by_fastattn, by_reference, by_runtime, model_of  # noqa: E402

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
# The others work in the dtype of their inputs. float64: their scale is a float32.
TOLERANCE = {
    "float32": (1e-4, 2e-6),
    "float64": (1e-6, 1e-6),
    "float16": (5e-3, 5e-3),
    "bfloat16": (5e-2, 5e-2),
}
SEEDS = range(30)  # 2000 have been run


def assert_agrees(ours, theirs, where=...):
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    rtol, atol = TOLERANCE[ours.dtype.name]
    ours, theirs = ours.astype(float)[where], theirs.astype(float)[where]
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def with_query_axis(feeds):
    """Return feeds with a mask that has rows: onnx.reference makes a mask with a query axis of 1
    causal as if each row were the first one.
    """
    mask = feeds.get("attn_mask")
    if mask is None:
        return feeds
    q = feeds["Q"]
    return feeds | {"attn_mask": np.repeat(mask, q.shape[-2 if q.ndim == 4 else 1], axis=-2)}


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_as_the_reference(seed, dtype):
    feeds, attributes = attention_call(np.random.default_rng(seed), dtype)
    model = model_of("Attention", feeds, attributes)
    ours = by_fastattn(model, feeds)
    mask = feeds.get("attn_mask")
    if mask is not None and mask.shape[-2] == 1:
        feeds = with_query_axis(feeds)
        model = model_of("Attention", feeds, attributes)
    theirs = by_reference(model, feeds)
    if attributes["qk_matmul_output_mode"] == 0 and "softcap" in attributes:
        del theirs["qk_matmul_output"]  # the reference's is capped in this mode as well
    for name, a in theirs.items():
        assert_agrees(ours[name], a)


def is_decoding_of_many(feeds, attributes):
    """Whether ONNX Runtime forgets is_causal: one query after a past, and several new keys."""
    packed = "q_num_heads" in attributes
    queries, keys = (feeds[name].shape[1 if packed else 2] for name in "QK")
    return "past_key" in feeds and "is_causal" in attributes and queries == 1 < keys


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_as_onnx_runtime(seed, dtype):
    pytest.importorskip("onnxruntime")
    feeds, attributes = attention_call(np.random.default_rng(seed), dtype, for_runtime=True)
    if is_decoding_of_many(feeds, attributes):
        del attributes["is_causal"]
    model = model_of("Attention", feeds, attributes, opset=24)
    ours, theirs = by_fastattn(model, feeds), by_runtime(model, feeds)
    scores = ours.pop("qk_matmul_output")
    # Its hidden keys have the lowest finite score.
    assert_agrees(scores, theirs["qk_matmul_output"], np.isfinite(scores))
    for name, a in ours.items():
        assert_agrees(a, theirs[name])


def rotary_call(rng, dtype):
    batch, heads, tokens, pairs, rest = (int(n) for n in rng.integers(1, 5, 5))
    rest *= int(rng.integers(0, 3))
    x = rng.standard_normal((batch, heads, tokens, 2 * pairs + rest)).astype(dtype)
    attributes = {"interleaved": int(rng.integers(2)), "rotary_embedding_dim": 2 * pairs}
    if rng.random() < 0.5:
        x = x.swapaxes(1, 2).reshape(batch, tokens, -1)
        attributes["num_heads"] = heads
    angles = rng.standard_normal((9, pairs))
    feeds = {"X": x}
    if rng.random() < 0.5:
        feeds["position_ids"] = rng.integers(0, 9, (batch, tokens))
    else:
        angles = rng.standard_normal((batch, tokens, pairs))
    feeds |= {"cos_cache": np.cos(angles).astype(dtype), "sin_cache": np.sin(angles).astype(dtype)}
    return feeds, attributes


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_rotary_as_the_reference(seed, dtype):
    feeds, attributes = rotary_call(np.random.default_rng(seed), dtype)
    model = model_of("RotaryEmbedding", feeds, attributes)
    assert_agrees(by_fastattn(model, feeds)["Y"], by_reference(model, feeds)["Y"])


def norm_call(rng, op, dtype):
    shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, 5)))
    axis = int(rng.integers(-len(shape), len(shape)))
    first = int(rng.integers(0, axis % len(shape) + 1))  # scale may also differ between rows

    def part():
        sizes = [1 if rng.random() < 0.2 else n for n in shape[first:]]
        return rng.standard_normal(sizes).astype(dtype)

    feeds = {"X": rng.standard_normal(shape).astype(dtype)}
    feeds |= {"Scale": part(), "B": part()} if op == "LayerNormalization" else {"scale": part()}
    return feeds, {"axis": axis, "epsilon": float(rng.uniform(1e-3, 1))}


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("seed", range(20))
def test_norms_as_the_reference(seed, dtype, op):
    feeds, attributes = norm_call(np.random.default_rng(seed), op, dtype)
    model = model_of(op, feeds, attributes)
    ours, theirs = by_fastattn(model, feeds), by_reference(model, feeds)
    assert_agrees(ours["Y"], theirs["Y"])
    for name in set(ours) - {"Y"}:
        assert ours[name].dtype == np.float32  # the reference's have the dtype of X
        rtol, atol = TOLERANCE[np.dtype(dtype).name]
        np.testing.assert_allclose(ours[name], theirs[name].astype(float), rtol=rtol, atol=atol)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("seed", range(10))
def test_scatter_as_the_reference(seed, mode):
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.integers(1, 5, rng.integers(2, 5))]
    axis = int(rng.integers(1, len(shape)))
    shape[axis] = 6
    cache = rng.integers(0, 99, shape).astype(np.int16)
    shape[axis] = int(rng.integers(0, 4))
    update = rng.integers(100, 200, shape).astype(np.int16)
    where = rng.integers(0, 3 if mode == "linear" else 60, shape[0])
    feeds = {"past_cache": cache, "update": update, "write_indices": where}
    model = model_of("TensorScatter", feeds, {"axis": axis - len(shape), "mode": mode})
    ours, theirs = by_fastattn(model, feeds)["Y"], by_reference(model, feeds)["Y"]
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype
