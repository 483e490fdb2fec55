"""Gradients on every backend: finite differences, the definition, edges."""

from __future__ import annotations

import gradient_oracle
import numpy as np
import oracle
import pytest
from cases import CASES, Case
from test_attention import kept
from test_variants import FLAGS, LENGTHS_K, LENGTHS_Q, packed, padded_to

import fastattn
from fastattn import mods
from fastattn.check_backward import sum_to

F4 = np.float32
OTHERS = ("bias", "sinks", "alibi")


def backward(backend, arrays, flags, seed=7, **more):
    """Return (dout, dlse, {name: gradient}) for a loss that takes out and lse, drawn at random."""
    out, lse = fastattn.attention(*arrays, **flags, return_lse=True, backend="numpy")
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    wanted = [name for name in OTHERS if name in flags]
    found = fastattn.attention_backward(
        dout,
        *arrays,
        out,
        lse,
        dlse=dlse,
        **{f"return_d{name}": True for name in wanted},
        **flags,
        **more,
        backend=backend,
    )
    return dout, dlse, dict(zip(["q", "k", "v", *wanted], found, strict=True))


# --- finite differences, float64 ------------------------------------------------------------------

B, H, Q, K = 2, 4, 21, 34


def bend(score, b, h, i, j, aux):
    steep = mods.tanh(score / 3) * aux[0][h] + abs(i - j) * score * 0.01
    return mods.where(i % 3 == 0, steep, mods.exp(score * 0.3) - mods.maximum(score, 0.1) / (1 + b))


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


DIFFERENTIATED = {
    "plain": {},
    "causal": {"causal": True, "align": -10},
    "window and softcap": {"window": (7, 3), "softcap": 2.0, "scale": -0.7},
    "chunk": {"chunk": 8},
    "mask": {"mask": drawn(Q, K) > 0},
    **{
        f"bias {shape}": {"bias": drawn(*shape)}
        for shape in [(Q, K), (K,), (1, 1, Q, 1), (B, 1, 1, K), (B, H, Q, K), (H, 1, 1), (1,)]
    },
    "alibi and sinks": {"alibi": drawn(H), "sinks": drawn(H), "causal": True},
    "lengths": {
        "alibi": drawn(B, H),
        "sinks": drawn(H),
        "q_len": np.array([Q, 12]),
        "kv_len": np.array([30, 0]),
        "kv_start": np.array([3, 0]),
    },
    "one length": {"kv_len": 20, "kv_start": 3, "bias": drawn(Q, K), "mask": drawn(Q, K) < 1},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 4},
    "score_mod": {"score_mod": bend, "aux": (drawn(H),), "softcap": 3.0},
    "mask_mod": {"mask_mod": lambda b, h, i, j, aux: (i * 7 + j) % 3 != h % 3},
}


PLAIN = [name for name in DIFFERENTIATED if not name.endswith("_mod")]


@pytest.mark.parametrize("name", PLAIN)
def test_every_gradient_is_a_finite_difference(name, backend):
    flags = DIFFERENTIATED[name]
    differentiate(backend, (drawn(B, H, Q, 8), drawn(B, 2, K, 8), drawn(B, 2, K, 5)), flags)


@pytest.mark.cpu_is_slow  # test_compiled_modifiers.py has one that is quick
@pytest.mark.parametrize("name", sorted(set(DIFFERENTIATED) - set(PLAIN)))
def test_every_gradient_with_modifiers_is_a_finite_difference(name, backend):
    flags = DIFFERENTIATED[name]
    differentiate(backend, (drawn(B, H, Q, 8), drawn(B, 2, K, 8), drawn(B, 2, K, 5)), flags)


