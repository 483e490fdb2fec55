"""The machine code of the inner loops, for processors that need not be here."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fastattn.cpu import compile, image
from fastattn.cpu.job import LINE
from fastattn.machine import AVX512, NEON
from fastattn.problem import Variant

pytest.importorskip("numba")
OLD_LLVM = pytest.importorskip("llvmlite.binding").llvm_version_info < (20,)

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
TARGETS = {
    "x86-64-v3": compile.Target(X86, "x86-64-v3", ""),
    "x86-64-v4": compile.Target(X86, "x86-64-v4", ""),
    "neoverse-v1": compile.Target(ARM, "neoverse-v1", ""),
    "aarch64": compile.Target(ARM, compile.named_target("aarch64").cpu, ""),
}
on_each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
floats = pytest.mark.parametrize("dtype", ["float32", "float64"])
# Forward kernels are 38 to 85 kB: much more would mean that something was unrolled by mistake.
CODE_LIMIT = 100_000
# Stack accesses that the softmax loop of four registers has on AVX2. What LLVM 20 reads from where
# constants lie, LLVM 15 (Numba 0.61) keeps there.
SPILLS = {"float32": 20, "float64": 37} if OLD_LLVM else {"float32": 12, "float64": 18}


JUMP = r"(?:j\w+|b\.\w+|b|cbn?z\s+\w+,|tbn?z\s.*,)\s*(\.L\w+)$"


def loops(assembly):
    """The bodies of all innermost loops: lines from a label to a jump back to it."""
    labels, found, body, last = {}, [], [], 0
    for line in (line.strip() for line in assembly.splitlines()):
        if label := re.fullmatch(r"(\.L\w+):.*", line):
            labels[label[1]] = len(body)
        elif line and not line.startswith((".", "#", "//")):
            body.append(line)
            jump = re.match(JUMP, line)
            start = labels.get(jump[1]) if jump else None
            # No loop if another one lies within, or if it only jumps back to the function's end.
            if start is not None and start >= last and not count(r"ret", body[start:]):
                found.append(body[start:])
                last = len(body)
    return found


def fused(target, dtype):
    """What a fused multiply-add on whole registers looks like."""
    letter = {"float32": "s", "float64": "d"}[dtype]
    if target.unit == NEON:
        return rf"fmla\s+v\d+\.{16 // np.dtype(dtype).itemsize}{letter},"
    register = "zmm" if target.unit == AVX512 else "ymm"
    return rf"vfmadd\d+p{letter}\s.*%{register}\d+"


def count(pattern, lines):
    return sum(re.match(pattern, line) is not None for line in lines)


def on_stack(lines):
    """The lines that use the stack: in a loop these are registers that did not fit."""
    return [line for line in lines if re.search(r"\(%[er]sp|\[sp\b", line)]


def wrapped(body):
    """A kernel of the one C signature around body(job as a pointer to int64)."""
    from fastattn.cpu.memory import address, pointer_to

    integers = pointer_to("int64")

    def kernel(job, scratch, quota):
        body(integers(address(job)))
        return 0

    return kernel


def product_loop(target, dtype, transposed=False):
    """Assembly lines of the register tile's loop."""
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.microkernel import product, tile_shape
    from fastattn.cpu.registers import ITEMSIZE, jit

    real, (mr, nv) = pointer_to(dtype), tile_shape(target.unit)
    tile = product(dtype, target.unit.lanes(ITEMSIZE[dtype]), mr, nv, transposed, besides=True)

    @jit
    def body(job):
        a, b, c, line = real(job[0]), real(job[2]), real(job[4]), real(job[8])
        tile(a, job[1], b, job[3], c, job[5], job[6], job[7], line, job[9])

    assembly = compile.assembly(wrapped(body), target)
    # LLVM 15 may jump back to where a tile begins, too.
    (loop,) = (loop for loop in loops(assembly) if count(fused(target, dtype), loop))
    return loop


@on_each_target
@floats
@pytest.mark.parametrize("transposed", [False, True])
def test_tile_is_fused_multiply_adds_without_spills(target, dtype, transposed):
    from fastattn.cpu.microkernel import tile_shape

    mr, nv = tile_shape(target.unit)
    loop = product_loop(target, dtype, transposed)
    assert count(fused(target, dtype), loop) == mr * nv
    assert not on_stack(loop)
    # Beyond them: nv loads, a broadcast and perhaps a pointer a row, a line asked for besides, and
    # the loop's end.
    assert len(loop) <= mr * nv + nv + 2 * mr + 8


