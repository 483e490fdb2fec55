"""fastattn.flash_attn.cute: flash_attn 4's functions, against the definition."""

from __future__ import annotations

import flash_oracle
import numpy as np
import pytest
from test_flash_attn import F4, assert_close, by_formula, normal

import fastattn
from fastattn import mods
from fastattn.flash_attn import cute


def test_always_a_pair(rng):
    q = normal(rng, 2, 3, 2, 8)
    out, lse = cute.flash_attn_func(q, q, q)
    assert lse is None
    again, lse = cute.flash_attn_func(q, q, q, return_lse=True)
    assert lse.shape == (2, 2, 3)
    np.testing.assert_array_equal(again, out)


WINDOWS = [
    ((None, None), False, (-1, -1)),
    ((2, None), False, (2, -1)),
    ((None, 1), False, (-1, 1)),
    ((2, 1), False, (2, 1)),
    ((2, 3), True, (2, 0)),
    ((None, None), True, (-1, 0)),
    ((-1, -1), False, (-1, -1)),
    ((-1, 0), False, (-1, -1)),  # two ints whose sum is negative are no window
    ((-1, -1), True, (-1, 0)),
]


@pytest.mark.parametrize(("given", "causal", "meant"), WINDOWS, ids=str)
def test_windows(given, causal, meant, rng):
    q, k = normal(rng, 1, 4, 2, 8), normal(rng, 1, 7, 2, 8)
    out, lse = cute.flash_attn_func(q, k, k, causal=causal, window_size=given, return_lse=True)
    exact, exact_lse = flash_oracle.attend(q[0], k[0], k[0], window=meant)
    assert_close(out[0], exact)
    assert_close(lse[0], exact_lse)


def test_sinks(rng):
    q, k, v = normal(rng, 2, 5, 4, 8), normal(rng, 2, 3, 2, 8), normal(rng, 2, 3, 2, 8)
    sinks = np.array([0.5, -2, 3, -np.inf], F4)
    flags = {"causal": True, "learnable_sink": sinks, "softcap": 2.0, "return_lse": True}
    out, lse = cute.flash_attn_func(q, k, v, **flags)
    exact = flash_oracle.batched(q, k, v, causal=True, sink=sinks, softcap=2.0)
    assert_close(out, exact[0])
    assert_close(lse, exact[1])
    np.testing.assert_array_equal(lse[0, :, 0], sinks)  # a row that sees no key


@pytest.mark.slow
def test_modifiers(rng):
    q, k = normal(rng, 1, 4, 2, 8), normal(rng, 1, 6, 2, 8)
    slopes, group = np.array([0.5, 0.25], F4), np.arange(6) // 2

    def score_mod(score, b, h, i, j, aux):
        return score - aux[0][h] * mods.abs(i + aux[2] - j)

    def mask_mod(b, h, i, j, aux):
        return aux[1][j] <= i

    mods_given = {"score_mod": score_mod, "mask_mod": mask_mod}
    aux = {"aux_tensors": [slopes, group], "aux_scalars": (2,)}
    out, _ = cute.flash_attn_func(q, k, k, **mods_given, **aux)
    expected = fastattn.attention(
        *(a.swapaxes(1, 2) for a in (q, k, k)), **mods_given, aux=(slopes, group, 2)
    )
    np.testing.assert_array_equal(out, expected.swapaxes(1, 2))
    blocks = fastattn.create_block_mask(mods.causal, None, None, 4, 6)
    out, _ = cute.flash_attn_func(q, k, k, block_sparse_tensors=blocks)
    exact, _ = flash_oracle.attend(q[0], k[0, :4], k[0, :4], causal=True)
    assert_close(out[0], exact)


def test_queries_of_the_values(rng):
    q, qv, k, v = (normal(rng, *shape) for shape in ((2, 3, 4, 8), (2, 3, 4, 6), (2, 5, 1, 8),
                                                     (2, 5, 1, 6)))  # fmt: skip
    out, lse = cute.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    joined = np.concatenate([q, qv], -1), np.concatenate([k, v], -1)
    exact, exact_lse = flash_oracle.batched(*joined, v, causal=True)
    assert_close(out, exact)
    assert_close(lse, np.swapaxes(exact_lse, 1, 2))


# --- lengths ------------------------------------------------------------------------------------


def packed(batch, counts):
    return np.concatenate([a[:n] for a, n in zip(batch, counts, strict=True)])


WAYS = [
    (queries, keys)
    for queries in ("packed", "padded", "used")
    for keys in ("packed", "packed used", "padded", "used", "pages")
    if queries != "used" or not keys.startswith("packed")
]