SHAPES = [
    ((7, 8), (5, 8), (5, 6)),
    ((4, 7, 8), (5, 8), (5, 6)),
    ((2, 4, 7, 8), (4, 5, 8), (4, 5, 6)),
    ((7, 8), (3, 1, 5, 8), (1, 5, 6)),
    ((2, 1, 4, 7, 8), (3, 2, 5, 8), (1, 2, 5, 6)),
    ((2, 3, 2, 4, 7, 8), (2, 1, 2, 2, 5, 8), (2, 5, 6)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_have_the_shapes_of_what_was_broadcast(shapes, backend):
    differentiate(backend, [drawn(*shape) for shape in shapes], {"causal": True})
    differentiate(backend, [drawn(*shape) for shape in shapes], {"bias": drawn(7, 5)})


def differentiate(backend, arrays, flags):
    """Hold the gradient by each array against differences of the loss, each in a few directions."""
    dout, dlse, found = backward(backend, arrays, flags)
    inputs = dict(zip("qkv", arrays, strict=True)) | {n: flags[n] for n in OTHERS if n in flags}

    def loss(**changed):
        q, k, v, *_ = (inputs | changed)["q"], (inputs | changed)["k"], (inputs | changed)["v"]
        others = {n: (inputs | changed)[n] for n in OTHERS if n in flags}
        out, lse = fastattn.attention(q, k, v, **flags | others, return_lse=True, backend="numpy")
        return (dout * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum()

    rng = np.random.default_rng(1)
    for name, x in inputs.items():
        assert found[name].shape == x.shape
        assert found[name].dtype == x.dtype
        for _ in range(3):
            step = rng.standard_normal(x.shape) * 1e-5
            difference = (loss(**{name: x + step}) - loss(**{name: x - step})) / 2e-5
            slope = (found[name] * step).sum() / 1e-5
            scale = np.abs(found[name]).max() * np.sqrt(x.size)
            assert abs(slope - difference) <= 1e-7 * max(1, scale), name


# --- the definition -------------------------------------------------------------------------------

HALF = ("float16", "bfloat16")


@pytest.mark.parametrize("case", [c for c in CASES[::17] if c.dtype not in HALF], ids=str)
def test_error_is_at_most_twice_the_formulas(case, backend):
    dout, dlse, found = backward(backend, case.arrays(), case.flags())
    for name, (exact, formula) in judged(case, dout, dlse).items():
        # dp - delta, where one key has all the weight, is the difference of two like products. And
        # the rounding of lse, far from 0 under ALiBi, is common to all of a row.
        floor = 32 if name == "alibi" else 8
        oracle.assert_within_budget(found[name], exact, formula, floor)


def test_a_bias_that_all_pairs_share_is_added_up_row_by_row(backend):
    """One by one, 120 000 terms in float32 erred twelve times as much."""
    case = Case("shared", 1, 6000, 8, batch=2, heads_q=10, heads_kv=2, bias="q1")
    dout, dlse, found = backward(backend, case.arrays(), case.flags())
    exact, formula = judged(case, dout, dlse)["bias"]
    oracle.assert_within_budget(found["bias"], exact, formula, 8)


# Each type is a kernel of its own to compile; what differs is a conversion, in test_storage.py.
HALVES = [
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.dtype == "bfloat16"))
    for case in CASES
    if case.dtype in HALF
]


@pytest.mark.parametrize("case", HALVES)
def test_half_types(case, backend):
    dout, dlse, found = backward(backend, case.arrays(), case.flags())
    for name, (exact, _) in judged(case, dout, dlse).items():
        like = case.arrays()[0] if name in "qkv" else case.flags()[name]
        assert found[name].dtype == like.dtype
        # out was rounded to the type of dout, and delta is a product of the two.
        allowed = 3 * oracle.EPS[case.dtype] * max(1, np.abs(exact).max(initial=0))
        assert np.abs(found[name].astype(float) - exact).max(initial=0) <= allowed, name


def judged(case, dout, dlse):
    """Return {name: (exact, formula)} in the shapes of the arguments."""
    flags = case.flags()
    if flags.pop("dropout_seed", None) is not None:
        flags["keep"] = kept(case)
    names = ["q", "k", "v", *(name for name in OTHERS if name in flags)]
    pair = gradient_oracle.judge(dout, *case.arrays(), dlse=dlse, **flags)
    return {name: tuple(summed(name, part["d" + name], flags) for part in pair) for name in names}


def summed(name, a, flags):
    if name == "sinks":
        return a.sum((0, 2))
    return sum_to(a, flags[name].shape) if name in OTHERS else a


# --- PyTorch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_torch_autograd_in_float64(causal, heads_kv, backend):
    torch = pytest.importorskip("torch")
    arrays = drawn(2, 4, 70, 16), drawn(2, heads_kv, 70, 16), drawn(2, heads_kv, 70, 24)
    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *tensors, is_causal=causal, enable_gqa=True
    )
    out, lse = fastattn.attention(*arrays, causal=causal, return_lse=True, backend=backend)
    dout = np.random.default_rng(3).standard_normal(out.shape)
    theirs.backward(torch.from_numpy(dout))
    ours = fastattn.attention_backward(dout, *arrays, out, lse, causal=causal, backend=backend)
    for a, tensor in zip(ours, tensors, strict=True):
        np.testing.assert_allclose(a, tensor.grad.numpy(), rtol=0, atol=1e-13)


