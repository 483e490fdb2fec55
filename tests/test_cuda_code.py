"""What NVIDIA's assembler makes of the kernels: registers, spills, instructions. Needs no GPU."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from cuda_assembled import assemble, need_assembler
from cuda_emulated import code, need_numba_cuda

from fastattn.cuda.tensor.tilings import HEAD_DIMS, SPECIALISED, Tiling, forward_tiling
from fastattn.problem import Problem, Variant

need_numba_cuda()
need_assembler()
REGISTERS = 65536  # of a multiprocessor
# Of a thread block, at most.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
PLAIN = Tiling("bfloat16", 128, 128, 4, 128, 64)
FLOATS = Tiling("float32", 64, 64, 4, 128, 64)


def chosen():
    """{tiling: targets}: all that problems get; float16, whose code is alike, in few of them."""
    pairs = [(d, d) for d in HEAD_DIMS] + [(192, 128), (64, 128)]
    pairs += [(d - 8, d) for d in HEAD_DIMS]  # padded
    whole = ("bfloat16", "float32")
    calls = [
        (storage, *pair, rows, general, strided, False)
        for storage in whole
        for pair in pairs
        for rows in (1, 64, 500)
        for general in (False, True)
        for strided in (False, True)
    ]
    calls += [("float16", d, d, 500, False, False, False) for d in HEAD_DIMS]
    calls += [
        (storage, d, d, rows, general, False, True)
        for storage in whole
        for d in (64, 128, 256)
        for rows in (1, 500)
        for general in (False, True)
    ]
    found = defaultdict(dict)  # whose keys are an ordered set
    for target, shared_bytes in SHARED_BYTES.items():
        for storage, *sizes, general, strided, paged in calls:
            variant = Variant("float32", storage, paged)
            problem = Problem(
                *(variant, 1, 8, 2, sizes[2], 500, *sizes[:2], 0.1, 0, None, None),
                tf32=storage == "float32",
            )
            tiling, _ = forward_tiling(
                problem, options=general, strided=strided, shared_limit=shared_bytes
            )
            # The kernel that copies single elements is the same where they are padded.
            if tiling is not None and not (tiling.padded and strided):
                found[tiling][target] = None
    return found


def check(tiling, target):
    found = assemble(code(tiling), target)
    # Copying element by element needs many addresses, and is bound by its loads: of rows of 128 and
    # more, a few registers are written and read again.
    widest = tiling.strided and max(tiling.head_dim, tiling.head_dim_v) >= 128
    assert found.spilled <= (48 if widest else 0)
    assert found.registers * tiling.threads <= REGISTERS
    return found


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_the_loop_of_the_plain_kernel(target):
    """One step of 32 rows of a warp and 64 keys, head_dim 128."""
    found = check(PLAIN, target)
    loop = found.loop
    # 2 row tiles x 8 tiles of keys x 8 steps, and as many for p · v
    assert loop["HMMA"] == 256
    # q: 2 row tiles x 8 steps; k: 4 x 8; v: 4 x 8
    assert loop["LDSM"] == 80
    # (64 + 64) rows x 16 chunks / 128 threads
    assert loop["LDGSTS"] == 16
    assert loop["BAR"] == 3  # for k, and one or the other for v
    # 64 scores of a thread and 4 factors
    assert loop["MUFU"] == 68
    # Most steps jump over some 200 of the mask, 300 of the look at hidden values and 130 of the
    # rescaling. 1457 on sm_90 with ptxas 13.5.
    assert loop.total() <= 1480


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_loop_of_the_kernel_of_float32(target):
    """As many products as of 16-bit types and twice the head_dim, each half as deep."""
    found = check(FLOATS, target)
    loop = found.loop
    # 2 row tiles x 8 tiles of keys x 8 steps, and as many for p · v
    assert loop["HMMA"] == 256
    assert {rest.split()[0] for name, rest in found.code if name == "HMMA"} == {".1688.F32.TF32"}
    # q: 2 row tiles x 8 steps; k: 4 x 8
    assert loop["LDSM"] == 48
    # (64 + 64) rows x 16 chunks / 128 threads
    assert loop["LDGSTS"] == 16
    assert loop["BAR"] == 3
    assert loop["MUFU"] == 68
    # v: 8 x 2 loads of two rows; as many for the look at hidden values. The others are indices.
    assert 32 + 16 <= loop["LDS"] <= 56
    # Each of 128 factors of k, 128 of v and 64 of p is rounded in two instructions: 2089 on sm_80
    # and 2119 on sm_90 with ptxas 13.5.
    assert loop.total() <= 2150


@pytest.mark.slow
@pytest.mark.parametrize(("tiling", "targets"), chosen().items(), ids=str)
def test_every_tiling_that_is_chosen_stays_in_registers(tiling, targets):
    found = [check(tiling, target) for target in targets]
    instructions = set(found[0].instructions)  # of one: what they multiply with is in the text
    assert {"HMMA", "LDSM"} <= instructions
    assert ("LDGSTS" in instructions) == (not tiling.strided)


@pytest.mark.parametrize(
    "head_dim", [d if d == 128 else pytest.param(d, marks=pytest.mark.slow) for d in SPECIALISED]
)
def test_the_specialised_kernel(head_dim):
    """Products of warpgroups run while the softmax does."""
    shape = SPECIALISED[head_dim]
    found = check(Tiling("bfloat16", head_dim, head_dim, *shape, specialised=True), "sm_90a")
    # The first q · k; that and p · v of the loop; the last p · v. 16 deep each.
    assert found.instructions["HGMMA"] == 2 * (head_dim + shape[2]) // 16
    assert {"UTMALDG", "SYNCS"} <= set(found.instructions)
    assert found.instructions["USETMAXREG"] == 2
    # The code of the copiers, who have given back all registers but 24, or 32, comes last.
    names = [name for name, _ in found.code]
    given = next(i for i, (_, rest) in enumerate(found.code) if ".DEALLOC" in rest)
    after = " ".join(rest for _, rest in found.code[given:])
    assert "UTMALDG" in names[given:]
    assert "HGMMA" not in names[given:]
    assert max(map(int, re.findall(r"\bR(\d+)\b", after))) < 24
    products = [i for i, name in enumerate(names) if name == "HGMMA"]
    last = products[head_dim // 8 + shape[2] // 16 - 1]  # of the loop's p · v
    waits = [i for i in range(last, products[-1]) if names[i] == "WARPGROUP"]
    # Between the wait for q · k and that for p · v: half a block's scores for each thread
    assert names[waits[0] : waits[1]].count("MUFU") >= shape[2] // 2
