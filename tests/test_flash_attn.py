"""fastattn.flash_attn: batches, packed sequences and packed projections, against the definition."""

from __future__ import annotations

import flash_oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastattn.flash_attn as flash_attn
from fastattn.errors import ArgumentError, ArgumentTypeError

F4 = np.float32
CLOSE = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-13}
FUZZ = settings(max_examples=60, deadline=None, derandomize=True)


def normal(rng, *shape, dtype=F4):
    return rng.standard_normal(shape).astype(dtype)


def assert_close(found, expected, factor=1.0):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    tolerance = factor * CLOSE[found.dtype.name]
    np.testing.assert_allclose(found.astype(float), expected, tolerance, tolerance)


def as_infinity(lse):
    """lse as flash_attn 2 has it."""
    return np.where(np.isneginf(lse), np.inf, lse)


@st.composite
def calls(draw):
    """(q, k, v) sizes, dtype, arguments of flash_attn_func and of the oracle."""
    batch, heads_kv, group = draw(st.tuples(*[st.integers(1, 3)] * 3))
    sizes = draw(st.tuples(st.integers(0, 9), st.integers(0, 12)))
    dims = draw(st.sampled_from([(8, 8), (16, 16), (5, 7), (64, 32)]))
    flags = {
        "causal": draw(st.booleans()),
        "window_size": draw(st.tuples(*[st.integers(-2, 6)] * 2)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.5, -1.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.3, -0.5, 0.0])),
    }
    slopes = draw(st.sampled_from([None, "h", "bh"]))
    dtype = draw(st.sampled_from(["float32", "float32", "float64", "float16"]))
    return (batch, heads_kv, group, sizes, dims), flags, slopes, dtype, draw(st.integers(0, 99))


def of_oracle(flags):
    """The oracle's words for flash_attn's."""
    words = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    return {words.get(name, name): value for name, value in flags.items()}


def drawn(call):
    (batch, heads_kv, group, (rows, keys), (dim, dim_v)), flags, slopes, dtype, seed = call
    rng = np.random.default_rng(seed)
    q = normal(rng, batch, rows, heads_kv * group, dim, dtype=dtype)
    k = normal(rng, batch, keys, heads_kv, dim, dtype=dtype)
    v = normal(rng, batch, keys, heads_kv, dim_v, dtype=dtype)
    if slopes:
        shape = (heads_kv * group,) if slopes == "h" else (batch, heads_kv * group)
        flags = flags | {"alibi_slopes": rng.random(shape).astype(F4)}
    return q, k, v, flags


@given(calls())
@FUZZ
def test_a_batch(call):
    q, k, v, flags = drawn(call)
    out, lse, dmask = flash_attn.flash_attn_func(q, k, v, **flags, return_attn_probs=True)
    exact, exact_lse = flash_oracle.batched(q, k, v, **of_oracle(flags))
    assert_close(out, np.reshape(exact, out.shape))
    assert_close(lse, as_infinity(np.reshape(exact_lse, lse.shape)))
    assert out.dtype == q.dtype
    assert out.flags.c_contiguous
    assert dmask.shape == (0,)
    for _ in range(2):  # found out anew, and known
        np.testing.assert_array_equal(flash_attn.flash_attn_func(q, k, v, **flags), out)


@given(calls(), st.data())
@FUZZ
def test_packed_sequences(call, data):
    q, k, v, flags = drawn(call)
    batch, rows, keys = len(q), q.shape[1], k.shape[1]
    lengths_q = data.draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
    lengths_k = data.draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
    parts = [[a[b, :n] for b, n in enumerate(sizes)] for a, sizes in
             ((q, lengths_q), (k, lengths_k), (v, lengths_k))]  # fmt: skip
    edges = [np.cumsum([0, *n]).astype(np.int32) for n in (lengths_q, lengths_k)]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *map(np.concatenate, parts), *edges, rows, keys, **flags, return_attn_probs=True
    )
    exact, exact_lse = flash_oracle.batched(*parts, **of_oracle(flags))
    assert_close(out, np.concatenate(exact))
    assert_close(lse, as_infinity(np.concatenate(exact_lse, axis=1)))


def test_projections_in_one_array(rng):
    qkv, edges = normal(rng, 2, 6, 3, 4, 8), np.array([0, 4, 12], np.int32)
    q, k, v = (np.ascontiguousarray(qkv[:, :, n]) for n in range(3))
    flags = {"causal": True, "window_size": (2, 2)}
    expected = flash_attn.flash_attn_func(q, k, v, **flags)
    found = flash_attn.flash_attn_qkvpacked_func(qkv, **flags)
    np.testing.assert_array_equal(found, expected)
    found = flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, None, **flags)
    np.testing.assert_array_equal(found, expected)
    q, k, v = (a.reshape(12, 4, 8) for a in (q, k, v))
    expected = flash_attn.flash_attn_varlen_func(q, k, v, edges, edges, 8, 8, **flags)
    qkv = qkv.reshape(12, 3, 4, 8)
    found = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, edges, 8, **flags)
    np.testing.assert_array_equal(found, expected)
    lengths = edges, edges, 8, 8
    found = flash_attn.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], *lengths, **flags)
    np.testing.assert_array_equal(found, expected)


