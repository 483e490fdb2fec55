"""The specialised forward kernel for compute capability 9.0 on the emulated device."""

from __future__ import annotations

import re

import numpy as np
import oracle
import pytest
from cuda_emulated import (
    assert_call,
    assert_rounded_once,
    code,
    forward,
    inputs,
    need_numba_cuda,
)
from emulated_gpu import emulated_gpu
from ptx_text import EmulationError

import fastattn
from fastattn.check import check, check_packed
from fastattn.cuda import driver, maps
from fastattn.cuda.tensor.tilings import SPECIALISED, Tiling

need_numba_cuda()


def specialised(storage, head_dim, warps, block_m, block_n, head_dim_v=0, **flags):
    head_dim_v = head_dim_v or head_dim
    return Tiling(storage, head_dim, head_dim_v, warps, block_m, block_n, specialised=True, **flags)


SMALL = specialised("float16", 64, 8, 128, 64)
# (queries, keys, flags): one block and several, whole ones and remainders, rows that see nothing
CALLS = {
    "dense": (150, 200, {}),
    "causal": (150, 210, {"causal": True}),
    "causal, rows without keys": (200, 40, {"causal": True}),
    "window": (150, 210, {"window": (40, 10)}),
    "window left of the keys": (40, 100, {"window": (3, None), "align": 200}),
    "sinks, rows without keys": (
        70,
        30,
        {"sinks": np.array([0.3, -np.inf], np.float32), "causal": True},
    ),
}
QUICK = ()


def slow_but(quick, names):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_but(QUICK, CALLS))
def test_out_and_lse(name):
    seqlen_q, seqlen_k, flags = CALLS[name]
    assert_call(SMALL, *inputs(SMALL, 1, 2, 1, seqlen_q, seqlen_k), **flags)


H200 = driver.Device(0, "H200", (9, 0), 132, 227 << 10, 1 << 16, 50 << 20)


def test_a_call(monkeypatch):
    """attention() chooses the kernel, and makes maps of what it has copied."""
    monkeypatch.setattr("fastattn.cuda.tensor.tilings.SPECIALISED", {64: (8, 128, 64)})
    q, k, v = inputs(SMALL, 1, 1, 1, 150, 260)
    v = np.broadcast_to(v, (2, 1, 260, 64))
    with emulated_gpu(H200), maps.wgmma(True):
        plan = fastattn.explain(q, k, v, causal=True, backend="cuda")
        found = fastattn.attention(q, k, v, causal=True, backend="cuda", return_lse=True)
    assert plan.choice.mapped == SMALL
    exact, formula = oracle.judge(q, k, v, causal=True)
    oracle.assert_within_budget(found[1], exact[1], formula[1], floor=8)
    assert_rounded_once(found[0], exact[0], formula[0], q, k, v, {"causal": True})


def test_the_reason_for_another_kernel():
    q, k, v = inputs(SMALL, 1, 2, 1, 150, 260)
    calls = {
        "no wgmma, which no GPU has tried yet: FASTATTN_WGMMA=1 allows it": (q, k, v, {}, False),
        "no wgmma: no tensor map has such axes or strides": (q[None], k, v, {}, True),
        "no wgmma: scale is not above 0": (q, k, v, {"scale": -1.0}, True),
        "no wgmma below 65 queries and 256 keys": (q[:, :, :64], k, v, {}, True),
        "no wgmma: masks, biases and other options change scores": (q, k, v, {"chunk": 9}, True),
        "no wgmma: rows are not whole chunks of 16 bytes": (q[..., :3], k[..., :3], v, {}, True),
    }
    with emulated_gpu(H200):
        for reason, (*arrays, flags, wanted) in calls.items():
            with maps.wgmma(wanted):
                text = str(fastattn.explain(*arrays, backend="cuda", **flags))
            assert f"sums are float32; {reason}\n" in text
        with emulated_gpu():
            assert "wgmma" not in str(fastattn.explain(q, k, v, backend="cuda"))


