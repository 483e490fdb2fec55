"""Every rule about arguments: a call that works, one change, the error and its message."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

import fastattn
from fastattn.check import check, check_packed

F4 = np.float32


def ones(*shape, dtype=F4):
    return np.ones(shape, dtype)


def valid():
    """Return the arguments of a call that works; each rule below breaks one of them."""
    q, k = ones(2, 4, 7, 8), ones(2, 2, 5, 8)
    return {"q": q, "k": k, "v": ones(2, 2, 5, 6), "out": np.full((2, 4, 7, 6), 9, F4)}


def masked(*shape):
    return np.ma.masked_array(ones(*shape))


def read_only(a):
    a.setflags(write=False)
    return a


def unaligned(*shape):
    size = 4 * int(np.prod(shape))
    return np.zeros(size + 1, np.uint8)[1:].view(F4).reshape(shape)


SHARED = np.ones(1000, F4)
WINDOW = "window must be a pair of ints >= 0 or None"
ALIGN = "align must be 'bottom_right', 'top_left', an int or an array of ints"
FLOAT = "float16, bfloat16, float32 or float64"
SAME_DTYPE = "q, k and v must have the same dtype, got "

RULES = [
    # kinds and dtypes
    ({"q": ones(2, 4, 7, 8, dtype=int)}, TypeError, f"q must be {FLOAT}, got int64"),
    ({"k": ones(2, 2, 5, 8, dtype=bool)}, TypeError, f"k must be {FLOAT}, got bool"),
    ({"v": ones(2, 2, 5, 6, dtype=complex)}, TypeError, f"v must be {FLOAT}, got comp"),
    ({"q": ones(2, 4, 7, 8, dtype=object)}, TypeError, f"q must be {FLOAT}, got object"),
    ({"q": ones(2, 4, 7, 8, dtype="f2")}, TypeError, SAME_DTYPE + "float16, float32 and float32"),
    ({"q": None}, TypeError, f"q must be {FLOAT}, got object"),
    ({"k": ones(2, 2, 5, 8, dtype=float)}, TypeError, SAME_DTYPE + "float32, float64 and float32"),
    ({"v": ones(2, 2, 5, 6, dtype=float)}, TypeError, SAME_DTYPE + "float32, float32 and float64"),
    (
        {"q": masked(2, 4, 7, 8)},
        TypeError,
        "q must be a plain array, got a masked array. Pass its ",
    ),
    (
        {"v": masked(2, 2, 5, 6)},
        TypeError,
        "v must be a plain array, got a masked array. Pass its ",
    ),
    # shapes
    ({"q": ones(8)}, ValueError, "q must have rank 2 or more, got shape (8,)"),
    ({"v": ones()}, ValueError, "v must have rank 2 or more, got shape ()"),
    (
        {"q": ones(3, 4, 7, 8)},
        ValueError,
        "leading dimensions of q, k and v must broadcast, got (3, 4, 7, 8), (2, 2, 5, 8) and (2, 2",
    ),
    (
        {"k": ones(2, 2, 5, 9)},
        ValueError,
        "q and k must have the same head_dim, got (2, 4, 7, 8) and (2, 2, 5, 9)",
    ),
    (
        {"v": ones(2, 2, 4, 6)},
        ValueError,
        "k and v must have the same seqlen_k, got (2, 2, 5, 8) and (2, 2, 4, 6)",
    ),
    (
        {"v": ones(2, 4, 5, 6)},
        ValueError,
        "k and v must have the same heads, got (2, 2, 5, 8) and (2, 4, 5, 6)",
    ),
    (
        {"k": ones(2, 3, 5, 8), "v": ones(2, 3, 5, 6)},
        ValueError,
        "q heads must be a multiple of k heads, got 4 and 3",
    ),
    (
        {"k": ones(2, 8, 5, 8), "v": ones(2, 8, 5, 6)},
        ValueError,
        "q heads must be a multiple of k heads, got 4 and 8",
    ),
    (
        {"k": ones(2, 0, 5, 8), "v": ones(2, 0, 5, 6)},
        ValueError,
        "q heads must be a multiple of k heads, got 4 and 0",
    ),
    # scale
    ({"scale": float("nan")}, ValueError, "scale must be finite in float32, got nan"),
    ({"scale": -np.inf}, ValueError, "scale must be finite in float32, got -inf"),
    ({"scale": np.float32("inf")}, ValueError, "scale must be finite in float32, got np.float32"),
    ({"scale": 1e39}, ValueError, "scale must be finite in float32, got 1e+39"),
    ({"scale": 10**400}, ValueError, "scale must be finite in float32, got 1000"),
    ({"scale": True}, TypeError, "scale must be a real number, got bool"),
    ({"scale": np.True_}, TypeError, "scale must be a real number, got bool"),
    ({"scale": "1"}, TypeError, "scale must be a real number, got str"),
    ({"scale": 1j}, TypeError, "scale must be a real number, got complex"),
    ({"scale": ones(1)}, TypeError, "scale must be a real number, got ndarray"),
    # flags, align, window
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"causal": ones(7, 5)}, TypeError, "causal must be a bool, got ndarray"),
    ({"return_lse": None}, TypeError, "return_lse must be a bool, got NoneType"),
    ({"align": "left"}, ValueError, ALIGN + ", got 'left'"),
    ({"align": 1.0}, TypeError, ALIGN + ", got float"),
    ({"align": True}, TypeError, ALIGN + ", got bool"),
    ({"align": None}, TypeError, ALIGN + ", got NoneType"),
    (
        {"align": 2**63},
        ValueError,
        "align must lie within -2**30 and 2**30, got 9223372036854775808",
    ),
    ({"window": 3}, ValueError, "window must be a pair (left, right), got 3"),
    ({"window": (1, 2, 3)}, ValueError, "window must be a pair (left, right), got (1, 2, 3)"),
    ({"window": (-1, 0)}, ValueError, WINDOW + " (no limit), got (-1, 0)"),
    ({"window": (0, -1), "causal": True}, ValueError, WINDOW + " (no limit), got (0, -1)"),
    ({"window": (1.0, None)}, TypeError, WINDOW + ", got float"),
    ({"window": (None, False)}, TypeError, WINDOW + ", got bool"),
    # align, chunk, softcap of each kind
    ({"align": ones(2)}, TypeError, "align must be an int or an array of ints, got float32"),
    (
        {"align": ones(3, dtype=int)},
        ValueError,
        "align must be an int or broadcast to the leading dimensions (2,), got shape (3,)",
    ),
    (
        {"align": np.array([0, -(2**31)])},
        ValueError,
        "align must lie between -1073741824 and 1073741824, got -2147483648",
    ),
    ({"chunk": -1}, ValueError, "chunk must be an int >= 0, got -1"),
    ({"chunk": 2.0}, TypeError, "chunk must be an int >= 0, got float"),
    ({"chunk": None}, TypeError, "chunk must be an int >= 0, got NoneType"),
    ({"softcap": float("nan")}, ValueError, "softcap must be a normal number in float32, or 0, go"),
    ({"softcap": np.inf}, ValueError, "softcap must be a normal number in float32, or 0, got inf"),
    ({"softcap": 1e-39}, ValueError, "softcap must be a normal number in float32, or 0, got 1e-39"),
    ({"softcap": "1"}, TypeError, "softcap must be a real number, got str"),
    ({"softcap": True}, TypeError, "softcap must be a real number, got bool"),
    # alibi and sinks
    ({"alibi": ones(4, dtype=int)}, TypeError, f"alibi must be {FLOAT}, got int64"),
    ({"alibi": masked(4)}, TypeError, "alibi must be a plain array, got a masked array."),
    ({"alibi": ones(2)}, ValueError, "alibi must have shape (4,) or (2, 4), got (2,)"),
    ({"alibi": ones(3, 4)}, ValueError, "alibi must have shape (4,) or (2, 4), got (3, 4)"),
    ({"alibi": ones()}, ValueError, "alibi must have shape (4,) or (2, 4), got ()"),
    ({"sinks": ones(4, dtype=bool)}, TypeError, f"sinks must be {FLOAT}, got bool"),
    ({"sinks": ones(2)}, ValueError, "sinks must have shape (4,), got (2,)"),
    ({"sinks": ones(2, 4)}, ValueError, "sinks must have shape (4,), got (2, 4)"),
    ({"sinks": 1.0}, ValueError, "sinks must have shape (4,), got ()"),
    # lengths
    ({"q_len": 8}, ValueError, "q_len must lie between 0 and 7, got 8"),
    ({"q_len": [3, -1]}, ValueError, "q_len must lie between 0 and 7, got -1"),
    ({"kv_len": 6}, ValueError, "kv_len must lie between 0 and 5, got 6"),
    ({"kv_len": np.array([2, 2**40])}, ValueError, "kv_len must lie between 0 and 5, got 10995116"),
    ({"kv_start": -1}, ValueError, "kv_start must lie between 0 and 5, got -1"),
    (
        {"kv_start": [1, 3], "kv_len": np.array([5, 2])},
        ValueError,
        "kv_start must lie between 0 and 2, got 3",
    ),
    ({"kv_start": 4, "kv_len": [5, 3]}, ValueError, "kv_start must lie between 0 and 3, got 4"),
    ({"kv_len": 2.0}, TypeError, "kv_len must be an int or an array of ints, got float64"),
    ({"kv_len": [True, False]}, TypeError, "kv_len must be an int or an array of ints, got bool"),
    ({"q_len": "7"}, TypeError, "q_len must be an int or an array of ints, got <U1"),
    (
        {"kv_len": [1, 2, 3]},
        ValueError,
        "kv_len must be an int or broadcast to the leading dimensions (2,), got shape (3,)",
    ),
    # dropout
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be between 0 and 1, got -0.1"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p must be between 0 and 1, got nan"),
    ({"dropout_p": None}, TypeError, "dropout_p must be a real number, got NoneType"),
    ({"dropout_seed": -1}, ValueError, "dropout_seed must be an int from 0 to 2**63 - 1, got -1"),
    ({"dropout_seed": 2**63}, ValueError, "dropout_seed must be an int from 0 to 2**63 - 1, got 9"),
    ({"dropout_seed": 0.5}, TypeError, "dropout_seed must be an int from 0 to 2**63 - 1, got floa"),
    # mask and bias
    (
        {"mask": ones(7, 5, dtype=np.int64)},
        TypeError,
        "mask must be bool, got int64. Pass mask != 0 to choose keys, or a float bias to add",
    ),
    ({"mask": ones(7, 5, dtype=np.uint8)}, TypeError, "mask must be bool, got uint8. Pass mask !="),
    ({"mask": ones(7, 5)}, TypeError, "mask must be bool, got float32."),
    ({"mask": masked(7, 5) > 0}, TypeError, "mask must be a plain array, got a masked array."),
    (
        {"mask": ones(3, 7, 5) > 0},
        ValueError,
        "mask must broadcast to the scores (2, 4, 7, 5), got (3, 7, 5)",
    ),
    (
        {"mask": ones(1, 2, 4, 7, 5) > 0},
        ValueError,
        "mask must broadcast to the scores (2, 4, 7, 5)",
    ),
    (
        {"bias": ones(8, 5)},
        ValueError,
        "bias must broadcast to the scores (2, 4, 7, 5), got (8, 5)",
    ),
    ({"bias": ones(6, 4, 7, 5)}, ValueError, "bias must broadcast to the scores (2, 4, 7, 5), got"),
    (
        {"bias": ones(7, 5, dtype=int)},
        TypeError,
        f"bias must be {FLOAT}, got int64",
    ),
    (
        {"bias": ones(7, 5, dtype=bool)},
        TypeError,
        f"bias must be {FLOAT}, got bool. Pass a bool array as mask.",
    ),
    ({"bias": ones(7, 5, dtype=complex)}, TypeError, f"bias must be {FLOAT}, g"),
    # out
    ({"out": [[0.0]]}, TypeError, "out must be a plain NumPy array, got list"),
    ({"out": masked(2, 4, 7, 6)}, TypeError, "out must be a plain NumPy array, got MaskedArray"),
    ({"out": ones(2, 4, 7, 6, dtype=float)}, TypeError, "out must be float32, got float64"),
    ({"out": ones(2, 4, 7, 6, dtype=">f4")}, TypeError, "out must be float32, got >f4"),
    ({"out": ones(2, 4, 7, 8)}, ValueError, "out must have shape (2, 4, 7, 6), got (2, 4, 7, 8)"),
    ({"out": ones(1, 2, 4, 7, 6)}, ValueError, "out must have shape (2, 4, 7, 6), got (1, 2, 4,"),
    ({"out": read_only(ones(2, 4, 7, 6))}, ValueError, "out must be writeable, got a read-only a"),
    ({"out": unaligned(2, 4, 7, 6)}, ValueError, "out must be aligned and have strides of whole"),
    # backend
    (
        {"backend": "gpu"},
        ValueError,
        "backend must be one of ('auto', 'numpy', 'cpu'), got 'gpu'",
    ),
    ({"backend": None}, ValueError, "backend must be one of ('auto', 'numpy', 'cpu'), got None"),
]


def rule_id(value):
    return "-".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize("function", [fastattn.attention, fastattn.explain])
@pytest.mark.parametrize(("change", "error", "message"), RULES, ids=rule_id)
def test_rule(function, change, error, message):
    arguments = valid() | change
    with pytest.raises(error, match="^" + re.escape(message)):
        function(**arguments)
    if "out" not in change:
        assert (arguments["out"] == 9).all(), "written before everything was checked"


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_out_may_not_overlap(name):
    buffer = np.ones(2 * 3 * 3 * 8, F4)
    arguments = {n: ones(2, 3, 8) for n in "qkv"} | {"bias": ones(3, 3), "mask": ones(3, 3) > 0}
    arguments["out"] = buffer[:48].reshape(2, 3, 8)
    overlapping = {
        "mask": buffer[:4].view(bool)[:9].reshape(3, 3),
        "bias": buffer[40:49].reshape(3, 3),
    }
    arguments[name] = overlapping.get(name, buffer[47:95].reshape(2, 3, 8)[::-1])
    with pytest.raises(ValueError, match=f"^out must not overlap {name}, got arrays that share"):
        fastattn.attention(**arguments)
    assert (buffer == 1).all()


def test_out_may_interleave_with_an_input(backend):
    both = np.ones((2, 3, 16), F4)
    k = ones(2, 3, 8)
    out = fastattn.attention(both[..., ::2], k, k, out=both[..., 1::2], backend=backend)
    assert np.shares_memory(out, both)
    np.testing.assert_array_equal(out, 1)


TORCH_RULES = [
    ({"query": ones(4, 7, 8, dtype=int)}, TypeError, f"query must be {FLOAT}, got int64"),
    ({"value": ones(8)}, ValueError, "value must have rank 2 or more, got shape (8,)"),
    ({"key": masked(4, 5, 8)}, TypeError, "key must be a plain array, got a masked array"),
    (
        {"key": ones(2, 5, 8), "value": ones(2, 5, 8)},
        ValueError,
        "query, key and value must have the same heads, or 1, unless enable_gqa is True, got 4, 2",
    ),
    (
        {"key": ones(3, 5, 8), "value": ones(3, 5, 8), "enable_gqa": True},
        ValueError,
        "query heads must be a multiple of key heads, got 4 and 3",
    ),
    (
        {"key": ones(2, 5, 8), "value": ones(1, 5, 8), "enable_gqa": True},
        ValueError,
        "key and value must have the same heads, got (2, 5, 8) and (1, 5, 8)",
    ),
    ({"value": ones(4, 6, 8)}, ValueError, "key and value must have the same seqlen_k, got (4, 5"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    (
        {"is_causal": True, "attn_mask": ones(7, 5)},
        ValueError,
        "attn_mask must be None if is_causal is True, got both",
    ),
    (
        {"attn_mask": ones(7, 5, dtype=float)},
        TypeError,
        "attn_mask must be bool, float32 or of the dtype of query (float32), got float64",
    ),
    ({"attn_mask": ones(7, 5, dtype="f2")}, TypeError, "attn_mask must be bool, float32 or of th"),
    ({"attn_mask": ones(7, 5, dtype=int)}, TypeError, "attn_mask must be bool, float32 or of the"),
    ({"attn_mask": ones(6, 5)}, ValueError, "attn_mask must broadcast to the scores (4, 7, 5), g"),
    ({"attn_mask": ones(2, 4, 7, 5) > 0}, ValueError, "attn_mask must broadcast to the scores (4"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p must be between 0 and 1, got 1.5"),
    ({"dropout_p": float("nan")}, ValueError, "dropout_p must be between 0 and 1, got nan"),
    ({"scale": float("inf")}, ValueError, "scale must be finite in float32, got inf"),
]


@pytest.mark.parametrize(("change", "error", "message"), TORCH_RULES, ids=rule_id)
def test_torch_rule(change, error, message):
    arguments = {"query": ones(4, 7, 8), "key": ones(4, 5, 8), "value": ones(4, 5, 8)}
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.scaled_dot_product_attention(**arguments | change)


def test_torch_takes_six_positional_arguments():
    with pytest.raises(TypeError, match="positional"):
        fastattn.scaled_dot_product_attention(*[ones(3, 2)] * 3, None, 0.0, False, 1.0)


def packed():
    """Return the arguments of a packed call that works: members of 3 and 4 rows, 5 and 0 keys."""
    arrays = {"q": ones(7, 4, 8), "k": ones(5, 2, 8), "v": ones(5, 2, 6)}
    arrays["out"] = np.full((7, 4, 6), 9, F4)
    return arrays | {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": np.array([0, 5, 5], np.int32)}


PACKED_RULES = [
    ({"q": ones(7, 8)}, ValueError, "q must have shape (tokens, heads, dim), got (7, 8)"),
    ({"v": ones(1, 5, 2, 6)}, ValueError, "v must have shape (tokens, heads, dim), got (1, 5, 2, "),
    ({"k": ones(5, 3, 8), "v": ones(5, 3, 6)}, ValueError, "q heads must be a multiple of k heads"),
    ({"cu_seqlens_q": [0.0, 7.0]}, TypeError, "cu_seqlens_q must be an array of ints, got float64"),
    (
        {"cu_seqlens_q": [1, 3, 7]},
        ValueError,
        "cu_seqlens_q must have one axis and start at 0, got",
    ),
    ({"cu_seqlens_q": [[0, 7]]}, ValueError, "cu_seqlens_q must have one axis and start at 0, got"),
    (
        {"cu_seqlens_q": np.zeros(0, int)},
        ValueError,
        "cu_seqlens_q must have one axis and start at",
    ),
    ({"cu_seqlens_q": 0}, ValueError, "cu_seqlens_q must have one axis and start at 0, got 0"),
    ({"cu_seqlens_k": [0, 6, 5]}, ValueError, "cu_seqlens_k must not decrease, got 6 before 5"),
    (
        {"cu_seqlens_k": np.array([0, 6, 5], np.uint32)},
        ValueError,
        "cu_seqlens_k must not decrease, got 6 before 5",
    ),
    (
        {"cu_seqlens_q": [0, 3, 6]},
        ValueError,
        "cu_seqlens_q must end at the number of tokens, 7, got 6",
    ),
    (
        {"cu_seqlens_k": [0, 5, 8]},
        ValueError,
        "cu_seqlens_k must end at the number of tokens, 5, got 8",
    ),
    (
        {"cu_seqlens_q": [0, 7]},
        ValueError,
        "cu_seqlens_q and cu_seqlens_k must have the same length, got 2 and 3",
    ),
    ({"kv_len": [5, 1]}, ValueError, "kv_len must lie between 0 and 0, got 1"),
    (
        {"align": [0, 1, 2]},
        ValueError,
        "align must be an int or broadcast to the leading dimension",
    ),
    ({"alibi": ones(3, 4)}, ValueError, "alibi must have shape (4,) or (2, 4), got (3, 4)"),
    ({"window": (-1, 0)}, ValueError, WINDOW + " (no limit), got (-1, 0)"),
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"out": ones(4, 7, 6)}, ValueError, "out must have shape (7, 4, 6), got (4, 7, 6)"),
    ({"backend": "gpu"}, ValueError, "backend must be one of ('auto', 'numpy', 'cpu'), got 'gpu'"),
]


@pytest.mark.parametrize(("change", "error", "message"), PACKED_RULES, ids=rule_id)
def test_packed_rule(change, error, message):
    arguments = packed() | change
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.attention_varlen(**arguments)
    if "out" not in change:
        assert (arguments["out"] == 9).all(), "written before everything was checked"


@pytest.mark.parametrize("strides", [(0, 32, 4), (96, 4, 4), (32, 32, 4), (128, -32, 0)])
def test_out_may_not_overlap_itself(strides):
    buffer = np.zeros(200, np.float32)[60:]
    out = np.lib.stride_tricks.as_strided(buffer, (2, 3, 8), strides)
    with pytest.raises(ValueError, match=r"^out must not overlap itself, got strides \("):
        check(ones(2, 3, 8), ones(2, 5, 8), ones(2, 5, 8), out=out)


def test_out_may_have_any_strides_without_overlap():
    out = np.zeros((8, 2, 6), np.float32).transpose(1, 2, 0)[::-1, ::2]
    _, operands = check(ones(2, 3, 8), ones(2, 5, 8), ones(2, 5, 8), out=out)
    assert operands.out.strides == out.strides


def test_packed_out_may_not_overlap():
    arguments = packed()
    arguments["out"] = arguments["q"][..., :6]
    with pytest.raises(ValueError, match=r"^out must not overlap q, got"):
        fastattn.attention_varlen(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"out_b": ones(3, 2, dtype=float)},
            TypeError,
            "out_a and out_b must have the same dtype, ",
        ),
        ({"out_b": ones(2, 2)}, ValueError, "out_a and out_b must have the same shape, got (3, 2)"),
        (
            {"lse_b": ones(1)},
            ValueError,
            "lse_a and lse_b must have the same shape, got (3,) and (1",
        ),
        ({"lse_a": ones(3, dtype=int)}, TypeError, f"lse_a must be {FLOAT}, got int64"),
        ({"out_a": masked(3, 2)}, TypeError, "out_a must be a plain array, got a masked array."),
        (
            {"lse_a": ones(2), "lse_b": ones(2)},
            ValueError,
            "lse_a must have the shape of out_a without its last axis, got (2,) and (3, 2)",
        ),
    ],
    ids=rule_id,
)
def test_merge_rule(change, error, message):
    parts = {"out_a": ones(3, 2), "lse_a": ones(3), "out_b": ones(3, 2), "lse_b": ones(3)}
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.merge(**parts | change)


@pytest.mark.parametrize("function", [fastattn.attention_weights, fastattn.attention_key_sums])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": 1}, TypeError, "rows must be a slice or ints with one axis, got int64 ()"),
        (
            {"rows": [0.5]},
            TypeError,
            "rows must be a slice or ints with one axis, got float64 (1,)",
        ),
        ({"rows": [0, 7]}, ValueError, "rows must lie within the 7 of q, got 0 to 7"),
        ({"rows": [-8]}, ValueError, "rows must lie within the 7 of q, got -8 to -8"),
        ({"out": ones(1)}, TypeError, "got an unexpected keyword argument 'out'"),
        ({"dropout_p": 0.5}, TypeError, "got an unexpected keyword argument 'dropout_p'"),
        (
            {"k": ones(2, 5, 9)},
            ValueError,
            "q and k must have the same head_dim, got (2, 7, 8) and",
        ),
        ({"kv_len": 6}, ValueError, "kv_len must lie between 0 and 5, got 6"),
    ],
    ids=rule_id,
)
def test_weights_rule(function, change, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(**{"q": ones(2, 7, 8), "k": ones(2, 5, 8)} | change)


def test_dropout_mask_rule():
    with pytest.raises(ValueError, match=r"^shape must have two axes or more, got \(3,\)"):
        fastattn.dropout_mask((3,), dropout_p=0.5)
    with pytest.raises(ValueError, match=r"^dropout_p must be between 0 and 1, got 2"):
        fastattn.dropout_mask((3, 3), dropout_p=2)


def test_explain_knows_the_arguments_of_attention():
    with pytest.raises(TypeError, match="unexpected keyword argument 'slopes'"):
        fastattn.explain(**valid(), slopes=1)


# --- what is accepted, and as what --------------------------------------------------------------


def problem(**change):
    arguments = {"q": ones(2, 4, 7, 8), "k": ones(2, 2, 5, 8), "v": ones(2, 2, 5, 6)}
    return check(**arguments | change)[0]


@pytest.mark.parametrize(
    ("change", "offset", "left", "right"),
    [
        ({}, -2, None, None),
        ({"align": "top_left"}, 0, None, None),
        ({"align": np.int32(3)}, 3, None, None),
        ({"causal": True}, -2, None, 0),
        ({"causal": np.True_, "window": (1, 3)}, -2, 1, 0),
        ({"window": [np.int64(2), 1]}, -2, 2, 1),
        ({"window": (10**30, 10**30)}, -2, None, None),
        ({"window": (4, 6)}, -2, None, None),
        ({"window": (3, 5)}, -2, 3, 5),
        ({"causal": True, "align": 4}, 4, None, None),
    ],
    ids=str,
)
def test_window_is_canonical(change, offset, left, right):
    found = problem(**change)
    assert (found.offset, found.left, found.right) == (offset, left, right)


@pytest.mark.parametrize(
    ("scale", "value"),
    [
        (None, 8**-0.5),
        (0, 0.0),
        (-2, -2.0),
        (np.float32(0.5), 0.5),
        (np.array(3), 3.0),
        (Fraction(1, 4), 0.25),
    ],
    ids=str,
)
def test_scale_is_a_float(scale, value):
    assert problem(scale=scale).scale == value
    assert type(problem(scale=scale).scale) is float


def test_scale_of_no_head_dim_is_one():
    assert problem(q=ones(2, 4, 7, 0), k=ones(2, 2, 5, 0)).scale == 1.0


def test_array_likes():
    class ArrayLike:
        def __array__(self, dtype=None, copy=None):
            return np.ones((3, 2), F4)

    class Subclass(np.ndarray):
        pass

    for q in (ArrayLike(), memoryview(ones(3, 2)), ones(3, 2).view(Subclass)):
        out = fastattn.attention(q, q, q, mask=True)
        assert type(out) is np.ndarray
        np.testing.assert_array_equal(out, ones(3, 2))


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_matrix_is_an_array():
    q = np.asmatrix(ones(3, 2))
    assert type(fastattn.attention(q, q, q)) is np.ndarray


def test_inputs_are_not_copied():
    q, k = ones(2, 7, 4, 8).swapaxes(1, 2), ones(2, 5, 2, 8).swapaxes(1, 2)[..., ::-1, :]
    mask, bias = np.ones((7, 5), bool), ones(5, dtype=np.float16)
    _, operands = check(q, k, k, mask=mask, bias=bias)
    assert operands.q is q
    assert operands.k is k
    assert np.shares_memory(operands.mask, mask)
    assert np.shares_memory(operands.bias, bias)
    assert operands.mask.shape == operands.bias.shape == (2, 4, 7, 5)


def in_struct(a):
    record = np.zeros(a.shape, [("a", a.dtype), ("pad", "u1")])
    record["a"] = a
    return record["a"]


def test_what_kernels_cannot_read_is_converted():
    q = np.arange(48, dtype=F4).reshape(2, 3, 8)
    bad = unaligned(2, 3, 8)
    bad[...] = q
    for a in (bad, in_struct(q), q.astype(">f4"), in_struct(q.astype(">f4"))):
        _, operands = check(a, a, a, bias=a[..., :3])
        for found in (*operands[:3], operands.bias):
            assert found.dtype.isnative
            assert found.flags.aligned
            assert not any(stride % found.itemsize for stride in found.strides)
        np.testing.assert_array_equal(operands.q, q)


def test_problem_names_the_variant():
    found = problem(mask=True, bias=ones(5, dtype=">f2")).variant
    assert (found.dtype, found.storage) == ("float32", "float32")
    assert problem() is problem()
    half = [ones(2, 3, dtype="f2")] * 3
    found = check(*half, softcap=1, alibi=ones(1), sinks=ones(1), chunk=2, dropout_p=0.5)[0]
    assert (found.variant.dtype, found.variant.storage) == ("float32", "float16")
    assert (found.softcap, found.chunk, found.dropout_p) == (1, 2, 0.5)


def test_variant_of_what_is_off_is_the_plain_one():
    off = {"softcap": 0.0, "chunk": 0, "dropout_p": 0, "dropout_seed": 3, "q_len": 7}
    assert problem(**off) == problem(softcap=-1.0, kv_len=5, kv_start=0) == problem()


@pytest.mark.parametrize(
    ("change", "ranges"),
    [
        ({"q_len": [3, 7]}, [[3, 0, 5, 2], [7, 0, 5, -2]]),
        ({"q_len": 3}, [[3, 0, 5, 2]] * 2),
        ({"kv_len": [2, 2]}, [[7, 0, 2, -5]] * 2),
        ({"kv_len": [5, 2], "kv_start": 1}, [[7, 1, 5, -3], [7, 1, 2, -6]]),
        ({"align": [4, -1]}, [[7, 0, 5, 4], [7, 0, 5, -1]]),
        ({"align": "top_left", "kv_start": [4, 5]}, [[7, 4, 5, 0], [7, 5, 5, 0]]),
        ({"align": np.array([9], np.uint8)}, [[7, 0, 5, 9]] * 2),
    ],
    ids=str,
)
def test_lengths_of_each_batch_entry(change, ranges):
    arguments = {"q": ones(2, 4, 7, 8), "k": ones(2, 2, 5, 8), "v": ones(2, 2, 5, 6)}
    _, operands = check(**arguments | change)
    assert operands.ranges.dtype == np.int64
    assert operands.ranges.flags.c_contiguous
    np.testing.assert_array_equal(operands.ranges, ranges)


@pytest.mark.parametrize(
    "change", [{"kv_start": 1, "kv_len": 4}, {"kv_start": np.int8(1), "kv_len": np.array(4)}]
)
def test_one_length_for_all_is_a_view(change):
    k, mask = ones(2, 2, 5, 8), np.ones(5, bool)
    found, operands = check(ones(2, 4, 7, 8), k, k, mask=mask, causal=True, **change)
    assert operands.ranges is None
    assert (found.seqlen_k, found.offset) == (3, -4)
    assert operands.k.shape == (2, 2, 3, 8)
    assert operands.mask.shape == (2, 4, 7, 3)
    assert np.shares_memory(operands.k, k)
    assert np.shares_memory(operands.mask, mask)


def test_packed_operands():
    found, operands = check_packed(**packed())
    assert (found.batch, found.seqlen_q, found.seqlen_k) == (2, 4, 5)
    assert operands.q.shape == (1, 4, 7, 8)
    np.testing.assert_array_equal(operands.starts, [[0, 0], [3, 5]])
    np.testing.assert_array_equal(operands.ranges, [[3, 0, 5, 2], [4, 0, 0, -4]])
    assert operands.starts.flags.c_contiguous


def test_seeds_of_their_own():
    seeds = {problem(dropout_p=0.5).dropout_seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_explain_writes_nothing():
    arguments = valid()
    plan = fastattn.explain(**arguments, backend="numpy")
    assert plan.backend == "numpy"
    assert (arguments["out"] == 9).all()


def test_unknown_keywords_are_refused_by_name():
    q = ones(2, 3, 8)
    for function, name in ((fastattn.explain, "foo"), (fastattn.explain, "fold")):
        with pytest.raises(TypeError, match=rf"^explain\(\) got an unexpected .*'{name}'"):
            function(q, q, q, **{name: 1})
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'backend'"):
        fastattn.attention_weights(q, q, backend="cpu")