def test_packed_sequences_on_pages(rng):
    q, k, v = (normal(rng, *shape) for shape in ((7, 4, 16), (6, 5, 2, 16), (6, 5, 2, 16)))
    table = np.array([[4, 0, -9], [2, 5, 1]], np.int32)
    edges_q, edges_k = np.array([0, 3, 7], np.int32), np.array([0, 8, 20], np.int32)
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, edges_q, edges_k, 4, 12, causal=True, block_table=table
    )
    rows = [np.array([20, 21, 22, 23, 24, 0, 1, 2]), np.r_[10:15, 25:30, 5:7]]
    k, v = k.reshape(30, 2, 16), v.reshape(30, 2, 16)
    parts = [q[:3], q[3:]], [k[n] for n in rows], [v[n] for n in rows]
    assert_close(out, np.concatenate(flash_oracle.batched(*parts, causal=True)[0]))


def test_dropout_and_its_probabilities(rng):
    q, k, v = (normal(rng, 2, n, 2, 8) for n in (40, 50, 50))
    flags = {"causal": True, "return_attn_probs": True}
    out, _, dmask = flash_attn.flash_attn_func(q, k, v, 0.25, **flags)
    assert dmask.shape == (2, 2, 40, 50)
    seen = np.arange(50) <= np.arange(40)[:, None] + 10
    assert 0.2 < np.mean(np.signbit(dmask)[..., seen]) < 0.3
    kept = np.maximum(dmask, 0) / 0.75
    expected = np.einsum("bhij,bjhd->bihd", kept, v.astype(float))
    assert_close(out, expected, 10)
    np.testing.assert_allclose(np.abs(dmask).sum(-1), 1, 1e-5)
    edges_q, edges_k = np.array([0, 40, 40, 80]), np.array([0, 50, 60, 100])
    q, k, v = (a.reshape(-1, 2, 8) for a in (q, k, v))
    out, _, dmask = flash_attn.flash_attn_varlen_func(
        q, k, v, edges_q, edges_k, 40, 50, 0.25, **flags
    )
    assert dmask.shape == (3, 2, 40, 50)
    assert not dmask[1].any()
    for b in (0, 2):
        kept = np.maximum(dmask[b], 0) / 0.75
        keys = v[edges_k[b] : edges_k[b + 1]]
        expected = np.einsum("hij,jhd->ihd", kept[..., : len(keys)], keys.astype(float))
        assert_close(out[edges_q[b] : edges_q[b + 1]], expected, 10)


RULES = [
    ({"q": np.ones((2, 3, 4), F4)}, "q must have shape (batch, seqlen, heads, dim), got (2, 3, 4)"),
    ({"k": np.ones((3, 5, 2, 8), F4)}, "q and k must have the same batch, got 2 and 3"),
    ({"v": np.ones((1, 5, 2, 8), F4)}, "q and v must have the same batch, got 2 and 1"),
    ({"v": np.ones((2, 6, 2, 8), F4)}, "k and v must have the same seqlen_k"),
    ({"k": np.ones((2, 5, 3, 8), F4)}, "k and v must have the same heads"),
    ({"softmax_scale": np.inf}, "softmax_scale must be finite"),
    ({"window_size": 3}, "window_size must be a pair of ints"),
    ({"window_size": (3, 2.5)}, "window_size must be a pair of ints"),
    ({"alibi_slopes": np.ones(3, F4)}, "alibi_slopes must have shape (4,)"),
    ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1"),
    ({"causal": 1}, "causal must be a bool"),
    ({"k": np.ones((2, 5, 2, 8), float)}, "q, k and v must have the same dtype"),
    ({"q": np.ones((2, 3, 4, 8), int)}, "q must be float16"),
]


@pytest.mark.parametrize(("change", "message"), RULES, ids=lambda value: "")
def test_rule(change, message):
    arguments = {"q": np.ones((2, 3, 4, 8), F4), "k": np.ones((2, 5, 2, 8), F4)}
    arguments |= {"v": np.ones((2, 5, 2, 8), F4)} | change
    with pytest.raises(RuntimeError) as caught:
        flash_attn.flash_attn_func(**arguments)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ValueError)
    is_type = any(word in message for word in ("dtype", "float16", "bool", "ints"))
    kind = ArgumentTypeError if is_type and change != {"window_size": 3} else ArgumentError
    assert type(caught.value) is kind