@pytest.mark.cpu_is_slow  # test_compiled_modifiers.py has one that is quick
def test_torch_autograd_through_a_score_mod(backend):
    """PyTorch's autograd on the formula: its flex_attention has no gradients on CPUs."""
    torch = pytest.importorskip("torch")
    arrays = drawn(2, 4, 33, 16), drawn(2, 4, 70, 16), drawn(2, 4, 70, 24)

    def score_mod(score, b, h, i, j, aux):
        return 2 * mods.tanh(score / 2) + 0.1 * (h + 1) * abs(i - j) * mods.exp(-abs(score))

    flags = {"score_mod": score_mod, "window": (None, 9), "align": "top_left"}
    dout, dlse, found = backward(backend, arrays, flags)
    q, k, v = (torch.from_numpy(a).requires_grad_() for a in arrays)
    h, i, j = torch.arange(4.0).double()[:, None, None], torch.arange(33)[:, None], torch.arange(70)
    s = q @ k.mT / 4
    s = 2 * torch.tanh(s / 2) + 0.1 * (h + 1) * (i - j).abs() * torch.exp(-s.abs())
    s = s.masked_fill(j > i + 9, -torch.inf)
    loss = (s.softmax(-1) @ v * torch.from_numpy(dout)).sum()
    (loss + (s.logsumexp(-1) * torch.from_numpy(dlse)).sum()).backward()
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        np.testing.assert_allclose(found[name], tensor.grad.numpy(), rtol=0, atol=1e-11)


# --- modifiers ------------------------------------------------------------------------------------


@pytest.mark.cpu_is_slow  # test_compiled_modifiers.py has one that is quick
def test_a_given_derivative_is_used(backend):
    arrays = drawn(2, 9, 8), drawn(2, 12, 8), drawn(2, 12, 8)
    flags = {"score_mod": lambda score, b, h, i, j, aux: score * score * aux[0], "aux": (0.3,)}
    _, _, expected = backward(backend, arrays, flags)
    _, _, found = backward(
        backend,
        arrays,
        flags,
        score_mod_grad=lambda score, b, h, i, j, aux: 2 * score * aux[0],
    )
    np.testing.assert_allclose(found["q"], expected["q"], rtol=1e-14, atol=1e-14)
    _, _, none = backward(backend, arrays, flags, score_mod_grad=lambda score, b, h, i, j, aux: 0.0)
    assert not none["q"].any()
    np.testing.assert_array_equal(none["v"], expected["v"])


def test_a_score_mod_that_hides_a_key_gives_it_no_gradient():
    arrays = drawn(1, 9, 8), drawn(1, 12, 8), drawn(1, 12, 8)

    def hide(score, b, h, i, j, aux):
        return mods.where(j == 3, -np.inf, score * 2)

    for name, a in backward("numpy", arrays, {"score_mod": hide})[2].items():
        assert np.isfinite(a).all()
        assert name == "q" or not a[0, 3].any()
        assert a.any()


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_no_row_sees_has_no_gradient_and_does_no_harm(poison, backend):
    q, k, v = drawn(2, 3, 40, 16), drawn(2, 3, 300, 16), drawn(2, 3, 300, 8)
    mask = np.random.default_rng(0).random((40, 300)) < 0.7
    mask[:, [0, 17, 299]] = False
    _, _, expected = backward(backend, (q, k, v), {"mask": mask})
    for a in (k, v):
        a[:, :, [0, 17, 299]] = poison
    _, _, found = backward(backend, (q, k, v), {"mask": mask})
    for name in "qkv":
        np.testing.assert_array_equal(found[name], expected[name])
    assert not found["k"][..., [0, 17, 299], :].any()
    assert not found["v"][..., [0, 17, 299], :].any()


