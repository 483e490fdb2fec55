"""What single pieces of the kernel cost, one thread, on the sizes of one block: no memory traffic.

python bench/pieces.py
python bench/pieces.py --only 'scores,output*' --dtype float64 --head-dim 128

Products are given as per cent of the multiply-add peak measured beside them, all else as time per
element: of a score, a key or a value. Modifiers are what they add to a pass over the scores.
"""

from __future__ import annotations

import fnmatch
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import repository

from fastattn import mods
from fastattn.benchmark import record
from fastattn.benchmark.roofline import multiply_add_peak
from fastattn.commands import terminal
from fastattn.cpu import compile
from fastattn.cpu.job import aux_table
from fastattn.machine import VectorUnit
from fastattn.modifier import Modifier, aux_arrays, aux_types
from fastattn.plan import BLOCK_N, MC
from fastattn.trace import trace

HEADS, FIRST_ROW, FIRST_KEY = 8, 1000, 768  # where in the whole the block of scores lies
REPEATS, SECONDS = 50, 0.2
# Part of the names of kernels: the cache knows the sources of the package, not this one.
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
Body = Callable[[Any], None]  # of the job's fields, for Numba


class Piece(NamedTuple):
    """A piece of the kernel and what one run of it works on."""

    name: str
    build: Callable[[VectorUnit], Body]
    job: tuple[Any, ...]  # arrays, as their addresses, and ints
    elements: int  # what the time is divided by
    flop: int = 0  # multiplies and adds of a product; 0 for what is none
    key: Any = ()  # what else build() closes over


def timed(piece: Piece, dtype: str, sizes: tuple[int, ...]) -> float:
    """Seconds of one run: the best of short ones, by the thread's CPU time."""
    names = ("bench.pieces", SOURCE, piece.name, dtype, sizes, piece.key)
    kernel = compile.kernel(names, lambda unit: repeated(piece.build(unit)))
    job = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in piece.job]
    fields = np.array(job, np.int64)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        before = time.thread_time()
        kernel(fields.ctypes.data, 0, REPEATS)
        best = min(best, time.thread_time() - before)
    return best / REPEATS


def repeated(body: Body) -> Callable[[int, int, int], int]:
    """Kernel: run body `quota` times. It finds its sizes in the job, as those of the library do."""
    from fastattn.cpu.memory import address, pointer_to

    integers = pointer_to("int64")

    def kernel(job, scratch, quota):
        fields = integers(address(job))
        while quota > 0:
            body(fields)
            quota -= 1
        return 0

    return kernel


def pieces(dtype: str, head_dim: int) -> Iterator[Piece]:
    """All pieces for one size of block: MC rows against BLOCK_N keys."""
    block = Block(dtype, head_dim)
    yield from product_pieces(block)
    yield from few_pieces(block)
    yield softmax_piece(block)
    storages = ("float32", "float16", "bfloat16") if dtype == "float32" else (dtype,)
    for storage in storages:
        yield from packing_pieces(block, storage)
    yield from modifier_pieces(block)


