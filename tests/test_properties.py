"""What must hold for any arguments: the oracle's answer, the same for the same question."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import oracle
import pytest
from cases import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastattn
from fastattn.verifying.case import LAYOUTS, laid_out

# The backend fixture is the same for every example, so sharing it is safe.
FUZZ = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SIZES = st.one_of(st.integers(1, 9), st.integers(10, 70), st.sampled_from([127, 129, 257, 300]))
HEAD_DIMS = st.one_of(st.integers(1, 20), st.sampled_from([24, 31, 32, 33, 64, 65, 80, 130]))
AXES = ["", "", "k", "q1", "qk", "h1k", "hqk", "b11k", "bhqk"]


LENGTHS = ["q_len", "kv_len", "kv_start", "align"]
DTYPES = ["float16", "bfloat16", "float32", "float32", "float64"]


@st.composite
def cases(draw, dtypes=("float32", "float64"), features=False):
    """Draw every parameter of a call at once; `features` are those beside mask, bias and window."""
    heads_kv = draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(SIZES), draw(SIZES)
    radius = st.one_of(st.none(), st.integers(0, 2 * seqlen_k))
    aligns = st.sampled_from(["bottom_right", "top_left"])
    case = Case(
        "fuzz",
        seqlen_q,
        seqlen_k,
        draw(HEAD_DIMS),
        draw(HEAD_DIMS),
        batch=draw(st.integers(1, 2)),
        heads_q=heads_kv * draw(st.integers(1, 4)),
        heads_kv=heads_kv,
        dtype=draw(st.sampled_from(dtypes)),
        scale=draw(st.one_of(st.none(), st.sampled_from([0.0, -0.25, 1.0]))),
        causal=draw(st.booleans()),
        align=draw(st.one_of(aligns, st.integers(-seqlen_q - 3, seqlen_k + 3))),
        window=(draw(radius), draw(radius)),
        mask=draw(st.sampled_from(AXES)),
        bias=draw(st.sampled_from(AXES)),
    )
    return draw(with_features(case)) if features else case


@st.composite
def with_features(draw, case):
    lengths = [name for name in ["one", *LENGTHS] if draw(st.booleans())]
    chunks = st.one_of(st.just(0), st.integers(1, 2 * case.seqlen_k))
    return replace(
        case,
        chunk=draw(chunks),
        softcap=draw(st.sampled_from([None, 0.0, 0.5, 3.0, 40.0])),
        alibi=draw(st.sampled_from(["", "h", "bh"])),
        sinks=draw(st.booleans()),
        lengths=" ".join(lengths) if lengths != ["one"] else "",
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        bias_dtype=draw(st.sampled_from(["", *DTYPES])),
    )


def assert_agrees_with_the_oracle(backend, case, layouts, seed):
    arrays, flags = case.arrays(seed), case.flags(seed)
    q, k, v = map(laid_out, arrays, layouts)
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, arrays[0].dtype)
    _, lse = fastattn.attention(q, k, v, **flags, return_lse=True, out=out, backend=backend)
    if flags.pop("dropout_seed", None) is not None:
        flags["keep"] = fastattn.dropout_mask(
            case.shape("bhqk"), dropout_p=case.dropout_p, dropout_seed=seed + 3
        )
    exact, formula = oracle.judge(*arrays, **flags)
    oracle.assert_within_budget(out, exact[0], formula[0], floor=case.floor())
    oracle.assert_within_budget(lse, exact[1], formula[1], floor=case.floor())


ANY_CALL = {
    "case": cases(DTYPES, features=True),
    "layouts": st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    "seed": st.integers(0, 99),
}


@given(**ANY_CALL)
@settings(FUZZ, max_examples=100)
def test_any_call_agrees_with_the_oracle(backend, case, layouts, seed):
    assert_agrees_with_the_oracle(backend, case, layouts, seed)


@pytest.mark.slow
@given(**ANY_CALL)
@settings(FUZZ, max_examples=2000, derandomize=False)
def test_many_calls_agree_with_the_oracle(backend, case, layouts, seed):
    assert_agrees_with_the_oracle(backend, case, layouts, seed)


def attend(backend, *arrays, **flags):
    return fastattn.attention(*arrays, **flags, return_lse=True, backend=backend)


def tolerance(case):
    return (48 + case.floor()) * oracle.EPS[case.dtype]


def merged(parts):
    """Merge (out, lse) of disjoint sets of keys."""
    outs, lses = (np.stack(x).astype(np.float64) for x in zip(*parts, strict=True))
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp.reduce(lses)
        weights = np.where(lse == -np.inf, 0, np.exp(lses - lse))
    return (outs * weights[..., None]).sum(axis=0), lse


@given(case=cases(), cuts=st.lists(st.floats(0, 1), max_size=3))
@FUZZ
def test_keys_in_parts_merge_by_lse(backend, case, cuts):
    q, k, v = case.arrays()
    mask = np.random.default_rng(2).random(case.shape("b1qk")) < 0.7
    out, lse = attend(backend, q, k, v, mask=mask, scale=case.scale)
    edges = sorted({0, case.seqlen_k, *(int(cut * case.seqlen_k) for cut in cuts)})
    parts = [
        attend(backend, q, k[..., a:b, :], v[..., a:b, :], mask=mask[..., a:b], scale=case.scale)
        for a, b in pairwise(edges)
    ]
    both = merged(parts)
    np.testing.assert_allclose(both[0], out, rtol=0, atol=tolerance(case))
    np.testing.assert_allclose(both[1], lse, rtol=1e-5, atol=tolerance(case))


@given(case=cases(), shift=st.floats(-50, 50, width=16))
@FUZZ
def test_shifting_the_scores_shifts_lse_alone(backend, case, shift):
    flags = case.flags() | {"bias": np.zeros(case.shape("qk"), case.dtype)}
    out, lse = attend(backend, *case.arrays(), **flags)
    flags["bias"] = flags["bias"] + np.float32(shift)
    moved, moved_lse = attend(backend, *case.arrays(), **flags)
    atol = tolerance(case) * (1 + abs(shift))
    np.testing.assert_allclose(moved, out, rtol=0, atol=atol)
    np.testing.assert_allclose(moved_lse, lse + shift, rtol=0, atol=atol)


@given(case=cases(), seed=st.integers(0, 99))
@FUZZ
def test_order_of_keys_does_not_matter(backend, case, seed):
    q, k, v = case.arrays()
    order = np.random.default_rng(seed).permutation(case.seqlen_k)
    mask = np.random.default_rng(seed).random(case.shape("qk")) < 0.8
    out, lse = attend(backend, q, k, v, mask=mask, scale=case.scale)
    again, again_lse = attend(
        backend, q, k[..., order, :], v[..., order, :], mask=mask[:, order], scale=case.scale
    )
    np.testing.assert_allclose(again, out, rtol=0, atol=tolerance(case))
    np.testing.assert_allclose(again_lse, lse, rtol=0, atol=tolerance(case))
