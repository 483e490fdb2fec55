"""Every backend on every case against the oracle, by error budget; torch as a second opinion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import CASES, Case

import fastattn
from fastattn import reference
from fastattn.check import check


def poisoned(q, v, shape=None):
    """Return an output full of NaN: what a backend fails to write shows."""
    return np.full(shape or (*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)


def judged(case, seed=0):
    """Return what oracle.judge() does; it is told what dropout keeps."""
    flags = case.flags(seed)
    if flags.pop("dropout_seed", None) is not None:
        flags["keep"] = kept(case, seed)
    return oracle.judge(*case.arrays(seed), **flags)


def kept(case, seed=0):
    return fastattn.dropout_mask(
        case.shape("bhqk"), dropout_p=case.dropout_p, dropout_seed=seed + 3
    )


def assert_fits(case, out, lse, floor=2.0):
    """Hold a result against the definition and against the formula in the dtype of the case."""
    exact, formula = judged(case)
    oracle.assert_within_budget(out, exact[0], formula[0], floor)
    oracle.assert_within_budget(lse, exact[1], formula[1], floor)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_the_formulas(case, backend):
    q, k, v = case.arrays()
    out = poisoned(q, v)
    result, lse = fastattn.attention(
        q, k, v, **case.flags(), return_lse=True, out=out, backend=backend
    )
    assert result is out
    assert out.dtype == q.dtype
    assert lse.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    assert_fits(case, out, lse)


# Blocks run one by one: thousands of them would take seconds. Rows past q_len are not a backend's.
IN_BLOCKS = [
    (case, block_m, block_n)
    for block_m, block_n in [(1, 1), (16, 32), (7, 5), (1000, 3)]
    for case in CASES[::5]
    if case.seqlen_q // block_m * (case.seqlen_k // block_n) <= 5000 and "q_len" not in case.lengths
]


@pytest.mark.parametrize(("case", "block_m", "block_n"), IN_BLOCKS, ids=str)
def test_reference_in_any_blocks(case, block_m, block_n):
    q, k, v = case.arrays()
    out = poisoned(q, v)
    problem, operands = check(q, k, v, **case.flags(), return_lse=True, out=out)
    plan = fastattn.explain(q, k, v, **case.flags(), backend="numpy")
    reference.run(replace(plan, block_m=block_m, block_n=block_n), problem, operands)
    # One key at a time is a chain of seqlen_k roundings, which pairwise sums are not.
    assert_fits(case, out, operands.lse, floor=32)


def test_result_alone_and_with_lse_are_the_same(backend):
    case = Case("lse", 70, 90, 32, heads_q=4, heads_kv=2, causal=True)
    alone = fastattn.attention(*case.arrays(), causal=True, backend=backend)
    out, lse = fastattn.attention(*case.arrays(), causal=True, return_lse=True, backend=backend)
    np.testing.assert_array_equal(alone, out)
    assert lse.shape == out.shape[:-1]


@pytest.mark.parametrize(
    ("q", "k", "v", "result"),
    [
        ((7, 8), (5, 8), (5, 6), (7, 6)),
        ((3, 7, 8), (3, 5, 8), (3, 5, 6), (3, 7, 6)),
        ((4, 7, 8), (5, 8), (5, 6), (4, 7, 6)),
        ((2, 4, 7, 8), (4, 5, 8), (2, 5, 6), (2, 4, 7, 6)),
        ((2, 4, 7, 8), (2, 5, 8), (2, 5, 6), (2, 4, 7, 6)),
        ((7, 8), (3, 1, 5, 8), (1, 5, 6), (3, 1, 7, 6)),
        ((2, 1, 4, 7, 8), (3, 2, 5, 8), (1, 2, 5, 6), (2, 3, 4, 7, 6)),
        ((2, 3, 2, 4, 7, 8), (2, 1, 2, 2, 5, 8), (2, 5, 6), (2, 3, 2, 4, 7, 6)),
    ],
    ids=str,
)
def test_ranks_and_leading_dimensions(q, k, v, result, backend, rng):
    if q == (2, 4, 7, 8) and v[0] != k[-3]:
        v = (k[-3], *v[1:])
    q, k, v = (rng.standard_normal(shape) for shape in (q, k, v))
    mask = rng.random((*result[:-1], k.shape[-2])) < 0.7
    for flags in ({}, {"causal": True}, {"mask": mask}, {"bias": np.where(mask, 0.5, -np.inf)}):
        out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
        exact, exact_lse = oracle.attention(q, k, v, **flags)
        assert out.shape == result
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=1e-14)


# --- PyTorch ------------------------------------------------------------------------------------


def torch_sdpa(*arrays, attn_mask=None, **flags):
    torch = pytest.importorskip("torch")
    if attn_mask is not None:
        attn_mask = torch.from_numpy(attn_mask)
    tensors = (torch.from_numpy(np.ascontiguousarray(a)) for a in arrays)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(*tensors, attn_mask=attn_mask, **flags).numpy()


def assert_agrees_with_torch(*arrays, **flags):
    ours = fastattn.scaled_dot_product_attention(*arrays, **flags)
    theirs = torch_sdpa(*arrays, **flags)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 8), (2, 5), (5, 2), (33, 65), (64, 64)])
def test_torch_causal_and_scale(seqlen_q, seqlen_k, dtype):
    arrays = Case("torch", seqlen_q, seqlen_k, 16, 24, dtype=dtype).arrays()
    assert_agrees_with_torch(*arrays, is_causal=True)
    assert_agrees_with_torch(*arrays, is_causal=True, scale=0.0)
    assert_agrees_with_torch(*arrays, scale=-0.3)


@pytest.mark.parametrize("axes", ["qk", "q1", "1k", "11", "hqk", "b11k", "bhqk", "1h1k"])
def test_torch_masks(axes):
    case = Case("torch", 9, 33, batch=2, heads_q=3, mask=axes, bias=axes)
    flags = case.flags()
    assert_agrees_with_torch(*case.arrays(), attn_mask=flags["mask"])
    assert_agrees_with_torch(*case.arrays(), attn_mask=flags["bias"])


@pytest.mark.parametrize(
    ("q", "k", "v", "flags"),
    [
        ((2, 1, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
        ((2, 4, 3, 8), (2, 1, 5, 8), (2, 4, 5, 8), {}),
        ((2, 4, 3, 8), (2, 4, 5, 8), (2, 1, 5, 8), {}),
        ((2, 4, 3, 8), (2, 1, 5, 8), (2, 1, 5, 8), {}),
        ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), {"enable_gqa": True}),
        ((4, 3, 8), (2, 5, 8), (2, 5, 8), {"enable_gqa": True}),
        ((3, 8), (4, 5, 8), (4, 5, 8), {}),
        ((4, 3, 8), (5, 8), (5, 8), {}),
        ((4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), {}),
        ((3, 8), (5, 8), (5, 7), {"is_causal": True}),
        ((2, 3, 4, 6, 8), (1, 3, 4, 5, 8), (2, 1, 4, 5, 8), {}),
    ],
    ids=str,
)
def test_torch_shapes(q, k, v, flags, rng):
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in (q, k, v)]
    assert_agrees_with_torch(*arrays, **flags)


def test_torch_float32_mask_with_float64():
    case = Case("torch", 9, 33, dtype="float64", bias="qk", bias_dtype="float32")
    ours = fastattn.scaled_dot_product_attention(*case.arrays(), case.flags()["bias"])
    exact, _ = oracle.attention(*case.arrays(), bias=case.flags()["bias"])
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-14)


def positions(case, flags):
    names = ("causal", "align", "window", "chunk", "q_len", "kv_len", "kv_start")
    return oracle.positions(case.seqlen_q, case.seqlen_k, *map(flags.get, names))


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_torch_in_float64(case, backend):
    """PyTorch's math, told by one float mask what each row sees and what is added."""
    torch = pytest.importorskip("torch")
    case = replace(case, dtype="float64", bias_dtype="", softcap=None, sinks=False, dropout_p=0.0)
    (q, k, v), flags = case.arrays(), case.flags()
    p, j, visible = positions(case, flags)
    added = np.asarray(flags.get("bias", 0.0))
    if "alibi" in flags:
        added = added - flags["alibi"].astype(float)[..., None, None] * np.abs(p - j)
    added = np.where(visible & flags.get("mask", True), added, -np.inf)
    added = np.broadcast_to(added, case.shape("bhqk"))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, (q, k, v)),
        attn_mask=torch.from_numpy(added.copy()),
        scale=case.scale,
        enable_gqa=True,
    )
    ours = fastattn.attention(q, k, v, **flags, backend=backend)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-12 * max(1, case.spread))


