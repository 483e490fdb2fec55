"""score_mod and mask_mod through attention(), with everything else at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import oracle
import pytest
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from modifier_cases import F4, HEADS, MASKS, SCORES, assert_agrees_with_the_oracle, modified
from test_properties import DTYPES, FUZZ, cases

import fastattn
from fastattn import create_block_mask, mods

# Each modifier, each dtype and each kind of aux is a kernel of its own, so on cpu this file takes
# minutes to compile: test_compiled_modifiers.py is the quick one.
CPU_IS_SLOW = True
SHAPES = [
    Case("grouped", 33, 70, batch=2, heads_q=4, heads_kv=2),
    Case("long", 270, 1100, 8, batch=2, heads_q=2, heads_kv=1),
]
OTHER_DTYPES = [
    Case("decode", 1, 300, batch=3, heads_q=4, heads_kv=1, dtype="float64"),
    Case("half", 40, 33, batch=2, dtype="float16"),
    Case("half", 40, 300, batch=2, dtype="bfloat16"),
]


def shapes_of(names):
    """Yield (name, case): what depends on the dtype is the same for all modifiers."""
    for n, name in enumerate(names):
        for case in (*SHAPES, *OTHER_DTYPES[n : n + 1]):
            yield pytest.param(name, case, id=f"{name}-{case}")


@pytest.mark.parametrize(("name", "case"), [*shapes_of(MASKS)])
def test_mask_mod(name, case, backend):
    assert_agrees_with_the_oracle(backend, case, *modified(case, mask=name))


@pytest.mark.parametrize(("name", "case"), [*shapes_of(SCORES)])
def test_score_mod(name, case, backend):
    assert_agrees_with_the_oracle(backend, case, *modified(case, score=name))


LENGTHS = ["kv_start", "kv_len", "one kv_start kv_len", "q_len kv_len kv_start align"]
COMBINED = [
    Case("causal", 70, 70, **HEADS, causal=True),
    Case("causal", 33, 300, **HEADS, causal=True, align=-5),
    Case("window", 70, 130, **HEADS, window=(20, 9)),
    Case("chunk", 70, 130, **HEADS, chunk=17),
    Case("bias", 33, 70, **HEADS, bias="hqk", mask="b11k"),
    Case("softcap", 33, 70, **HEADS, softcap=2.0, spread=3.0, scale=-0.5),
    Case("alibi", 33, 70, **HEADS, alibi="bh", sinks=True),
    Case("dropout", 33, 70, **HEADS, dropout_p=0.3),
    *(Case("lengths", 33, 300, **HEADS, lengths=lengths) for lengths in LENGTHS),
    *(Case("lengths", 33, 70, **HEADS, lengths=lengths, bias="bhqk") for lengths in LENGTHS),
    Case("all", 270, 300, **HEADS, lengths=LENGTHS[-1], softcap=5.0, alibi="h", window=(90, 9)),
]


@pytest.mark.parametrize("block", [None, (16, 32), (7, 13), (512, 1)], ids=str)
@pytest.mark.parametrize(
    ("score", "mask"),
    [("every-index", "every-index"), ("hides", "document"), ("alibi", "prefix-batch")],
)
@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_with_everything_else(case, score, mask, block, backend):
    assert_agrees_with_the_oracle(backend, case, *modified(case, score, mask, block))


# (score_mod, mask_mod, dtype), each one or two kernels; NumPy gets every combination.
COMPILED = [
    ("", "window", "float32"),
    ("alibi", "", "bfloat16"),
    ("every-index", "every-index", "float32"),
    ("hides", "document", "float64"),
    ("t5", "prefix-batch", "float16"),
    ("softcap", "heads", "float32"),
]
ANY = st.tuples(*map(st.sampled_from, (["", *SCORES], ["", *MASKS], DTYPES)))
BLOCKS = st.one_of(st.none(), st.tuples(st.integers(1, 80), st.integers(1, 300)))


def draw_and_compare(backend, data):
    score, mask, dtype = data.draw(ANY if backend == "numpy" else st.sampled_from(COMPILED))
    case, seed = data.draw(cases([dtype], features=True)), data.draw(st.integers(0, 99))
    block = data.draw(BLOCKS) if mask else None
    assert_agrees_with_the_oracle(backend, case, *modified(case, score, mask, block, seed), seed)


@given(data=st.data())
@settings(FUZZ, max_examples=100)
def test_any_call_agrees_with_the_oracle(backend, data):
    draw_and_compare(backend, data)


@pytest.mark.slow
@given(data=st.data())
@settings(FUZZ, max_examples=2000, derandomize=False)
def test_many_calls_agree_with_the_oracle(backend, data):
    draw_and_compare(backend, data)


@pytest.mark.parametrize("block", [None, (16, 32)], ids=str)
@pytest.mark.parametrize(
    "case",
    [COMBINED[-1], Case("decode", 1, 5000, **HEADS), Case("long", 700, 300, **HEADS)],
    ids=str,
)
def test_number_of_threads_does_not_matter(case, block, backend):
    (q, k, v), flags = case.arrays(), case.flags()
    ours, _ = modified(case, "every-index", "every-index", block)
    results = []
    for threads in (1, 2, 5):
        with fastattn.num_threads(threads):
            found = fastattn.attention(q, k, v, **flags, **ours, return_lse=True, backend=backend)
        results.append(found)
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_leading_axes_are_counted_in_c_order(backend, rng):
    q, k = (rng.standard_normal((2, 3, 4, n, 8)) for n in (5, 9))
    mask = rng.random((6, 4, 5, 9)) < 0.5
    found = fastattn.attention(
        q, k, k, mask_mod=lambda b, h, i, j, aux: aux[0][b, h, i, j], aux=(mask,), backend=backend
    )
    exact, _ = oracle.attention(q, k, k, mask=mask.reshape(2, 3, 4, 5, 9))
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-14)


def test_one_head_without_axes(backend, rng):
    q, k = (rng.standard_normal((n, 8)) for n in (5, 9))
    found = fastattn.attention(q, k, k, mask_mod=mods.causal, backend=backend)
    expected = fastattn.attention(q, k, k, causal=True, align="top_left", backend=backend)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sizes", [(0, 9), (300, 0)])
def test_no_rows_and_no_keys(sizes, backend):
    q, k = (np.ones((1, 2, n, 8), F4) for n in sizes)
    empty = np.ones((0, 0))
    out, lse = fastattn.attention(
        q,
        k,
        k,
        score_mod=lambda s, b, h, i, j, aux: s + aux[0][i, j],
        block_mask=create_block_mask(mods.causal, None, None, *sizes),
        aux=(empty,),
        return_lse=True,
        backend=backend,
    )
    assert not out.any()
    assert np.isneginf(lse).all()


# --- packed batches -----------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [33, 1, 130, 7, 0], [70, 0, 300, 1, 5]
PACKED = Case("packed", 130, 300, 24, batch=5, heads_q=4, heads_kv=2)
PACKED_FLAGS = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"kv_len": np.array([40, 0, 300, 0, 1]), "kv_start": np.array([3, 0, 200, 0, 1])},
}


@pytest.mark.parametrize("block", [None, (16, 32), (64, 64)], ids=str)
@pytest.mark.parametrize("mask", ["every-index", "document", "heads"])
@pytest.mark.parametrize("how", PACKED_FLAGS)
def test_packed_members_count_from_their_own_first(how, mask, block, backend):
    q, k, v = (a.astype(F4) for a in PACKED.arrays())
    ours, _ = modified(PACKED, "every-index", mask, block)
    flags = {"kv_len": np.array(LENGTHS_K)} | PACKED_FLAGS[how]
    dense, dense_lse = fastattn.attention(
        q, k, v, q_len=LENGTHS_Q, **flags, **ours, return_lse=True, backend=backend
    )
    packed = [
        np.concatenate([m[:, :n].swapaxes(0, 1) for m, n in zip(a, lengths, strict=True)])
        for a, lengths in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))
    ]
    edges = np.cumsum([0, *LENGTHS_Q]), np.cumsum([0, *LENGTHS_K])
    out, lse = fastattn.attention_varlen(
        *packed, *edges, **PACKED_FLAGS[how], **ours, return_lse=True, backend=backend
    )
    for b, (start, stop) in enumerate(pairwise(edges[0])):
        found = out[start:stop].swapaxes(0, 1), lse[:, start:stop]
        expected = dense[b, :, : stop - start], dense_lse[b, :, : stop - start]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-6)


# --- others -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("score", "mask"),
    [("alibi", "document"), ("every-index", "prefix-batch"), ("softcap", "every-index")],
)
def test_agrees_with_flex_attention(score, mask, backend):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    case = Case("flex", 70, 130, **HEADS, dtype="float64")
    (q, k, v), (ours, truth) = case.arrays(), modified(case, score, mask)
    visible = torch.from_numpy(truth["mask"].copy())
    rng = np.random.default_rng((0, 2))
    mask_aux = MASKS[mask][1](case, rng)
    tensors = tuple(map(torch.as_tensor, SCORES[score][1](case, rng)))
    formula = {
        "alibi": lambda s, b, h, i, j: s - tensors[0][b, h] * (i - j).abs(),
        "every-index": lambda s, b, h, i, j: s * tensors[0][b, j] + (h + 1.0) / (i + 1),
        "softcap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    }[score]
    assert len(ours.get("aux", ())) == len(mask_aux) + len(tensors)
    theirs = flex.flex_attention(
        *map(torch.from_numpy, (q, k, v)),
        score_mod=formula,
        block_mask=flex.create_block_mask(
            lambda b, h, i, j: visible[b, h, i, j], *case.shape("bhqk"), device="cpu"
        ),
        enable_gqa=True,
    )
    found = fastattn.attention(q, k, v, **ours, backend=backend)
    np.testing.assert_allclose(found, theirs.numpy(), rtol=0, atol=1e-13)
