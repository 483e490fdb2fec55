"""What NVIDIA's assembler makes of the SIMT kernels, for every generation of GPUs. Needs no GPU."""

from __future__ import annotations

import pytest
from cuda_assembled import assemble, need_assembler

from fastattn.cuda import choice, compile
from fastattn.cuda.tile import GRADIENT, SHORT, TALL, Tile
from fastattn.problem import Variant
from fastattn.trace import traced

pytest.importorskip("numba_cuda")
need_assembler()
TARGETS = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
REGISTERS, SHARED_BYTES = 65536, 48 << 10
STORED = [("float32", "float32"), ("float32", "float16"), ("float32", "bfloat16")]
STORED += [("float64", "float64")]
KERNELS = [
    (Variant(*stored), Tile(*shapes[stored[0]], values=values, depth=32))
    for stored in STORED
    for shapes in (TALL, SHORT)
    for values in ((4, 8) if stored[0] == "float32" else (4,))
]
F4, USUAL = Variant("float32", "float32"), Tile(*TALL["float32"], values=4, depth=32)


def bent(score, b, h, i, j, aux):
    return score * aux[0][h] + aux[1][i, j] - abs(i - j) % 3


def even(b, h, i, j, aux):
    return (i + j) % 2 == aux[0][b]


def modified():
    """A variant with a score_mod and a mask_mod."""
    types = (("float32", 1), ("float64", 2))
    score_mod = traced(bent, "score_mod", types)
    mask_mod = traced(even, "mask_mod", (("int32", 1),))
    return Variant("float32", "float32", True, score_mod, mask_mod)


def ptx_of(*key):
    return compile.code(key, choice.builder(key)).ptx


def check(variant, tile, target):
    ptx = ptx_of("simt", variant, tile)
    assert ".version 6.3\n.target sm_75\n" in ptx
    assert ".local" not in ptx, "an array that is not in registers"
    assert ".func" not in ptx, "a function that is called"
    found = assemble(ptx, target, divides=True)
    assert found.spilled == 0
    assert found.registers * tile.threads * 2 <= REGISTERS, "not two blocks of a multiprocessor"
    sixteenths = tile.buffer_size + tile.block_m * (tile.threads_n + 4)
    itemsize = 8 if variant.dtype == "float64" else 4
    assert sixteenths * itemsize + 8 * (4 * tile.block_m + 2 * tile.block_n) <= SHARED_BYTES
    return found


def test_the_usual_kernel():
    found = check(F4, USUAL, "sm_80")
    # A step along head_dim of the first product, and of the second, ordinary and careful.
    assert found.instructions["FFMA"] >= USUAL.rows * (USUAL.keys + 2 * USUAL.values)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("variant", "tile"), KERNELS, ids=str)
def test_no_kernel_spills(variant, tile, target):
    check(variant, tile, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_modifiers_and_pages_spill_nothing(target):
    check(modified(), USUAL, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["combine", "missing"])
@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored[1])
def test_kernels_of_rows(name, stored, target):
    assert assemble(ptx_of(name, Variant(*stored)), target, divides=True).spilled == 0


GRADIENTS = [
    (Variant(*stored), Tile(*GRADIENT[stored[0]], values=values, depth=32))
    for stored, values in ((STORED[0], 4), (STORED[2], 8), (STORED[3], 4))
]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("variant", "tile"), GRADIENTS, ids=str)
def test_gradients_spill_nothing(variant, tile, target):
    for name in ("simt_gradient_q", "simt_gradient_kv"):
        ptx = ptx_of(name, variant, tile)
        assert ".local" not in ptx, "an array that is not in registers"
        assert ".func" not in ptx, "a function that is called"
        found = assemble(ptx, target, divides=True)
        assert found.spilled == 0
        assert found.registers * tile.threads * 2 <= REGISTERS, "not two blocks of a multiprocessor"
    for key in (
        ("gradient_rows", variant, True),
        ("gradient_bias", variant, tile, "float32"),
        ("gradient_sums", variant, "dalibi", "float32"),
    ):
        assert assemble(ptx_of(*key), target, divides=True).spilled == 0
