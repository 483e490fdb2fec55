"""Every rule about arguments: a call that works, one change, the error and its message."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

import fastattn
from fastattn.check import check

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
    assert (found.dtype, found.has_mask, found.bias_dtype) == ("float32", True, "float16")
    assert problem() is problem()


def test_explain_writes_nothing():
    arguments = valid()
    plan = fastattn.explain(**arguments, backend="numpy")
    assert plan.backend == "numpy"
    assert (arguments["out"] == 9).all()