@on_each_target
def test_a_tile_too_large_spills(target, monkeypatch):
    from fastattn.cpu import microkernel

    mr, nv = microkernel.tile_shape(target.unit)
    monkeypatch.setitem(microkernel.TILE, target.unit.registers, (mr + 3, nv))
    assert on_stack(product_loop(target, "float32"))


@floats
@pytest.mark.parametrize("shape", [0, 1])
def test_two_rows_share_a_register_without_permutations_or_spills(dtype, shape):
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.microkernel import HALF_TILES, product
    from fastattn.cpu.registers import ITEMSIZE, jit

    target, real, (mr, nv) = TARGETS["x86-64-v4"], pointer_to(dtype), HALF_TILES[shape]
    lanes = target.unit.lanes(ITEMSIZE[dtype])
    tile = product(dtype, lanes, mr, nv, besides=True, half=True)

    @jit
    def body(job):
        a, b, c = real(job[0]), real(job[2]), real(job[4])
        more = real(job[8]), job[9], real(job[10]), job[11]
        tile(a, job[1], b, job[3], c, job[5], job[6], job[7], *more)

    assembly = compile.assembly(wrapped(body), target)
    (loop,) = (loop for loop in loops(assembly) if count(fused(target, dtype), loop))
    assert count(fused(target, dtype), loop) == mr * nv + mr // 2
    assert count(r"v(blendm|mova)p.*\{%k\d\}", loop) == mr // 2
    assert not count(r"v(perm|insert|shuf)", loop)
    assert not on_stack(loop)
    assert len(loop) <= mr * nv + nv + 3 * mr + 9


X86_TARGETS = {name: target for name, target in TARGETS.items() if target.triple == X86}
on_x86 = pytest.mark.parametrize("target", X86_TARGETS.values(), ids=X86_TARGETS)


