"""precision="tf32": who takes it, what it changes, and calls with it on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cuda_emulated import assert_call, forward, inputs, need_numba_cuda
from emulated_gpu import DEVICE, emulated_gpu

import fastattn
from fastattn.check import check
from fastattn.cuda.tensor import tilings
from fastattn.cuda.tensor.tilings import Tiling
from fastattn.verifying.case import Case
from fastattn.verifying.trial import Trial, error_ratio, inputs_of, results

need_numba_cuda()
SMALL = Tiling("float32", 64, 64, warps=2, block_m=32, block_n=32)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def plan(device=DEVICE, head_dim=64, backend="cuda", dtype="float32", **flags):
    """What explain() prints."""
    q = np.ones((2, 300, head_dim), dtype)
    with emulated_gpu(device):
        return str(fastattn.explain(q, q, q, backend=backend, **({"precision": "tf32"} | flags)))


def test_explain_says_whether_and_why():
    scalar = "simt: scalar arithmetic:"
    assert "forward: tensor cores multiply float32 rounded to tf32, sums are float32\n" in plan()
    why = "tensor cores multiply 16-bit types, not float32 unless precision='tf32'"
    assert f"{scalar} {why}\n" in plan(precision=None)
    assert f"{scalar} head_dim is above 256\n" in plan(head_dim=257)
    rows = "rows of more than 128 float32 are not whole chunks of 16 aligned bytes"
    assert f"{scalar} {rows}\n" in plan(head_dim=129)
    older = replace(DEVICE, capability=(7, 5))
    assert f"{scalar} no tensor cores for both 16-bit types and tf32 below" in plan(older)
    newer = replace(DEVICE, capability=(9, 0), shared_bytes=227 << 10)
    assert "; no wgmma: that kernel multiplies 16-bit types\n" in plan(newer)
    gradients = plan(gradients=True)
    assert "gradients: scalar arithmetic: gradients of float32 are not rounded to" in gradients
    for backend in ("cpu", "numpy"):
        note = "note        products are of float32: only cuda's tensor cores multiply tf32"
        assert note in plan(backend=backend)
    assert "tf32" not in plan(dtype="float16")


def test_elsewhere_it_changes_no_bit(backend):
    q, k, v = normal(3, 2, 20, 16)
    results = [
        fastattn.attention(q, k, v, precision=p, backend=backend) for p in (None, "tf32", None)
    ]
    assert len({r.tobytes() for r in results}) == 1


def test_factors_are_rounded_and_sums_are_not():
    """To the last bits of float32, lse is that of the rounded factors."""
    assert_call(SMALL, *inputs(SMALL, 1, 2, 1, 70, 90), causal=True)
    assert_call(SMALL, *inputs(SMALL, 1, 1, 1, 40, 50), scale=-0.3, window=(20, 9))


def test_what_is_hidden_and_rounds_to_infinity():
    """A hidden key has no part, also if its value is finite until it is rounded."""
    q, k, v = inputs(SMALL, 1, 1, 1, 40, 50)
    found = []
    for value in (np.finfo(np.float32).max, 0):
        v[0, 0, 45, 3], v[0, 0, 46, 4] = value, -value
        problem, operands = check(q, k, v, causal=True, align="top_left")
        forward(SMALL, problem, operands)
        found.append(operands.out)
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


# One kind of call each; sizes are no multiples of a block.
SIZES = Case("", 40, 90, 64, heads_q=2, heads_kv=1, batch=2, precision="tf32")
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "more queries": {"seqlen_q": 90, "seqlen_k": 40, "causal": True},
    "window": {"window": (20, 7), "align": "top_left"},
    "chunk and softcap": {"chunk": 24, "softcap": 1.5},
    "negative scale": {"scale": -0.2},
    "large scores": {"spread": 20.0},
    "masks": {"mask": "b1qk", "bias": "1hqk"},
    "alibi and sinks": {"alibi": "bh", "causal": True, "sinks": True},
    "lengths": {"lengths": "q_len kv_len kv_start align", "causal": True, "sinks": True},
    "dropout": {"dropout_p": 0.3},
    "score_mod": {"modifiers": "table"},
    "block mask": {"modifiers": "gaps", "block": (16, 32)},
    "one query": {"seqlen_q": 1, "seqlen_k": 600, "heads_q": 8},
    "one query of lengths": {"seqlen_q": 1, "seqlen_k": 300, "lengths": "kv_len kv_start"},
    "odd head_dim": {"head_dim": 33},
    "wide values": {"head_dim_v": 72},
    "head_dim 256": {"head_dim": 256, "heads_q": 1, "batch": 1},
}
TRIALS = {name: Trial(replace(SIZES, **flags)) for name, flags in CASES.items()}
TRIALS |= {
    "nan in k": Trial(replace(SIZES, causal=True), poison="k"),
    "nan in v": Trial(replace(SIZES, causal=True), poison="v"),
    "packed": Trial(replace(SIZES, causal=True), kind="varlen"),
    "pages": Trial(replace(SIZES, causal=True), page_size=15),
    "merge": Trial(SIZES, kind="merge"),
    "strides": Trial(SIZES, layouts=("heads last", "strided", "transposed")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIALS)
def test_calls(name):
    """By the measure of `python -m fastattn verify`."""
    x = inputs_of(TRIALS[name])
    with emulated_gpu():
        found = results(TRIALS[name], x, "cuda")
    assert error_ratio(TRIALS[name], x, found, True) <= 1


def test_the_budget_of_exact_products_is_exceeded(monkeypatch):
    """Or else nobody would know whether factors are rounded."""
    monkeypatch.setattr(tilings, "_shapes", lambda *_: [(2, 32, 32)])
    trial = Trial(replace(SIZES, heads_q=1, batch=1))
    x = inputs_of(trial)
    with emulated_gpu():
        found = results(trial, x, "cuda")
    assert error_ratio(trial, x, found, True) <= 1
    assert error_ratio(trial, x, found) > 5


def test_rounding_is_to_the_nearest():
    ulp = 2.0**-10
    given = np.array([1 + ulp / 2, -1 - ulp / 2, 1 + 0.499 * ulp, 3.0, np.inf, np.nan], np.float32)
    expected = [1 + ulp, -1 - ulp, 1.0, 3.0, np.inf, np.nan]
    np.testing.assert_array_equal(oracle.rounded_to_tf32(given), expected)
