"""score_mod, mask_mod and block masks through attention(), with everything else at once."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import oracle
import pytest
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import DTYPES, FUZZ, cases

import fastattn
from fastattn import create_block_mask, mods
from fastattn.block_mask import PARTIAL, SKIPPED

F4 = np.float32


def ids_of(case, rng):
    """Return documents of each batch entry, for queries and for keys."""
    sizes = case.seqlen_q, case.seqlen_k
    return tuple(np.sort(rng.integers(0, 4, (case.batch, size)), axis=1) for size in sizes)


def slopes_of(case, rng):
    return (rng.random((case.batch, case.heads_q)),)


def t5_of(case, rng):
    weight = rng.standard_normal((32, case.heads_q))
    return mods.t5_table(weight, case.seqlen_q, case.seqlen_k)


def nothing(case, rng):
    return ()


def ratio(x, y, dtype):
    return x.astype(dtype) / y.astype(dtype)


def lower_half(b, h, i, j, aux):
    return (j + h) % 2 < aux[0][b]


def every_index(b, h, i, j, aux):
    return (i * 3 + j * (h + 1) + b) % 5 != 0


# name: (mask_mod, aux, what it means for arrays b, h, i, j that broadcast)
MASKS = {
    "causal": (mods.causal, nothing, lambda b, h, i, j, aux: i >= j),
    "window": (
        mods.sliding_window(9, 4),
        nothing,
        lambda b, h, i, j, aux: np.isin(j - i, range(-9, 5)),
    ),
    "dilated": (
        mods.dilated_window(3, 2, 4),
        nothing,
        lambda b, h, i, j, aux: np.isin(j - i, range(-12, 9, 4)),
    ),
    "prefix": (mods.prefix_lm(20), nothing, lambda b, h, i, j, aux: (j < 20) | (i >= j)),
    "prefix-batch": (
        mods.prefix_lm(),
        lambda case, rng: (rng.integers(0, case.seqlen_k, case.batch),),
        lambda b, h, i, j, aux: (j < aux[0][b]) | (i >= j),
    ),
    "document": (
        mods.document_mask(query=0, key=1),
        ids_of,
        lambda b, h, i, j, aux: np.equal(aux[0][b, i], aux[1][b, j]),
    ),
    "and": (
        mods.and_masks(mods.document_mask(query=0, key=1), mods.causal),
        ids_of,
        lambda b, h, i, j, aux: np.where(i >= j, aux[0][b, i] == aux[1][b, j], False),
    ),
    "or": (
        mods.or_masks(mods.document_mask(query=0, key=1), mods.causal),
        ids_of,
        lambda b, h, i, j, aux: np.where(i >= j, True, aux[0][b, i] == aux[1][b, j]),
    ),
    "everything": (mods.and_masks(), nothing, lambda b, h, i, j, aux: True),
    "no-key": (mods.or_masks(), nothing, lambda b, h, i, j, aux: False),
    "constant": (lambda b, h, i, j, aux: True, nothing, lambda b, h, i, j, aux: True),
    "heads": (
        lower_half,
        lambda case, rng: (np.arange(case.batch) % 3,),
        lambda b, h, i, j, aux: np.mod(j + h, 2) < aux[0][b],
    ),
    "every-index": (
        every_index,
        nothing,
        lambda b, h, i, j, aux: np.mod(3 * i + j + j * h + b, 5) > 0,
    ),
}
# name: (score_mod, aux, what it means for arrays)
SCORES = {
    "softcap": (mods.softcap(3.0), nothing, lambda s, b, h, i, j, aux: 3 * np.tanh(s / 3)),
    "alibi": (
        mods.alibi(),
        slopes_of,
        lambda s, b, h, i, j, aux: s - aux[0][b, h].astype(s.dtype) * np.abs(i - j),
    ),
    "alibi-heads": (
        mods.alibi(slot=1),
        lambda case, rng: (7, rng.random(case.heads_q)),
        lambda s, b, h, i, j, aux: s - aux[1][h].astype(s.dtype) * np.abs(i - j),
    ),
    "t5": (
        mods.t5_bias(),
        t5_of,
        lambda s, b, h, i, j, aux: s + aux[0][h, j - i + aux[1]].astype(s.dtype),
    ),
    "hides": (
        lambda s, b, h, i, j, aux: mods.where((i + j + h) % 3 == 0, -np.inf, s),
        nothing,
        lambda s, b, h, i, j, aux: np.where((i + j + h) % 3 == 0, -np.inf, s),
    ),
    "constant": (
        lambda s, b, h, i, j, aux: 1.0,
        nothing,
        lambda s, b, h, i, j, aux: np.ones_like(s),
    ),
    "same": (lambda s, b, h, i, j, aux: s, nothing, lambda s, b, h, i, j, aux: s),
    "every-index": (
        lambda s, b, h, i, j, aux: s * aux[0][b, j] + (h + 1.0) / (i + 1),
        lambda case, rng: (rng.standard_normal((case.batch, case.seqlen_k)),),
        lambda s, b, h, i, j, aux: s * aux[0][b, j].astype(s.dtype) + ratio(h + 1, i + 1, s.dtype),
    ),
}


def modified(case, score="", mask="", block=None, seed=0):
    """Return (keyword arguments, what the oracle takes in their place)."""
    rng = np.random.default_rng((seed, 2))
    grid = np.ogrid[tuple(slice(size) for size in case.shape("bhqk"))]
    ours, truth, aux = {}, {}, ()
    if mask:
        function, make_aux, dense = MASKS[mask]
        mask_aux = aux = make_aux(case, rng)
        truth["mask"] = np.broadcast_to(dense(*grid, mask_aux), case.shape("bhqk"))
        ours["mask_mod"] = function
    if block:
        sizes = case.shape("bhqk")
        function = ours.pop("mask_mod")
        ours["block_mask"] = create_block_mask(function, *sizes, aux=mask_aux, block=block)
        aux = ()
    if score:
        function, make_aux, change = SCORES[score]
        score_aux = make_aux(case, rng)
        # Both share aux: those of the mask come first, so a score_mod beside one is moved past it.
        ours["score_mod"] = moved(function, len(aux)) if aux else function
        aux = (*aux, *score_aux)
        truth["change"] = lambda s: change(s, *grid, score_aux)
    return ours | ({"aux": aux} if aux else {}), truth


def moved(function, first):
    return lambda s, b, h, i, j, aux: function(s, b, h, i, j, aux[first:])


def assert_agrees_with_the_oracle(backend, case, ours, truth, seed=0):
    (q, k, v), flags = case.arrays(seed), case.flags(seed)
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    _, lse = fastattn.attention(q, k, v, **flags, **ours, return_lse=True, out=out, backend=backend)
    if flags.pop("dropout_seed", None) is not None:
        flags["keep"] = fastattn.dropout_mask(
            case.shape("bhqk"), dropout_p=case.dropout_p, dropout_seed=seed + 3
        )
    if "mask" in truth:
        flags["mask"] = truth["mask"] & flags.get("mask", True)
    exact, formula = oracle.judge(q, k, v, **flags, change=truth.get("change"))
    oracle.assert_within_budget(out, exact[0], formula[0], floor=16)
    oracle.assert_within_budget(lse, exact[1], formula[1], floor=16)


SHAPES = [
    Case("grouped", 33, 70, batch=2, heads_q=4, heads_kv=2),
    Case("long", 270, 1100, 8, batch=2, heads_q=2, heads_kv=1),
    Case("decode", 1, 300, batch=3, heads_q=4, heads_kv=1, dtype="float64"),
    Case("half", 40, 33, batch=2, dtype="float16"),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_mask_mod(name, case, backend):
    assert_agrees_with_the_oracle(backend, case, *modified(case, mask=name))


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name, case, backend):
    assert_agrees_with_the_oracle(backend, case, *modified(case, score=name))


HEADS = {"batch": 3, "heads_q": 4, "heads_kv": 2}
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


@given(
    case=cases(DTYPES, features=True),
    score=st.sampled_from(["", *SCORES]),
    mask=st.sampled_from(["", *MASKS]),
    block=st.one_of(st.none(), st.tuples(st.integers(1, 80), st.integers(1, 300))),
    seed=st.integers(0, 99),
)
@settings(FUZZ, max_examples=100)
def test_any_call_agrees_with_the_oracle(backend, case, score, mask, block, seed):
    ours, truth = modified(case, score, mask, block if mask else None, seed)
    assert_agrees_with_the_oracle(backend, case, ours, truth, seed)


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


@pytest.mark.parametrize("sizes", [(0, 9), (5, 0)])
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


# --- what is hidden is not there ----------------------------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("how", ["mask_mod", "score_mod", "block_mask"])
def test_hidden_keys_may_hold_anything(how, bad, backend):
    (q, k, v), hidden = Case("hidden", 40, 300, heads_q=4, heads_kv=2).arrays(), [3, 70, 299]
    aux = (np.isin(np.arange(300), hidden, invert=True),)
    flags = {
        "mask_mod": {"mask_mod": lambda b, h, i, j, aux: aux[0][j], "aux": aux},
        "score_mod": {
            "score_mod": lambda s, b, h, i, j, aux: mods.where(aux[0][j], s, -np.inf),
            "aux": aux,
        },
        "block_mask": {
            "block_mask": create_block_mask(
                lambda b, h, i, j, aux: aux[0][j], None, None, 40, 300, aux=aux, block=(16, 4)
            )
        },
    }[how]
    clean = fastattn.attention(q, k, v, **flags, backend=backend)
    for a in (k, v):
        a[..., hidden, :] = bad
    np.testing.assert_array_equal(fastattn.attention(q, k, v, **flags, backend=backend), clean)


def test_nan_that_a_row_sees_stays_in_its_rows(backend):
    q, k, v = Case("seen", 40, 70).arrays()
    v[..., 20, :] = np.nan
    out = fastattn.attention(q, k, v, mask_mod=mods.causal, backend=backend)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), np.arange(40) >= [[[20]] * 2])
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), np.arange(40) >= [[[20]] * 2])


# --- block masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(64, 64), (16, 256), (300, 7)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_block_mask_equals_its_mask_mod(name, block, backend):
    case = Case("block", 270, 1100, 8, batch=2, heads_q=4, heads_kv=2)
    ours, truth = modified(case, mask=name, block=block)
    assert_agrees_with_the_oracle(backend, case, ours, truth)
    plain, _ = modified(case, mask=name)
    q, k, v = case.arrays()
    found = fastattn.attention(q, k, v, **ours, backend=backend)
    expected = fastattn.attention(q, k, v, **plain, backend=backend)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_block_mask_for_all_heads_and_batches(backend):
    case = Case("shared", 70, 130, batch=3, heads_q=4, heads_kv=2)
    q, k, v = case.arrays()
    expected = fastattn.attention(q, k, v, mask_mod=mods.causal, backend=backend)
    for sizes in [(None, None), (3, None), (1, 4), (3, 4)]:
        block_mask = create_block_mask(mods.causal, *sizes, 70, 130, block=(16, 16))
        found = fastattn.attention(q, k, v, block_mask=block_mask, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_skipped_blocks_are_not_computed(backend):
    """A block that is said to be skipped is, whatever its mask_mod would say, and is not read."""
    case = Case("skipped", 256, 512, 8, heads_q=2)
    q, k, v = case.arrays()
    mask = create_block_mask(mods.and_masks(), None, None, 256, 512, block=(64, 64))
    kinds = np.full(mask.kinds.shape, PARTIAL, np.uint8)
    kinds[..., [1, 2, 6]] = SKIPPED
    mask = dataclasses.replace(mask, kinds=kinds)
    k[..., 64:192, :] = v[..., 64:192, :] = np.nan
    k[..., 384:448, :] = v[..., 384:448, :] = np.nan
    score_aux = np.zeros(512)
    score_aux[64:192] = np.nan
    seen = np.repeat(kinds[0, 0, 0] != SKIPPED, 64)
    found = fastattn.attention(
        q,
        k,
        v,
        block_mask=mask,
        score_mod=lambda s, b, h, i, j, aux: s + aux[0][j],
        aux=(score_aux,),
        backend=backend,
    )
    exact, _ = oracle.attention(q, k, v, mask=seen)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6)


def test_full_blocks_do_not_run_the_mask_mod(monkeypatch):
    """On NumPy, where it can be counted: the pairs of partial blocks, and no others."""
    import fastattn.modified as numpy_backend

    pairs = []
    evaluate = numpy_backend.evaluate

    def counted(modifier, dtype, aux, b, h, i, j, score):
        pairs.append((i.size, j.size))
        return evaluate(modifier, dtype, aux, b, h, i, j, score)

    monkeypatch.setattr(numpy_backend, "evaluate", counted)
    q, k, v = Case("count", 512, 2048, 8, heads_q=1).arrays()
    block_mask = create_block_mask(mods.prefix_lm(1024), None, None, 512, 2048, block=(256, 1024))
    fastattn.attention(q, k, v, block_mask=block_mask, backend="numpy")
    assert pairs == []  # all full or skipped
    block_mask = create_block_mask(mods.causal, None, None, 512, 2048, block=(256, 256))
    fastattn.attention(q, k, v, block_mask=block_mask, backend="numpy")
    assert pairs == [(256, 256), (256, 512)]


# --- inspecting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, (16, 32)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("weights", 33, 70, **HEADS, causal=True),
        Case("weights", 33, 70, **HEADS, lengths="q_len kv_len kv_start", bias="hqk"),
        Case("weights", 33, 70, **HEADS, lengths="one kv_len kv_start", softcap=3.0),
    ],
    ids=str,
)
def test_weights_and_key_sums(case, block):
    q, k, _ = case.arrays()
    ours, truth = modified(case, "every-index", "every-index", block)
    unit = np.broadcast_to(np.eye(case.seqlen_k), (*k.shape[:-1], case.seqlen_k))
    exact, _ = oracle.attention(q, k, unit, **case.flags(), **truth)
    for rows in (slice(None), [30, 2, -1]):
        found = fastattn.attention_weights(q, k, rows=rows, **case.flags(), **ours)
        np.testing.assert_allclose(found, exact[..., rows, :], rtol=0, atol=2e-6)
        sums = fastattn.attention_key_sums(q, k, rows=rows, **case.flags(), **ours)
        np.testing.assert_allclose(sums, exact[..., rows, :].sum(axis=-2), rtol=0, atol=1e-5)


def test_explain_takes_modifiers():
    q = np.ones((1, 2, 5, 8), F4)
    plan = fastattn.explain(q, q, q, mask_mod=mods.causal, backend="numpy")
    assert plan.problem.variant.mask_mod is not None
    assert hash(plan) == hash(fastattn.explain(q, q, q, mask_mod=mods.causal, backend="numpy"))


def test_a_function_is_looked_at_once():
    calls = []

    def scaled(s, b, h, i, j, aux):
        calls.append(aux)
        return s * aux[0]

    q = np.ones((1, 2, 5, 8), F4)
    for aux in [(2,), (3,), (np.int64(5),)]:
        fastattn.explain(q, q, q, score_mod=scaled, aux=aux)
    assert len(calls) == 1
    fastattn.explain(q, q, q, score_mod=scaled, aux=(2.0,))
    assert len(calls) == 2


class Slope:
    """A modifier that has no hash."""

    __hash__ = None

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, s, b, h, i, j, aux):
        return s - self.slope * mods.abs(i - j)

    def method(self, s, b, h, i, j, aux):
        return self(s, b, h, i, j, aux)


def test_any_callable_is_a_function(backend, rng):
    q, k = (rng.standard_normal((1, 2, n, 8)) for n in (5, 9))
    expected = fastattn.attention(q, k, k, alibi=np.full(2, 0.5), align="top_left", backend=backend)
    for function in (Slope(0.5), Slope(0.5).method):
        found = fastattn.attention(q, k, k, score_mod=function, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


# --- others -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", ["document", "every-index", "prefix-batch"])
@pytest.mark.parametrize("score", ["alibi", "every-index", "softcap"])
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


# --- errors -------------------------------------------------------------------------------------


def block_mask_of(*sizes, mask_mod=mods.causal):
    return create_block_mask(mask_mod, *sizes)


SHARED = np.zeros(2 * 4 * 7 * 6, F4)
SCORES_SHAPE = "block_mask must have shape (2, 4, 7, 5)"
RULES = [
    ({"mask_mod": 3}, TypeError, "mask_mod must be a function of (b, h, i, j, aux), got int"),
    (
        {"mask_mod": lambda b, h, i, j: True},
        TypeError,
        "mask_mod must be a function of (b, h, i, j, aux), got <lambda>(b, h, i, j)",
    ),
    (
        {"score_mod": mods.causal},
        TypeError,
        "score_mod must be a function of (score, b, h, i, j, aux), got causal(",
    ),
    ({"score_mod": lambda s, b, h, i, j, aux: np.sin(s)}, TypeError, "functions of fastattn.mods:"),
    ({"mask_mod": lambda b, h, i, j, aux: j}, TypeError, "mask_mod must return bool"),
    ({"mask_mod": lambda b, h, i, j, aux: aux[0][j]}, ValueError, "(aux has length 0)"),
    (
        {"mask_mod": mods.causal, "aux": np.ones(3)},
        TypeError,
        "aux must be a tuple of arrays and numbers, got ndarray",
    ),
    (
        {"score_mod": mods.softcap(1.0), "aux": ("text",)},
        TypeError,
        "aux[0] must be an array or a number, got str",
    ),
    (
        {"score_mod": mods.softcap(1.0), "aux": (np.ones(3, complex),)},
        TypeError,
        "aux[0] must be bool, an integer of at most 64 bits (signed) or a float",
    ),
    (
        {"block_mask": mods.causal},
        TypeError,
        "block_mask must be what create_block_mask() returns, got function",
    ),
    (
        {"block_mask": block_mask_of(None, None, 7, 5), "mask_mod": mods.causal},
        ValueError,
        "mask_mod must be None with block_mask, which has its own, got both",
    ),
    (
        {"block_mask": block_mask_of(None, None, 5, 7)},
        ValueError,
        f"{SCORES_SHAPE}, or 1 for batch or heads, got (1, 1, 5, 7)",
    ),
    (
        {"block_mask": block_mask_of(2, 2, 7, 5)},
        ValueError,
        f"{SCORES_SHAPE}, or 1 for batch or heads, got (2, 2, 7, 5)",
    ),
    (
        {"block_mask": block_mask_of(1, 4, 7, 5, mask_mod=lambda b, h, i, j, aux: j > b)},
        ValueError,
        f"{SCORES_SHAPE}, as its mask_mod uses b, got (1, 4, 7, 5)",
    ),
    (
        {"block_mask": block_mask_of(2, 1, 7, 5, mask_mod=lambda b, h, i, j, aux: j > h)},
        ValueError,
        f"{SCORES_SHAPE}, as its mask_mod uses h, got (2, 1, 7, 5)",
    ),
    (
        {
            "mask_mod": mods.causal,
            "aux": (1, SHARED[5:]),
            "out": SHARED.reshape(2, 4, 7, 6),
        },
        ValueError,
        "out must not overlap aux[1], got arrays that share memory",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), RULES)
def test_rules(change, error, message):
    out = np.full((2, 4, 7, 6), 9, F4)
    arguments = {"q": np.ones((2, 4, 7, 8), F4), "k": np.ones((2, 2, 5, 8), F4), "out": out}
    arguments |= {"v": np.ones((2, 2, 5, 6), F4)} | change
    with pytest.raises(error) as caught:
        fastattn.attention(**arguments)
    assert message in str(caught.value)
    assert (out == 9).all()
    with pytest.raises(error):
        fastattn.explain(**arguments)


def test_packed_block_mask_has_the_sizes_of_the_longest():
    q, k = np.ones((7, 4, 8), F4), np.ones((5, 2, 8), F4)
    block_mask = block_mask_of(None, None, 7, 5)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 4, 5\), or 1 for .*, got \(1, 1, 7, 5\)"):
        fastattn.attention_varlen(q, k, k, [0, 3, 7], [0, 5, 5], block_mask=block_mask)


def test_out_may_not_overlap_the_aux_of_a_block_mask():
    aux = np.zeros((1, 1, 7, 8), F4)
    block_mask = create_block_mask(
        lambda b, h, i, j, aux: aux[0][b, h, i, j] < 1, 1, 1, 7, 5, aux=(aux,)
    )
    q, k = np.ones((1, 1, 7, 8), F4), np.ones((1, 1, 5, 8), F4)
    with pytest.raises(ValueError, match=r"out must not overlap aux\[0\]"):
        fastattn.attention(q, k, k, block_mask=block_mask, out=aux)