@on_x86
@floats
@pytest.mark.parametrize("rows", [1, 4])
def test_keys_of_few_rows_are_asked_for_line_by_line_amid_the_products(target, dtype, rows):
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.products import STREAM, stream_scores
    from fastattn.cpu.registers import ITEMSIZE, jit

    real, lanes = pointer_to(dtype), target.unit.lanes(ITEMSIZE[dtype])
    run = stream_scores(dtype, lanes, dtype, rows)

    @jit
    def body(job):
        q, k, s = real(job[0]), real(job[1]), real(job[2])
        run(q, job[3], job[4], k, job[5], s, job[6])

    assembly = compile.assembly(wrapped(body), target)
    (loop,) = (loop for loop in loops(assembly) if count(fused(target, dtype), loop))
    assert not count(CALL, loop)
    assert not [line for line in on_stack(loop) if re.search(r"%[xyz]mm", line)]
    columns = max(1, STREAM // (lanes * rows)) * lanes  # of all squares that are computed at once
    assert count(fused(target, dtype), loop) == columns * rows
    shuffles = {("float32", 16): 4, ("float64", 4): 2}.get((dtype, lanes), 3)  # a column
    assert count(r"v(insert|shuf|unpck|perm)", loop) == shuffles * columns
    asks = [place for place, line in enumerate(loop) if count("prefetcht0", [line])]
    assert len(asks) == columns * lanes * ITEMSIZE[dtype] // LINE
    assert asks[-1] - asks[0] > 3 * len(asks)  # not in a run


@on_x86
@floats
@pytest.mark.parametrize("rows", [1, 2])
def test_values_of_few_rows_are_asked_for_amid_the_products(target, dtype, rows):
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.registers import ITEMSIZE, jit
    from fastattn.cpu.stream import FEW_TILES, stream_outputs

    real, size = pointer_to(dtype), ITEMSIZE[dtype]
    run = stream_outputs(dtype, target.unit, rows)

    @jit
    def body(job):
        p, v, acc, sums = real(job[0]), real(job[1]), real(job[2]), real(job[3])
        run(p, job[4], job[5], v, job[6], acc, job[7], sums)

    hot = {}
    for loop in loops(compile.assembly(wrapped(body), target)):
        if products := count(fused(target, dtype), loop):
            assert not on_stack(loop)
            assert not count(CALL, loop)
            hot[products] = count("prefetcht0", loop)
    lines = {
        nv: -(-nv * target.unit.lanes(size) * size // LINE)
        for nv in (*FEW_TILES[target.unit.registers][rows - 1], 1)
    }
    assert hot == {rows * nv: number for nv, number in lines.items()}


def row_kernel(target, dtype):
    """Assembly of the online softmax on one row."""
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.registers import ITEMSIZE, jit
    from fastattn.cpu.softmax import row_top, row_update

    real, lanes = pointer_to(dtype), target.unit.lanes(ITEMSIZE[dtype])
    largest, update = row_top(dtype, lanes), row_update(dtype, lanes)

    @jit
    def body(job):
        scale, exclude = real(job[3])[0], job[8] != 0
        acc, row_max, row_sum = real(job[4]), real(job[6]), real(job[7])
        s, ahead, start, stop = real(job[0]), real(job[9]), job[1], job[2]
        top = largest(s, start, stop)
        top = update(s, ahead, start, stop, top, scale, acc, job[5], row_max, row_sum, exclude)
        row_max[1] = top

    return compile.assembly(wrapped(body), target)


CALL = r"(callq?|blr?)\b"
IN_MEMORY = r"-?\w*\([^)]*\)"
MASKED_STORE = (
    rf"vp?maskmov\w+\s+%[xyz]mm\d+, %[xyz]mm\d+, {IN_MEMORY}"
    rf"|v\w+\s+%[xyz]mm\d+, {IN_MEMORY} \{{%k"
)
ONE_LANE = r"(v\w+s[sd]\s+(?!.*\().*%xmm|f(madd|mul|add|sub)\s+[sd]\d)"


@on_each_target
@floats
def test_softmax_loop_is_vectors_only(target, dtype):
    from fastattn.cpu.elementary import EXP2, EXP2_NEAR
    from fastattn.cpu.registers import ITEMSIZE

    assembly = row_kernel(target, dtype)
    assert_plain(assembly)
    hot = [loop for loop in loops(assembly) if count(fused(target, dtype), loop)]
    near = EXP2_NEAR.get((dtype, target.unit.lanes(ITEMSIZE[dtype])))
    terms = len(near) if near else len(EXP2[dtype]) - 1
    counts = {count(fused(target, dtype), loop) for loop in hot}
    # LLVM 15 turns the loop of fours on Arm into one that is not found here.
    hidden = OLD_LLVM and target.unit == NEON
    assert counts == ({terms} if hidden else {4 * terms, terms})
    for loop in hot:
        assert not count(ONE_LANE, loop)
        # Sixteen registers cannot hold four chains and all constants, Arm's not those of float64.
        assert len(on_stack(loop)) <= (3 if target.unit.registers == 32 else SPILLS[dtype])


@on_each_target
@floats
def test_masking_has_no_masked_stores(target, dtype):
    from fastattn.cpu.masking import mask_row
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.registers import ITEMSIZE, jit

    real, apply = pointer_to(dtype), mask_row(dtype, target.unit.lanes(ITEMSIZE[dtype]), None)

    @jit
    def body(job):
        s, start, stop, low, high, width = real(job[0]), job[1], job[2], job[3], job[4], job[5]
        mask, place, col, spare, b = job[6], job[7], job[8], real(job[9]), job[10]
        apply(s, start, stop, low, high, width, mask, place, col, spare, False, b, b, b, b, b)

    assert_plain(compile.assembly(wrapped(body), target))


@on_each_target
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_changing_scores_calls_nothing(target, dtype):
    from fastattn.cpu.masking import scores_row
    from fastattn.cpu.memory import pointer_to
    from fastattn.cpu.registers import ITEMSIZE, jit

    real, apply = pointer_to(dtype), scores_row(dtype, target.unit.lanes(ITEMSIZE[dtype]), None)

    @jit
    def body(job):
        s, start, stop, width, spare = real(job[0]), job[1], job[2], job[3], real(job[4])
        scale, softcap, slope = real(job[5])[0], real(job[5])[1], real(job[5])[2]
        bias, place, col, kind = job[7], job[8], job[9], job[10]
        far, b = job[6], job[11]
        given = (b, b, b, b, b)
        more = (slope, bias, place, col, kind, spare)
        apply(s, start, stop, width, scale, softcap, far, *more, *given)

    assert_plain(compile.assembly(wrapped(body), target))


def assert_plain(assembly):
    """Nothing is called, and no store is masked."""
    lines = [line.strip() for line in assembly.splitlines()]
    assert not count(CALL, lines)
    assert not count(MASKED_STORE, lines)


def test_the_patterns_see_what_they_look_for():
    for line in (
        "vmovups\t%zmm3, (%rax,%rdx,4) {%k1}",
        "vmaskmovps\t%ymm1, %ymm2, (%rdi)",
        "vmovdqu32\t%ymm1, 32(%rdi) {%k1}",
    ):
        assert count(MASKED_STORE, [line]) == 1
    for operands in ("%zmm3, (%rax)", "(%rax), %zmm4, %zmm5 {%k1}", "%zmm3, %zmm4, %zmm5 {%k1}"):
        assert count(MASKED_STORE, [f"vsome\t{operands}"]) == 0
    for line in ("vaddss\t%xmm1, %xmm2, %xmm3", "fmadd\ts0, s1, s2, s3"):
        assert count(ONE_LANE, [line]) == 1
    assert count(ONE_LANE, ["vbroadcastss\t(%rax), %zmm1"]) == 0
    assert count(CALL, ["callq\texp2f"]) == count(CALL, ["bl\texp2f"]) == 1
    assert loops(".L1:\n\tnop\n\tjne .L1\n.L2:\n\tb.ne .L1\n\tret") == [["nop", "jne .L1"]]


VARIANTS = {
    storage: Variant("float64" if storage == "float64" else "float32", storage)
    for storage in ("float32", "float64", "float16", "bfloat16")
}


def _rare():
    """The variants that are left to slow runs."""
    for storage, variant in VARIANTS.items():
        if storage != "float32":
            yield pytest.param(variant, id=storage, marks=pytest.mark.slow)


each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


@on_each_target
def test_loops_are_not_unrolled(target):
    """Tiles are, where they are made; more would be code that no call is faster for."""

    def kernel(job, scratch, quota):
        total = quota
        for n in range(quota):
            total = total * (total + n)
        return total

    (loop,) = loops(compile.assembly(kernel, target))
    assert count(r"imul|mul\s|madd", loop) == 1


@on_each_target
@pytest.mark.parametrize("variant", [pytest.param(VARIANTS["float32"], id="float32"), *_rare()])
def test_combine_kernel_needs_nothing_from_outside(target, variant):
    from fastattn.cpu.decode import combine_kernel

    kernel = combine_kernel(variant, target.unit)
    entry, code = compile.compile_object(kernel, target)
    assert len(image.link(code, entry)) < 10_000  # it raises if the code needs more


@pytest.mark.slow
@on_each_target
@each_variant
def test_forward_kernel_needs_nothing_from_outside(target, variant):
    from fastattn.cpu.forward import forward_kernel

    kernel = forward_kernel(variant, target.unit)
    entry, code = compile.compile_object(kernel, target)
    assert len(image.link(code, entry)) < CODE_LIMIT


def test_a_kernel_that_calls_out_is_refused():
    from numba.extending import intrinsic

    @intrinsic
    def outside(typingctx, x):
        def codegen(context, builder, sig, args):
            from llvmlite import ir

            # One that exists: Numba, too, links the kernel, and would end the process.
            function = ir.Function(builder.module, ir.FunctionType(ir.IntType(64), []), "getpid")
            return builder.call(function, [])

        return x(x), codegen

    def kernel(job, scratch, quota):
        return outside(quota)

    with pytest.raises(RuntimeError, match=r"needs symbols from outside: \['getpid'\]"):
        compile.compile_object(kernel, TARGETS["x86-64-v3"])


@on_each_target
def test_a_thread_that_waits_awake_relaxes_its_core(target):
    from fastattn.cpu.awake import awake_kernel

    lines = [s.strip() for s in compile.assembly(awake_kernel(target.unit), target).splitlines()]
    pauses = count("isb" if target.unit == NEON else "pause", lines)
    assert pauses == 2  # in wait() and in has_ended()
