"""What is accepted, and as what."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from rules import F4, ones, packed, unaligned, valid

import fastattn
from fastattn.check import check, check_packed


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


def test_only_float32_is_rounded_to_tf32():
    for dtype in ("f2", "f4", "f8"):
        assert check(*[ones(2, 3, dtype=dtype)] * 3, precision="tf32")[0].tf32 == (dtype == "f4")
    assert not problem(precision=None).tf32


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


def test_packed_calls_are_explained(monkeypatch):
    q, k = ones(9, 4, 8), ones(12, 2, 8)
    edges, keys = [0, 2, 9], [0, 4, 12]
    plan = fastattn.explain_varlen(q, k, k, edges, keys, causal=True, backend="numpy")
    problem = plan.problem
    assert (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k) == (2, 4, 7, 8)
    assert (plan.backend, problem.right) == ("numpy", 0)
    monkeypatch.setattr("fastattn.api.plan_backward", lambda problem, *others: problem)
    assert fastattn.explain_varlen(q, k, k, edges, keys, causal=True, gradients=True) == problem
    monkeypatch.setattr("fastattn.api.plan", lambda problem, backend, placement: placement)
    monkeypatch.setattr("fastattn.api.placement_of", lambda operands, backend: "on a GPU")
    assert fastattn.explain_varlen(q, k, k, edges, keys) == "on a GPU"


def test_empty_lists_are_ints():
    """To NumPy they are floats."""
    q = ones(0, 2, 3, 8)
    assert fastattn.attention(q, q, q, kv_len=[], align=[], causal=True).shape == (0, 2, 3, 8)
    q = ones(2, 3, 8)
    assert fastattn.attention_weights(q, q, rows=[]).shape == (2, 0, 3)


def test_a_list_may_stand_for_aux():
    q = ones(2, 3, 8)
    assert fastattn.explain(q, q, q, aux=[]).problem == fastattn.explain(q, q, q).problem
