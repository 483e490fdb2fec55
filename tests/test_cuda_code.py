"""What NVIDIA's assembler makes of the kernels: registers, spills, instructions. Needs no GPU."""

from __future__ import annotations

import pytest
from cuda_assembled import assemble, need_assembler
from cuda_emulated import SM_80, SM_90, code, need_numba_cuda

from fastattn.cuda.tensor.tilings import PACKED, SHAPES, Tiling

need_numba_cuda()
need_assembler()
REGISTERS = 65536  # of a multiprocessor
TILINGS = [
    Tiling(storage, head_dim, head_dim, *shape)
    for head_dim, shapes in SHAPES.items()
    for shape in shapes
    for storage in ("float16", "bfloat16")
]
PLAIN = Tiling("bfloat16", 128, 128, 4, 128, 64)
ODD = [
    Tiling("bfloat16", 128, 128, 4, 64, 64, padded=True),
    Tiling("bfloat16", 64, 64, 4, 64, 64, padded=True, strided=True),
    Tiling("float16", 192, 128, 4, 64, 64),
    *(Tiling("bfloat16", d, d, *PACKED, packed=True) for d in (64, 128, 256)),
    *(Tiling("bfloat16", d, d, 4, 64, 64, general=True) for d in (64, 96, 128, 192)),
    Tiling("float16", 128, 128, 4, 64, 64, general=True),
    Tiling("bfloat16", 256, 256, 4, 64, 32, general=True),
]


def check(tiling, target):
    found = assemble(code(tiling, target))
    # Copying element by element needs many addresses, and is bound by its loads.
    assert found.spilled <= (256 if tiling.strided else 0)
    assert found.registers * tiling.threads <= REGISTERS
    return found


@pytest.mark.parametrize("target", [SM_80, SM_90], ids=str)
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
@pytest.mark.parametrize("target", [SM_80, SM_90, (12, 0)], ids=str)
@pytest.mark.parametrize("tiling", TILINGS + ODD, ids=str)
def test_every_tiling_stays_in_registers(tiling, target):
    if target == (12, 0) and tiling.block_m > 64:
        pytest.skip("not chosen there")
    found = check(tiling, target)
    assert {"HMMA", "LDSM"} <= set(found.instructions)
    assert ("LDGSTS" in found.instructions) == (not tiling.strided)