@pytest.mark.parametrize(("queries", "keys"), WAYS)
def test_ways_to_say_lengths(queries, keys, rng):
    rows, counts, most = np.array([3, 0, 5]), np.array([7, 2, 0]), np.array([8, 3, 4])
    q, k, v = (normal(rng, 3, n, heads, 8) for n, heads in ((5, 4), (8, 2), (8, 2)))
    if queries == "padded":
        rows = np.array([5, 5, 5])
    flags, expected = {"causal": True, "return_lse": True}, counts
    edges_q = np.cumsum([0, *rows])
    if queries == "used":
        flags["seqused_q"] = rows
    elif queries == "packed":
        flags |= {"cu_seqlens_q": edges_q, "max_seqlen_q": 5}
    arrays = (packed(q, rows) if queries == "packed" else q), k, v
    if keys.startswith("packed"):
        sizes = most if "used" in keys else counts
        arrays = arrays[0], packed(k, sizes), packed(v, sizes)
        flags["cu_seqlens_k"] = np.cumsum([0, *sizes])
        flags |= {"seqused_k": counts} if "used" in keys else {}
    elif keys == "padded":
        expected = np.array([8, 8, 8])
    else:
        flags["seqused_k"] = counts
    if keys == "pages":
        table = rng.permutation(6).reshape(3, 2)
        arrays = arrays[0], *(np.empty((6, 4, 2, 8), F4) for _ in range(2))
        for a, pages in zip((k, v), arrays[1:], strict=True):
            pages[table] = a.reshape(3, 2, 4, 2, 8)
        flags["page_table"] = table
    out, lse = cute.flash_attn_varlen_func(*arrays, **flags)
    lists = [[a[b, :n] for b, n in enumerate(size)] for a, size in
             ((q, rows), (k, expected), (v, expected))]  # fmt: skip
    exact, exact_lse = flash_oracle.batched(*lists, causal=True)
    if queries == "packed":
        assert_close(out, np.concatenate(exact))
        assert_close(lse, np.concatenate(exact_lse, axis=1))
        return
    for b, n in enumerate(rows):
        assert_close(out[b, :n], exact[b])
        assert_close(lse[b, :, :n], exact_lse[b])
        assert not out[b, n:].any()


def test_gradients(torch, rng):
    data = [torch.from_numpy(normal(rng, 2, n, 2, 8)) for n in (4, 6, 6)]
    found, expected = ([t.clone().requires_grad_() for t in data] for _ in range(2))
    cute.flash_attn_func(*found, causal=True)[0].square().sum().backward()
    by_formula(torch, *expected, True).square().sum().backward()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.grad, b.grad, 1e-4, 1e-5)


@pytest.mark.slow
def test_gradients_of_sinks_and_modifiers(torch, rng):
    q, k, v = (torch.from_numpy(normal(rng, 1, n, 2, 8)).double() for n in (4, 6, 6))
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    q.requires_grad_()

    def loss(q, sinks):
        mod = {"score_mod": mods.softcap(3.0), "learnable_sink": sinks}
        return cute.flash_attn_func(q, k, v, **mod)[0].square().sum()

    loss(q, sinks).backward()
    with torch.no_grad():
        for leaf in (q, sinks):
            step = torch.zeros_like(leaf)
            step.view(-1)[1] = 1e-6
            pair = [loss(q + s, sinks) if leaf is q else loss(q, sinks + s) for s in (step, -step)]
            slope = (pair[0] - pair[1]) / 2e-6
            np.testing.assert_allclose(leaf.grad.view(-1)[1], slope, 1e-4)
    tokens = torch.ones(3, 2, 8, requires_grad=True)
    edges = torch.tensor([0, 1, 3])
    out, _ = cute.flash_attn_varlen_func(
        tokens, tokens, tokens, cu_seqlens_q=edges, cu_seqlens_k=edges, learnable_sink=sinks.float()
    )
    out.sum().backward()
    assert tokens.grad.abs().sum() > 0


QV = np.ones((1, 3, 2, 8), F4)
RULES = [
    (
        {"window_size": (5, -1)},
        "window_size must be a pair of ints >= 0 or None (no limit), got (5",
    ),
    ({"window_size": (1.0, 2)}, "window_size must be a pair of ints >= 0 or None"),
    ({"gather_kv_indices": [0]}, "gather_kv_indices must be None: fastattn has no such function"),
    ({"learnable_sink": np.ones(3, F4)}, "learnable_sink must have shape (2,), got (3,)"),
    ({"block_sparse_tensors": 1}, "block_mask must be what create_block_mask() returns"),
    (
        {"qv": QV, "v": np.ones((1, 9, 2, 8), F4)},
        "v must have the shape of k but for the last axis",
    ),
    ({"qv": np.ones((1, 3, 1, 8), F4)}, "qv must have the shape of q but for the last axis, got ("),
]


@pytest.mark.parametrize(("change", "message"), RULES, ids=lambda value: "")
def test_rule(change, message):
    q = np.ones((1, 3, 2, 8), F4)
    with pytest.raises(RuntimeError) as caught:
        cute.flash_attn_func(**{"q": q, "k": q, "v": q} | change)
    assert str(caught.value).startswith(message)


LENGTH_RULES = [
    (
        {"cu_seqlens_k": [0, 3], "page_table": [[0]]},
        "page_table must be None with cu_seqlens_k, go",
    ),
    (
        {"cu_seqlens_q": [0, 3], "seqused_q": [3]},
        "seqused_q must be None with cu_seqlens_q, got bo",
    ),
    (
        {"cu_seqlens_k": [0, 3], "seqused_q": [3]},
        "seqused_q must be None with cu_seqlens_k, got bo",
    ),
    ({"cu_seqlens_q": [0, 1, 3]}, "k must have the batch of cu_seqlens_q, 2, got 1"),
    (
        {"cu_seqlens_k": [0, 3], "q": np.ones((3, 2, 8), F4)},
        "q must have shape (batch, seqlen_q, h",
    ),
    ({"seqused_k": [4]}, "seqused_k must lie between 0 and 3, got 4"),
    ({"seqused_q": [4]}, "seqused_q must lie between 0 and 3, got 4"),
]


@pytest.mark.parametrize(("change", "message"), LENGTH_RULES, ids=lambda value: "")
def test_rule_of_lengths(change, message):
    q = np.ones((1, 3, 2, 8), F4)
    with pytest.raises(RuntimeError) as caught:
        cute.flash_attn_varlen_func(**{"q": q, "k": q, "v": q} | change)
    assert str(caught.value).startswith(message)