def test_rules_of_packed_arrays():
    with pytest.raises(RuntimeError, match=r"^qkv must have shape \(batch, seqlen, 3, heads, dim"):
        flash_attn.flash_attn_qkvpacked_func(np.ones((2, 3, 2, 4, 8), F4))
    with pytest.raises(RuntimeError, match=r"^kv must have shape \(tokens, 2, heads, dim\), got"):
        flash_attn.flash_attn_varlen_kvpacked_func(np.ones((2, 4, 8), F4), np.ones(3), [0], [0])
    tokens = np.ones((3, 2, 4), F4)
    with pytest.raises(RuntimeError, match=r"^cu_seqlens_q must end at the number of tokens, 3"):
        flash_attn.flash_attn_varlen_func(tokens, tokens, tokens, [0, 2], [0, 3])


# --- tensors ------------------------------------------------------------------------------------


def test_tensors_in_tensors_out(torch, rng):
    arrays = [normal(rng, 2, n, 2, 8) for n in (3, 5, 5)]
    expected = flash_attn.flash_attn_func(*arrays, causal=True, return_attn_probs=True)
    tensors = [torch.from_numpy(a) for a in arrays]
    found = flash_attn.flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, torch.Tensor)
        np.testing.assert_array_equal(a.numpy(), b)
    assert found[0].is_contiguous()
    halves = [t.to(torch.bfloat16) for t in tensors]
    half = flash_attn.flash_attn_func(*halves, causal=True)
    assert half.dtype is torch.bfloat16
    np.testing.assert_allclose(half.float().numpy(), expected[0], 0.03, 0.03)


def by_formula(torch, q, k, v, causal):
    """Attention of (batch, seqlen, heads, dim) for autograd."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        rows, keys = s.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        s = s.masked_fill(~seen, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def test_gradients_of_a_batch(torch, rng):
    data = [torch.from_numpy(normal(rng, 2, n, 2, 8)) for n in (4, 6, 6)]
    weights = torch.from_numpy(normal(rng, 2, 4, 2, 8))
    found, expected = ([t.clone().requires_grad_() for t in data] for _ in range(2))
    out, lse, _ = flash_attn.flash_attn_func(*found, causal=True, return_attn_probs=True)
    (out * weights).sum().backward()
    (by_formula(torch, *expected, True) * weights).sum().backward()
    assert not lse.requires_grad
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.grad, b.grad, 1e-4, 1e-5)
    (gradient,) = torch.autograd.grad(
        flash_attn.flash_attn_func(*found).sum(), found[0], create_graph=True
    )
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_gradients_of_packed_sequences(torch, rng):
    data = [torch.from_numpy(normal(rng, 9, 2, 8)) for _ in range(3)]
    edges = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    weights = torch.from_numpy(normal(rng, 9, 2, 8))
    found, expected = ([t.clone().requires_grad_() for t in data] for _ in range(2))
    qkv = torch.stack(found, dim=1)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, edges, 5, causal=True)
    (out * weights).sum().backward()
    parts = [
        by_formula(torch, *(t[None, a:b] for t in expected), True)[0] for a, b in ((0, 4), (4, 9))
    ]
    (torch.cat(parts) * weights).sum().backward()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.grad, b.grad, 1e-4, 1e-5)
    k = torch.ones(2, 3, 2, 8)
    with pytest.raises(RuntimeError, match=r"^block_table must be None where a gradient is needed"):
        flash_attn.flash_attn_varlen_func(found[0], k, k, edges, edges, block_table=[[0]] * 3)


def test_dropout_of_tensors_follows_torch(torch):
    q = torch.ones(1, 8, 2, 8)
    v = torch.randn(1, 30, 2, 8)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(flash_attn.flash_attn_func(q, v, v, 0.5))
    assert (results[0] == results[1]).all()
    assert (results[0] != flash_attn.flash_attn_func(q, v, v, 0.5)).any()


def test_what_cannot_be_recorded(torch):
    q = torch.ones(3, 2, 8, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"^q must have shape \(batch, seqlen, heads, dim\), got"
    ):
        flash_attn.flash_attn_func(q, q, q)


def test_probabilities_of_pages_are_refused():
    q, edges = np.ones((3, 2, 8), F4), [0, 3]
    pages = np.ones((1, 4, 2, 8), F4)
    options = {"block_table": [[0]], "dropout_p": 0.5, "return_attn_probs": True}
    with pytest.raises(ValueError, match="return_attn_probs must be False with dropout and block"):
        flash_attn.flash_attn_varlen_func(q, pages, pages, edges, edges, **options)
