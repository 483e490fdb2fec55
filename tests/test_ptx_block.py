"""The emulator itself: it must fail kernels that are wrong, in every way that matters."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cuda_emulated import code, forward, inputs, need_numba_cuda
from ptx_launch import launch
from ptx_memory import SHARED_WINDOW, GlobalMemory
from ptx_text import EmulationError

from fastattn.check import check
from fastattn.cuda.tensor.tilings import Tiling

# Small kernels by hand, on 64 threads; %rd1 is the address of 64 uint32.
HEAD = ".visible .entry kernel(.param .u64 kernel_param_0)\n.maxntid 64, 1, 1\n{"
START = f"""{HEAD}
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    add.s32 %r3, %r2, {SHARED_WINDOW};
"""
END = "\n    ret;\n}"


def run(body):
    """The 64 numbers that a kernel leaves."""
    memory, numbers = GlobalMemory(), np.arange(64, dtype=np.uint32)
    address = memory.put(numbers)
    launch(START + body + END, memory, [address], 1, 1024)
    return memory.get(address, numbers)


PASSED_ON = "st.shared.b32 [%r3+0], %r1; {} xor.b32 %r4, %r3, {}; ld.shared.b32 %r5, [%r4+0];"
KEPT = "st.global.b32 [%rd3+0], %r5;"


def test_a_correct_kernel_is_run():
    body = PASSED_ON.format("bar.sync 0;", 4 * 33) + KEPT
    np.testing.assert_array_equal(run(body), np.arange(64) ^ 33)


def test_threads_that_part_meet_again():
    body = """
    setp.lt.u32 %p1, %r1, 40;
    mov.u32 %r6, 0;
    @%p1 bra LOOP;
    bra JOIN;
    LOOP: add.s32 %r6, %r6, 2;
    setp.lt.u32 %p2, %r6, %r1;
    @%p2 bra LOOP;
    JOIN: bar.sync 0;
    st.global.b32 [%rd3+0], %r6;"""
    expected = [2 * max(1, -(-i // 2)) if i < 40 else 0 for i in range(64)]
    np.testing.assert_array_equal(run(body), expected)


WRONG = {
    "race between warps": (PASSED_ON.format("bar.warp.sync -1;", 4 * 33), "race: read"),
    "race within a warp": (PASSED_ON.format("", 4), "race: read"),
    "write after read": (
        PASSED_ON.format("bar.sync 0;", 4) + "st.shared.b32 [%r3+0], %r5;",
        "race: write over what another thread may still read",
    ),
    "two writers": (
        "and.b32 %r4, %r3, 1024; st.shared.b32 [%r3+0], %r1; st.shared.b32 [%r4+0], %r1;",
        "race: write over what another thread has written",
    ),
    "never written": ("ld.shared.b32 %r5, [%r3+0];", "not written"),
    "still on its way": (
        "shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, 1024; and.b64 %rd3, %rd1, -16; "
        "cp.async.cg.shared.global [%r3+0], [%rd3+0], 16; cp.async.commit_group; "
        "ld.shared.b32 %r5, [%r3+0];",
        "still on its way",
    ),
    "beyond shared memory": ("ld.shared.b32 %r5, [%r3+1020];", "out of bounds"),
    "beyond an array": ("st.global.b32 [%rd3+4], %r1;", "outside every array"),
    "not aligned": ("ld.global.b32 %r5, [%rd3+2];", "not aligned"),
    "a part of a warp": (
        "setp.lt.u32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;",
        "not all lanes",
    ),
    "no end": ("L: bra L;", "endless"),
    "a register without a value": ("add.s32 %r5, %r77, 1;", "nothing has written"),
    "unknown": ("brev.b32 %r5, %r1;", "not known"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails(name, monkeypatch):
    monkeypatch.setattr("ptx_block.MAX_STEPS", 1000)
    body, message = WRONG[name]
    with pytest.raises(EmulationError, match=message):
        run(body)


SMALL = Tiling("float16", 64, 64, warps=2, block_m=32, block_n=32)
# What is done to the forward kernel's text: (pattern, replacement, which of the places).
MUTATIONS = {
    "barrier dropped": (r"bar\.sync 0;", ";", (0, 1)),
    "wait dropped": (r"cp\.async\.wait_group 1;", ";", (1, 2)),
    "wait for one fewer": (r"cp\.async\.wait_group 1;", "cp.async.wait_group 2;", (1, 2)),
    "commit dropped": (r"cp\.async\.commit_group;", ";", (0, 1, 2)),
    "warp barrier dropped": (r"bar\.warp\.sync -1;", ";", (0,)),
    "copy to another place": (
        r"(cp\.async\.cg\.shared\.global \[%r\d+)\+0\]",
        r"\g<1>+16]",
        (0, 1, 2),
    ),
    "copy from another place": (
        r"(cp\.async\.cg\S+ \[%r\d+\+\d+\], \[%rd\d+)\+0\]",
        r"\g<1>+16]",
        (0, 1, 2),
    ),
    "matrix from another place": (
        r"(ldmatrix\S+ \{[^}]*\}, \[%r\d+)\+(\d+)\]",
        r"\g<1>+1\g<2>]",
        (3, 9),
    ),
    "matrix not transposed": (r"x4\.trans", "x4", (0, 3)),
    "matrix transposed": (r"x4\.shared", "x4.trans.shared", (0, 3)),
    "a registers exchanged": (
        r"(mma\S*\s+\{[^}]*\},\{)(%r\d+),(%r\d+),",
        r"\g<1>\g<3>,\g<2>,",
        (0, 5, 20),
    ),
    "b registers exchanged": (
        r"(mma\S*\s+\{[^}]*\},\{[^}]*\},\{)(%r\d+),(%r\d+)",
        r"\g<1>\g<3>,\g<2>",
        (0, 5, 20),
    ),
    "c registers exchanged": (r"(mma\S*\s+)\{(%f\d+),(%f\d+),", r"\g<1>{\g<3>,\g<2>,", (0, 5, 20)),
    "swizzle of another chunk": (r"(xor\.b32\s+%r\d+, %r\d+, )32;", r"\g<1>64;", (0, 1)),
    "maximum of other lanes": (r"(shfl\S+ %f\d+, %f\d+, )2,", r"\g<1>1,", (0, 1)),
    "one key more": (r"setp\.gt\.s32(\s+%p\d+, %r\d+, \d+;)", r"setp.ge.s32\1", (2, 9)),
    "halves exchanged": (
        r"(cvt\.rn\.f16x2\.f32 %r\d+, )(%f\d+), (%f\d+)",
        r"\g<1>\g<3>, \g<2>",
        (3, 9),
    ),
}


FLOATS = Tiling("float32", 64, 64, warps=2, block_m=32, block_n=32)
ROUNDED = r"cvt\.rna\.tf32\.f32(\s+)(%r\d+), (%f\d+);"
# The same of the kernel of float32: roundings are of q, k, p, v; loads 24 to 39 of values.
MUTATIONS_OF_FLOAT32 = {
    "not rounded": (ROUNDED, r"mov.b32\1\2, \3;", (0, 40, 100, 130)),
    "a registers of rows exchanged": (*MUTATIONS["a registers exchanged"][:2], (0, 20, 40)),
    "a registers of columns exchanged": (
        r"(mma\S*\s+\{[^}]*\},\{%r\d+,)(%r\d+),(%r\d+),",
        r"\g<1>\g<3>,\g<2>,",
        (0, 20, 40),
    ),
    "b registers exchanged": (*MUTATIONS["b registers exchanged"][:2], (0, 20, 40)),
    "c registers exchanged": (*MUTATIONS["c registers exchanged"][:2], (0, 20, 40)),
    "matrix transposed": (*MUTATIONS["matrix transposed"][:2], (0, 3)),
    "matrix from another place": (*MUTATIONS["matrix from another place"][:2], (3, 9)),
    "values of another chunk": (
        r"(ld\.shared\.v4\.b32 \{[^}]*\}, \[%r\d+)\+(\d+)\]",
        r"\g<1>+1\g<2>]",
        (26, 35),
    ),
    "values of another column": (
        r"(ld\.shared\.v4\.b32 )\{(%r\d+),(%r\d+)",
        r"\g<1>{\g<3>,\g<2>",
        (26, 35),
    ),
    "columns of out exchanged": (
        r"(st\.shared\.v4\.b32 \[[^]]*\], )\{(%r\d+),(%r\d+)",
        r"\g<1>{\g<3>,\g<2>",
        (-1, -6),
    ),
    "barrier dropped": (*MUTATIONS["barrier dropped"][:2], (0, 1)),
    "wait dropped": (*MUTATIONS["wait dropped"][:2], (0, 1, 2)),
}


def mutated(text, pattern, replacement, number):
    place = list(re.finditer(pattern, text))[number]
    return text[: place.start()] + place.expand(replacement) + text[place.end() :]


def result_of(tiling, ptx):
    """out and lse of a causal call with two blocks of queries and four of keys."""
    q, k, v = inputs(tiling, 1, 1, 1, 60, 100)
    problem, operands = check(q, k, v, return_lse=True, causal=True)
    operands.out[...], operands.lse[...] = np.nan, np.nan
    forward(tiling, problem, operands, ptx=ptx)
    return operands.out, operands.lse


# The others take their turn with the slow tests.
QUICK = (
    "barrier dropped",
    "wait dropped",
    "copy to another place",
    "matrix not transposed",
    "b registers exchanged",
    "swizzle of another chunk",
    "maximum of other lanes",
    "one key more",
)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MUTATIONS]
)
def test_a_mutated_kernel_is_noticed(name):
    assert_noticed(SMALL, *MUTATIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS_OF_FLOAT32)
def test_a_mutated_kernel_of_float32_is_noticed(name):
    assert_noticed(FLOATS, *MUTATIONS_OF_FLOAT32[name])


def assert_noticed(tiling, pattern, replacement, numbers):
    need_numba_cuda()
    text = code(tiling)
    right = result_of(tiling, text)
    for number in numbers:
        try:
            wrong = result_of(tiling, mutated(text, pattern, replacement, number))
        except EmulationError:
            continue
        same = all(np.array_equal(x, y) for x, y in zip(right, wrong, strict=True))
        assert not same, f"nobody notices: {pattern}, {number}"