class Block:
    """Arrays of one block, the packed ones filled as if they were packed."""

    def __init__(self, dtype: str, head_dim: int):
        rng = np.random.default_rng(0)
        self.dtype, self.head_dim, self.rows, self.keys = dtype, head_dim, MC, BLOCK_N[dtype]
        self.lanes = compile.vector_unit_of(compile.host_target()).lanes(np.dtype(dtype).itemsize)
        # Not a power of two, as in the library: rows would fall into the same sets of the cache.
        self.s_stride = self.keys + self.lanes
        self.acc_stride = -(-head_dim // self.lanes) * self.lanes
        self.q = rng.standard_normal((self.rows, head_dim)).astype(dtype)
        self.k, self.v = (
            rng.standard_normal((self.keys + 64, head_dim)).astype(dtype) for _ in range(2)
        )
        self.panels = rng.random(self.keys * (head_dim + 4 * self.lanes)).astype(dtype)
        self.s = rng.random((self.rows, self.s_stride)).astype(dtype)
        self.acc = np.zeros((self.rows, self.acc_stride), dtype)
        self.state = np.zeros((2, self.rows), dtype)

    @property
    def scores(self) -> int:
        return self.rows * self.keys


def product_pieces(block: Block) -> Iterator[Piece]:
    """Both products, from packed operands."""
    flop = 2 * block.scores * block.head_dim
    sizes = (block.rows, block.head_dim, block.keys, block.s_stride, block.acc_stride)
    job: tuple = (block.q, block.panels, block.s, *sizes)
    yield Piece("scores", score_product(block.dtype), job, block.scores, flop)
    job = (block.s, block.panels, block.acc, *sizes)
    yield Piece("output", output_product(block.dtype), job, block.scores, flop)


def score_product(dtype: str) -> Callable[[VectorUnit], Body]:
    def build(unit):
        from fastattn.cpu import products
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.registers import jit

        product, real = products.score_block(dtype, unit), pointer_to(dtype)

        @jit
        def body(f):
            product(real(f[0]), f[4], f[3], f[4], real(f[1]), 0, f[5], real(f[2]), f[6])

        return body

    return build


def output_product(dtype: str) -> Callable[[VectorUnit], Body]:
    def build(unit):
        from fastattn.cpu import products
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.registers import jit

        product, real = products.output_block(dtype, unit), pointer_to(dtype)

        @jit
        def body(f):
            product(real(f[0]), f[6], f[3], real(f[1]), f[5], 0, f[5], real(f[2]), f[7], f[4])

        return body

    return build


def few_pieces(block: Block) -> Iterator[Piece]:
    """Both products of few rows, from keys and values as they lie in the second cache."""
    for rows in (1, 4):
        sizes = (rows, block.head_dim, block.keys, block.s_stride, block.acc_stride)
        job: tuple = (block.q, block.k, block.s, block.panels, *sizes)
        yield Piece(f"scores, {rows} rows", few_score_product(block.dtype), job, block.keys)
        if block.acc_stride == block.head_dim:
            job = (block.s, block.v, block.acc, block.panels, *sizes)
            yield Piece(f"output, {rows} rows", few_output_product(block.dtype), job, block.keys)


def few_score_product(dtype: str) -> Callable[[VectorUnit], Body]:
    def build(unit):
        from fastattn.cpu import products
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.registers import jit

        product, real = products.few_scores(dtype, unit, dtype), pointer_to(dtype)

        @jit
        def body(f):
            q, k, s, part = real(f[0]), real(f[1]), real(f[2]), real(f[3])
            product(q, f[4], f[5], k, f[5], f[6], f[6], s, f[7], part)

        return body

    return build


def few_output_product(dtype: str) -> Callable[[VectorUnit], Body]:
    def build(unit):
        from fastattn.cpu import products
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.registers import jit

        product, real = products.few_outputs(dtype, unit), pointer_to(dtype)

        @jit
        def body(f):
            p, v, acc, sums = real(f[0]), real(f[1]), real(f[2]), real(f[3])
            product(p, f[7], f[4], v, f[5], 0, f[6], acc, f[8], sums)

        return body

    return build


def softmax_piece(block: Block) -> Piece:
    """Maximum, exponentials and sum; the reference does not move."""
    dtype, lanes = block.dtype, block.lanes

    def softmax(unit):
        from fastattn.cpu.memory import at, pointer_to
        from fastattn.cpu.registers import jit
        from fastattn.cpu.softmax import row_top, row_update

        largest, update, real = row_top(dtype, lanes), row_update(dtype, lanes), pointer_to(dtype)
        scale = getattr(np, dtype)(0.125)

        @jit
        def body(f):
            s, acc, state, rows, keys = real(f[0]), real(f[1]), real(f[2]), f[3], f[4]
            top, next_top = largest(s, 0, keys), largest(at(s, f[5]), 0, keys)
            for m in range(rows):
                row, out = at(s, m * f[5]), at(acc, m * f[6])
                ahead = at(row, 2 * f[5] if m + 2 < rows else 0)
                row_max, row_sum = at(state, m), at(state, rows + m)
                to = out, f[6], row_max, row_sum
                later = update(row, ahead, 0, keys, top, scale, *to, False)
                top, next_top = next_top, later

        return body

    sizes = (block.rows, block.keys, block.s_stride, block.acc_stride)
    return Piece("softmax", softmax, (block.s, block.acc, block.state, *sizes), block.scores)


def packing_pieces(block: Block, storage: str) -> Iterator[Piece]:
    """Keys and values into panels, from the second cache."""
    # 1.0 in any type: random bits would be NaNs now and then.
    one = {"float16": 0x3C00, "bfloat16": 0x3F80}.get(storage)
    stored = block.k if one is None else np.full(block.k.shape, one, np.uint16)
    job = (stored, block.panels, block.keys, block.head_dim)
    for operand in ("keys", "values"):
        build = packing(operand, block.dtype, storage)
        yield Piece(f"pack {operand}, {storage}", build, job, block.keys * block.head_dim)


def packing(operand: str, dtype: str, storage: str) -> Callable[[VectorUnit], Body]:
    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.packing import pack_k, pack_v
        from fastattn.cpu.registers import jit

        real, source = pointer_to(dtype), pointer_to(storage)
        pack_keys, pack_values = pack_k(dtype, unit, storage), pack_v(dtype, unit, storage)

        @jit
        def keys(f):
            pack_keys(source(f[0]), f[3], 1, f[2], f[3], real(f[1]))

        @jit
        def values(f):
            pack_values(source(f[0]), f[3], 1, f[2], f[2], f[3], real(f[1]))

        return keys if operand == "keys" else values

    return build


def modifier_pieces(block: Block) -> Iterator[Piece]:
    """Ready-made modifiers, after a pass that only loads and stores, which is taken off theirs."""
    places = (HEADS // 2, FIRST_ROW, FIRST_KEY, block.rows, block.keys, block.s_stride)
    job = (block.s, 0, *places)
    yield Piece("pass over scores", modifying(None, block), job, block.scores)
    for name, argument, function, given in ready_made():
        arrays = aux_arrays(given)
        traced = trace(function, argument, aux_types(arrays))
        # A piece keeps its arrays alive: `given` stands behind what the kernel reads.
        job = (block.s, aux_table(arrays), *places, *arrays)
        yield Piece(f"{argument} {name}", modifying(traced, block), job, block.scores, key=traced)


def modifying(modifier: Modifier | None, block: Block) -> Callable[[VectorUnit], Body]:
    """A modifier on all scores of a block, in place; None only loads, scales and stores."""

    def build(unit):
        from fastattn.cpu.memory import at, pointer_to
        from fastattn.cpu.registers import jit
        from fastattn.cpu.simd import operations

        lanes, real = block.lanes, pointer_to(block.dtype)
        simd = operations(block.dtype, lanes)
        load, store, change = simd.load, simd.store, changing(modifier, block.dtype, lanes)

        @jit
        def body(f):
            for m in range(f[5]):
                row = at(real(f[0]), m * f[7])
                for n in range(0, f[6], lanes):
                    store(row, n, change(load(row, n), f[2], f[3] + m, f[4] + n, f[1]))

        return body

    return build


def changing(modifier: Modifier | None, dtype: str, lanes: int):
    """Kernel: one register of scaled scores, changed. A mask takes a minimum, as in forward."""
    from fastattn.cpu.modifiers import mask_mod, score_mod
    from fastattn.cpu.registers import jit
    from fastattn.cpu.simd import operations

    simd, scalar = operations(dtype, lanes), getattr(np, dtype)
    where, vmin = simd.where, simd.vmin
    inf, scale = scalar(np.inf), scalar(1.0000001)
    if modifier is None:
        return jit(lambda x, h, i, j, aux: x * scale)
    if modifier.argument == "score_mod":
        run = score_mod(modifier, dtype, lanes)
        return jit(lambda x, h, i, j, aux: run((x * scale,), 0, h, i, j, aux)[0])
    run = mask_mod(modifier, dtype, lanes)

    @jit
    def change(x, h, i, j, aux):
        return vmin(x * scale, where(run(0, h, i, j, aux), inf, -inf))

    return change


def ready_made() -> list[tuple[str, str, object, tuple]]:
    """(name, argument, function, aux) of each ready-made modifier."""
    rng = np.random.default_rng(0)
    slopes = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)
    weight = rng.standard_normal((32, HEADS)).astype(np.float32)
    ids = np.repeat(np.arange(32, dtype=np.int32), 64)
    band = mods.sliding_window(128, 128)
    return [
        ("causal", "mask_mod", mods.causal, ()),
        ("sliding_window", "mask_mod", band, ()),
        ("dilated_window", "mask_mod", mods.dilated_window(64, 64, 3), ()),
        ("prefix_lm", "mask_mod", mods.prefix_lm(), (np.array([900]),)),
        ("document_mask", "mask_mod", mods.document_mask(), (ids,)),
        ("document_mask int64", "mask_mod", mods.document_mask(), (ids.astype(np.int64),)),
        ("and_masks", "mask_mod", mods.and_masks(mods.document_mask(), mods.causal), (ids,)),
        ("softcap", "score_mod", mods.softcap(30.0), ()),
        ("alibi", "score_mod", mods.alibi(), (slopes,)),
        ("t5_bias", "score_mod", mods.t5_bias(), mods.t5_table(weight, 2048, 2048)),
        ("gather aux[0][id[j]]", "score_mod", _gathered, (slopes, ids % HEADS)),
    ]


def _gathered(score, b, h, i, j, aux):
    return score + aux[0][aux[1][j]]


def measure(wanted: list[str], dtype: str, head_dim: int) -> dict[str, dict[str, float]]:
    """{name: {"ns", "percent" of the peak if it is a product}}."""
    found: dict[str, dict[str, float]] = {}
    floor = 0.0
    for piece in pieces(dtype, head_dim):
        is_pass = piece.name == "pass over scores"
        if not is_pass and not any(fnmatch.fnmatch(piece.name, word) for word in wanted):
            continue
        seconds = timed(piece, dtype, (head_dim,))
        if is_pass:
            floor = seconds
        elif "_mod " in piece.name:
            seconds -= floor
        found[piece.name] = {"ns": seconds / piece.elements * 1e9}
        if piece.flop:
            peak = multiply_add_peak(dtype)
            found[piece.name]["percent"] = 100 * piece.flop / seconds / 1e9 / peak
    return found


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--only", default="*", help="names or patterns, comma-separated")
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float32", help="of sums"
    )
    parser.add_argument("--head-dim", type=terminal.count, default=64, help="default 64")
    options = parser.parse_args()
    found = measure(options.only.split(","), options.dtype, options.head_dim)
    print(f"{options.dtype}, {MC} rows × {BLOCK_N[options.dtype]} keys × {options.head_dim}")
    for name, row in found.items():
        percent = f"{row['percent']:6.1f} % of peak" if "percent" in row else ""
        print(f"{name:32s} {row['ns']:7.3f} ns {percent}")
    if options.json:
        kept = {f"{name}, {options.dtype} × {options.head_dim}": row for name, row in found.items()}
        record.save(options.json, "pieces", repository.setting(1), kept)


if __name__ == "__main__":
    main()
