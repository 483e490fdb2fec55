"""Every rule about the arguments of attention(): a call that works, one change, the error and its
message.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from rules import F4, FLOAT, WINDOW, masked, ones, rule_id, unaligned, valid

import fastattn
from fastattn.check import check

ALIGN = "align must be 'bottom_right', 'top_left', an int or an array of ints"
INF = np.float32("inf")  # whose repr says its type since NumPy 2
SAME_DTYPE = "q, k and v must have the same dtype, got "


def read_only(a):
    a.setflags(write=False)
    return a


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
    ({"q": [[1.0, 2], [3]]}, ValueError, "q must be an array, got list: setting an array element"),
    ({"mask": [[True], [True] * 5]}, ValueError, "mask must be an array, got list: setting an arr"),
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
    ({"scale": INF}, ValueError, f"scale must be finite in float32, got {INF!r}"),
    ({"scale": 1e39}, ValueError, "scale must be finite in float32, got 1e+39"),
    ({"scale": 10**400}, ValueError, "scale must be finite in float32, got 1000"),
    ({"scale": True}, TypeError, "scale must be a real number, got bool"),
    ({"scale": np.True_}, TypeError, "scale must be a real number, got bool"),
    ({"scale": "1"}, TypeError, "scale must be a real number, got str"),
    ({"scale": 1j}, TypeError, "scale must be a real number, got complex"),
    ({"scale": ones(1)}, TypeError, "scale must be a real number, got ndarray"),
    ({"scale": [[1.0], [1.0, 2]]}, TypeError, "scale must be a real number, got list"),
    # flags, align, window
    ({"causal": 1}, TypeError, "causal must be a bool, got int"),
    ({"causal": ones(7, 5)}, TypeError, "causal must be a bool, got ndarray"),
    ({"return_lse": None}, TypeError, "return_lse must be a bool, got NoneType"),
    ({"align": "left"}, ValueError, ALIGN + ", got 'left'"),
    ({"align": 1.0}, TypeError, ALIGN + ", got float"),
    ({"align": True}, TypeError, ALIGN + ", got bool"),
    ({"align": None}, TypeError, ALIGN + ", got NoneType"),
    ({"align": [[1], [1, 2]]}, ValueError, "align must be an array, got list: setting an array el"),
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
    ({"alibi": [1.0, 2, np.inf, 4]}, ValueError, "alibi must be finite, got inf"),
    ({"alibi": np.full((2, 4), np.nan)}, ValueError, "alibi must be finite, got nan"),
    ({"alibi": [1.0, 2, -1e39, 4]}, ValueError, "alibi must be finite in float32, got -1e+39"),
    ({"sinks": [1.0, 2, 1e39, 4]}, ValueError, "sinks must be finite in float32, got 1e+39"),
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
    ({"kv_len": 10**30}, ValueError, f"kv_len must lie between 0 and 5, got {10**30}"),
    ({"kv_len": [10**30, 2]}, ValueError, f"kv_len must lie between 0 and 5, got {10**30}"),
    (
        {"kv_start": [0, -(10**30)]},
        ValueError,
        f"kv_start must lie between 0 and 5, got {-(10**30)}",
    ),
    (
        {"align": [10**30, 2]},
        ValueError,
        "align must lie between -1073741824 and 1073741824, got 10",
    ),
    (
        {"kv_len": []},
        ValueError,
        "kv_len must be an int or broadcast to the leading dimensions (2,), got shape (0,)",
    ),
    ({"kv_len": np.zeros(0)}, TypeError, "kv_len must be an int or an array of ints, got float64"),
    (
        {"kv_len": [[1], [1, 2]]},
        ValueError,
        "kv_len must be an array, got list: setting an array e",
    ),
    (
        {"kv_len": [1, 2, 3]},
        ValueError,
        "kv_len must be an int or broadcast to the leading dimensions (2,), got shape (3,)",
    ),
    # dropout
    (
        {"precision": "bf16"},
        ValueError,
        "precision must be None, for products in the dtype of the arrays, or 'tf32', got 'bf16'",
    ),
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
    ({"out": [[0.0]]}, TypeError, "out must be a plain NumPy array or a tensor"),
    ({"out": masked(2, 4, 7, 6)}, TypeError, "out must be a plain NumPy array or a tensor"),
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
        "backend must be one of ('auto', 'numpy', 'cpu', 'cuda'), got 'gpu'",
    ),
    (
        {"backend": None},
        ValueError,
        "backend must be one of ('auto', 'numpy', 'cpu', 'cuda'), got None",
    ),
    (
        {"backend": np.array(["cpu", "numpy"])},
        ValueError,
        "backend must be one of ('auto', 'numpy', 'cpu', 'cuda'), got array(",
    ),
    # aux that nothing reads
    (
        {"aux": (1, 2)},
        ValueError,
        "aux must be empty without score_mod and mask_mod, got 2 of them",
    ),
    ({"aux": None}, TypeError, "aux must be a tuple of arrays and numbers, got NoneType"),
]


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