@pytest.mark.slow
def test_lengths_of_each_batch_entry():
    lengths = {
        "q_len": np.array([70, 30, 0]),
        "kv_len": np.array([80, 60, 50]),
        "kv_start": np.array([3, 10, 50]),
    }
    assert_call(SMALL, *inputs(SMALL, 3, 2, 2, 70, 90), **lengths, causal=True)


@pytest.mark.slow
def test_packed_sequences():
    """Boxes reach into the rows of others, which may be anything."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, 64)).astype(np.float16) for n in (150, 190, 190))
    edges_q, edges_k = [0, 20, 150], [0, 100, 190]
    v[:100], k[:100] = np.nan, np.inf
    problem, operands = check_packed(q, k, v, edges_q, edges_k, causal=True, return_lse=True)
    forward(SMALL, problem, operands)
    member = (x[edge:].swapaxes(0, 1) for x, edge in ((q, 20), (k, 100), (v, 100)))
    exact, formula = oracle.judge(*member, causal=True)
    found = operands.lse[..., 20:].reshape(exact[1].shape)
    oracle.assert_within_budget(found, exact[1], formula[1], floor=8)


@pytest.mark.slow
def test_what_is_hidden_may_be_anything():
    """NaN and infinities in k and v: rows that see them, and no others, have them."""
    q, k, v = inputs(SMALL, 1, 1, 1, 140, 150)
    k[0, 0, 140], k[0, 0, 145, 3] = np.nan, np.inf
    for key, column, value in ((12, 5, np.nan), (70, 6, np.inf), (133, 6, -np.inf)):
        v[0, 0, key, column] = value
    v[0, 0, 148] = np.nan
    assert_call(SMALL, q, k, v, causal=True)
    # past the last key
    assert_call(SMALL, q[:, :, :20], k, v, kv_len=np.array([12]))


@pytest.mark.slow
def test_arrays_that_repeat_themselves():
    q, k, v = inputs(SMALL, 2, 2, 2, 70, 90)
    k, v = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:, :1], v.shape)
    assert_call(SMALL, q, k, v)


SHAPES = [
    *(specialised("bfloat16", width, *shape) for width, shape in SPECIALISED.items()),
    specialised("float16", 192, *SPECIALISED[192], head_dim_v=128),
    specialised("float16", 64, *SPECIALISED[128], head_dim_v=128),
    specialised("float16", 128, *SPECIALISED[128], padded=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    narrower = 24 if shape.padded else 0
    sizes = {"head_dim": shape.head_dim - narrower, "head_dim_v": shape.head_dim_v - narrower}
    assert_call(shape, *inputs(shape, 1, 2, 1, 220, 300, **sizes), causal=True)


# Waits for: buffers that are free again, of keys for the third block, of values from it on (later
# keys' follow from these: their products are waited for first); q; the first keys; values that are
# looked at; the next keys; values; the last ones.
COPIES = (4, 5, 7, *range(9, 16))
# What is done to the kernel's text: (pattern, replacement, which of the places).
MUTATIONS = {
    "q of other columns": (r"(add\.s64 a, %rd\d+, )2;", r"\g<1>4;", (0, 1)),
    "values of other rows": (r"(add\.s64 b, %rd\d+, )128;", r"\g<1>256;", (0, 1)),
    "keys of another stride": (r"4611686293305360384", "4611686293305360896", (0, 1)),
    "another layout": (r"4611686293305360384", "9223372311732748288", (0, 1)),
    "values not transposed": (r"(p|more), 1, 1, 1;", r"more, 1, 1, 0;", (0, 5)),
    "keys transposed": (r"more, 1, 1, 0, 0;", "more, 1, 1, 0, 1;", (0, 5)),
    "a registers exchanged": (
        r"(wgmma\S* \{[^}]*\}, \{)(%r\d+),(%r\d+),",
        r"\g<1>\g<3>,\g<2>,",
        (0, 5),
    ),
    "results exchanged": (r"(wgmma\S* )\{(%f\d+),(%f\d+),", r"\g<1>{\g<3>,\g<2>,", (0, 5)),
    "sum not continued": (r"setp\.ne\.b32 more, 1, 0;", "setp.ne.b32 more, 0, 0;", (0, 2)),
    "products not waited for": (r"wgmma\.wait_group\.sync\.aligned \d;", ";", (0, 1, 2)),
    "products waited for too late": (
        r"wgmma\.wait_group\.sync\.aligned 1;",
        "wgmma.wait_group.sync.aligned 2;",
        (0,),
    ),
    "products not committed": (r"wgmma\.commit_group\.sync\.aligned;", "", (0, 1, 2)),
    "registers without a fence": (r"wgmma\.fence\.sync\.aligned;", "", (1, 3)),
    "copies not waited for": (r"@over bra DONE; bra AGAIN;", "", COPIES),
    "buffers not given back": (r"@first mbarrier\.arrive\S+ state, \[%r\d+\];", "", (0, 1)),
    "fewer arrivals": (
        r"(mbarrier\.arrive\.expect_tx\S+ state, \[%r\d+\], )8192",
        r"\g<1>4096",
        (1,),
    ),
    "rows for heads": (
        r"(cp\.async\.bulk\S+ \[%r\d+\], \[%rd\d+, \{%r\d+, )(%r\d+), (%r\d+)",
        r"\g<1>\g<3>, \g<2>",
        (1, 2),
    ),
    "keys for values": (
        r"(mov\.b64 %rd\d+, kernel_param_)(\d+)",
        lambda m: m[1] + str(int(m[2]) ^ 1),
        (0, 1),
    ),
    "barriers not shown to copies": (r"fence\.mbarrier_init\S+;", ";", (0,)),
    "more registers than there are": (r"(setmaxnreg\.inc\S+ )240", r"\g<1>248", (0,)),
    "out where q is still read": (r"bar\.sync 1, 256;", ";", (-2,)),
}


def mutated(text, pattern, replacement, number):
    place = list(re.finditer(pattern, text))[number]
    new = replacement(place) if callable(replacement) else place.expand(replacement)
    return text[: place.start()] + new + text[place.end() :]


def result_of(ptx):
    """out and lse of two calls of two warpgroups, one block of queries: of four blocks of keys, and
    of five, of which the last is hidden from some rows. (NVVM copies four in a turn of its loop.)
    """
    found = []
    for seqlen_k, window in ((250, (None, None)), (330, (120, None))):
        q, k, v = inputs(SMALL, 1, 1, 1, 100, seqlen_k)
        problem, operands = check(q, k, v, return_lse=True, causal=True, window=window)
        operands.out[...], operands.lse[...] = np.nan, np.nan
        forward(SMALL, problem, operands, ptx)
        found += operands.out, operands.lse
    return found


NOTICED = ("products not waited for", "keys of another stride")


@pytest.mark.parametrize("name", slow_but(NOTICED, MUTATIONS))
def test_a_mutated_kernel_is_noticed(name):
    pattern, replacement, numbers = MUTATIONS[name]
    text = code(SMALL)
    right = result_of(text)
    for number in numbers:
        try:
            found = result_of(mutated(text, pattern, replacement, number))
        except EmulationError:
            continue
        same = all(np.array_equal(x, y) for x, y in zip(right, found, strict=True))
        assert not same, f"nobody notices: {name}, {number}"


@pytest.mark.slow
def test_values_made_0_are_shown_to_products():
    q, k, v = inputs(SMALL, 1, 1, 1, 100, 250)
    v[0, 0, 200] = np.nan
    problem, operands = check(q, k, v, causal=True)
    text = mutated(code(SMALL), r"fence\.proxy\.async\S+;", ";", 1)
    with pytest.raises(EmulationError, match="without a fence"):
        forward(SMALL, problem, operands, text)