def test_rows_that_see_nothing_have_gradient_0(backend):
    arrays = [a.astype(F4) for a in (drawn(2, 40, 16), drawn(2, 33, 16), drawn(2, 33, 16))]
    mask = np.ones((40, 33), bool)
    mask[[0, 5, 39]] = False
    flags = {"mask": mask, "sinks": np.array([0.3, -np.inf], F4), "bias": drawn(40, 33)}
    arrays[0][:, [5]] = np.nan
    _, _, found = backward(backend, arrays, flags)
    assert all(np.isfinite(a).all() for a in found.values())
    assert not found["q"][:, [0, 5, 39]].any()
    assert not found["bias"][[0, 5, 39]].any()
    nothing = backward(backend, arrays, {"mask": mask & False})[2]
    assert not any(a.any() for a in nothing.values())


@pytest.mark.parametrize("place", ["dout", "q"])
def test_a_row_without_gradient_spoils_only_what_it_sees(place, backend):
    q, k, v = drawn(1, 40, 16), drawn(1, 300, 16), drawn(1, 300, 8)
    flags = {"causal": True, "align": 10}
    out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend="numpy")
    dout = np.ones_like(out)
    clean = fastattn.attention_backward(dout, q, k, v, out, lse, **flags, backend=backend)
    {"dout": dout, "q": q}[place][0, 5, 3] = np.nan
    out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend="numpy")
    dq, dk, dv = fastattn.attention_backward(dout, q, k, v, out, lse, **flags, backend=backend)
    assert np.isnan(dq[0, 5]).all()
    np.testing.assert_array_equal(np.delete(dq, 5, axis=1), np.delete(clean[0], 5, axis=1))
    for a, expected in ((dk, clean[1]), (dv, clean[2])):
        assert np.isnan(a[0, :16]).all()
        np.testing.assert_array_equal(a[0, 16:], expected[0, 16:])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(sizes, backend):
    q, k = drawn(2, sizes[0], 8), drawn(2, sizes[1], 8)
    _, dlse, found = backward(backend, (q, k, k), {"sinks": drawn(2)})
    assert [found[n].shape for n in "qkv"] == [q.shape, k.shape, k.shape]
    assert not any(found[n].any() for n in "qkv")
    np.testing.assert_allclose(found["sinks"], dlse.sum(-1) if not sizes[1] else 0)


# --- packed batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", FLAGS)
def test_packed_members_equal_a_padded_batch(how, backend, rng):
    q, k, v, *edges = packed(rng, np.float64)
    flags, lengths = FLAGS[how], {"kv_len": np.array(LENGTHS_K)} | FLAGS[how]
    out, lse = fastattn.attention_varlen(q, k, v, *edges, **flags, return_lse=True)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    wanted = {f"return_d{name}": True for name in OTHERS if name in flags}
    found = fastattn.attention_varlen_backward(
        dout, q, k, v, out, lse, *edges, dlse=dlse, **flags, **wanted, backend=backend
    )
    padded = [padded_to(a, e) for a, e in zip((dout, q, k, v, out), _each(*edges), strict=True)]
    lses = [padded_to(a.T[..., None], edges[0])[..., 0] for a in (lse, dlse)]
    lengths["q_len"] = np.array(LENGTHS_Q)
    if wanted:  # padding is not part of any loss
        padded[0], lses = np.nan_to_num(padded[0]), [np.nan_to_num(a) for a in lses]
        padded[4] = np.nan_to_num(padded[4])
    dense = fastattn.attention_backward(
        *padded, lses[0], dlse=lses[1], **lengths, **wanted, backend=backend
    )
    for n, (a, b) in enumerate(zip(found, dense, strict=True)):
        if n > 2:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
            continue
        for start, length, member in zip(edges[n > 0], (LENGTHS_Q, LENGTHS_K)[n > 0], b):  # noqa: B905
            rows = a[start : start + length].swapaxes(0, 1)
            np.testing.assert_allclose(rows, member[:, :length], rtol=0, atol=1e-12)


def _each(edges_q, edges_k):
    return edges_q, edges_q, edges_k, edges_k, edges_q