FLEX = [
    Case("flex", 33, 70, 16, 24, batch=2, heads_q=4, heads_kv=2, causal=True),
    Case("flex", 70, 33, causal=True),
    Case("flex", 33, 70, window=(9, 4), softcap=2.0),
    Case("flex", 33, 70, heads_q=4, alibi="h", align="top_left", causal=True),
    Case("flex", 40, 130, chunk=16, align=-7, softcap=5.0, alibi="h"),
    Case("flex", 40, 130, batch=3, heads_q=4, lengths="kv_len align", window=(30, 2), alibi="bh"),
    Case("flex", 40, 130, batch=2, mask="b1qk", bias="hqk", scale=-0.3),
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", FLEX, ids=str)
def test_torch_flex_attention_in_float64(case, backend):
    """The same words as functions of (b, h, i, j); out and lse, empty rows included."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    case = replace(case, dtype="float64")
    (q, k, v), flags = case.arrays(), case.flags()
    p, j, visible = positions(case, flags)
    bias = np.asarray(flags.get("bias", 0.0))
    visible = visible & flags.get("mask", True) & (bias != -np.inf)
    slopes = np.asarray(flags.get("alibi", 0.0), float)[..., None, None]
    added = np.where(np.isinf(bias), 0, bias) - slopes * np.abs(p - j)
    added, visible = (
        torch.from_numpy(np.broadcast_to(a, case.shape("bhqk")).copy()) for a in (added, visible)
    )

    def score_mod(score, b, h, i, j):
        if case.softcap:
            score = case.softcap * torch.tanh(score / case.softcap)
        return score + added[b, h, i, j]

    theirs, aux = flex.flex_attention(
        *map(torch.from_numpy, (q, k, v)),
        score_mod=score_mod,
        block_mask=flex.create_block_mask(
            lambda b, h, i, j: visible[b, h, i, j], *case.shape("bhqk"), device="cpu"
        ),
        scale=case.scale,
        enable_gqa=True,
        return_aux=flex.AuxRequest(lse=True),
    )
    ours, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, aux.lse.numpy(), rtol=1e-13, atol=1e-13)
