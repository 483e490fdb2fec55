"""Squares of keys, as many as a register has lanes and as many dims, with keys in the lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .job import LINE
from .registers import (
    I32,
    I64,
    ITEMSIZE,
    STORED,
    Register,
    broadcast,
    call,
    constant,
    from_storage,
    greater,
    load_vector,
    prefetch_line,
    row_offset,
    store_vector,
)

# Four rows of head_dim 128: 0.82 of the time (4096 and 16384 alike, 4 KiB 0.93). One row, where
# reading is nearly all there is, takes 1.04 times as long.
FAR = 8192
BLOCK = 16  # bytes of the parts of a register that instructions shuffle within


def _inner(dtype: str, lanes: int) -> int:
    """Lanes of a block."""
    return min(lanes, BLOCK // ITEMSIZE[dtype])


def _shuffle(builder, x, y, order: list[int]):
    """LLVM value: these lanes of x and, behind them, y."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))


def _interleave(builder, x, y, size: int, inner: int):
    """(low, high): within each block, runs of `size` lanes of x and y in turn: x0 y0 x1 y1 ... (one
    instruction).
    """
    lanes, halves = x.type.count, []
    for half in range(2):
        order = []
        for start in range(half * inner // 2, lanes, inner):
            for first in range(start, start + inner // 2, size):
                order += [*range(first, first + size), *range(lanes + first, lanes + first + size)]
        halves.append(_shuffle(builder, x, y, order))
    return halves


def _transpose_blocks(builder, rows: list, inner: int) -> list:
    """LLVM values: registers whose blocks are the columns of the blocks of `rows`, as many as a
    block has lanes.
    """
    if inner == 2:
        return _interleave(builder, rows[0], rows[1], 1, inner)
    a, b = (_interleave(builder, rows[n], rows[n + 1], 1, inner) for n in (0, 2))
    low, high = (_interleave(builder, a[n], b[n], 2, inner) for n in (0, 1))
    return low + high


def _columns(builder, load: Callable, lanes: int, inner: int) -> Iterator:
    """LLVM values: the columns of a square one after another, each as soon as it can be had: what
    is done with one then overlaps with the shuffles of the next.

    load(row, first, count) is part of a row. Loads put blocks of rows that are `inner` apart side
    by side, so that what is left are shuffles within blocks and, of four blocks, one across.
    """
    blocks = lanes // inner
    if blocks == 1:
        yield from _transpose_blocks(builder, [load(row, 0, lanes) for row in range(inner)], inner)
        return
    half = lanes // 2
    whole = list(range(lanes))

    def side_by_side(row: int, first: int):
        x, y = (load(r, first, half) for r in (row, row + inner))
        return _shuffle(builder, x, y, whole)

    for first in range(0, lanes, half):
        pairs = [side_by_side(row, first) for row in range(inner)]
        if blocks == 2:
            yield from _transpose_blocks(builder, pairs, inner)
            continue
        others = [side_by_side(row + half, first) for row in range(inner)]
        for odd in (0, inner):
            order = [n + i + odd for n in range(0, 2 * lanes, half) for i in range(inner)]
            rows = [_shuffle(builder, x, y, order) for x, y in zip(pairs, others, strict=True)]
            yield from _transpose_blocks(builder, rows, inner)


def _block_loader(builder, k, rs_k, last, dtype: str, lanes: int, storage: str) -> Callable:
    """load(row, first, count): part of one of `lanes` rows, rs_k apart, as dtype; rows past the
    last repeat it. A table of offsets goes on past it.
    """
    rows, is_table = [], isinstance(rs_k.type, ir.PointerType)
    for n in range(lanes):
        number = ir.Constant(I64, n)
        if is_table:
            rows.append(builder.gep(k, [row_offset(builder, rs_k, number)]))
        elif n:
            is_there = builder.icmp_signed("<=", number, last)
            rows.append(
                builder.gep(rows[-1], [builder.select(is_there, rs_k, ir.Constant(I64, 0))])
            )
        else:
            rows.append(k)

    def load(row: int, first: int, count: int):
        vector = ir.VectorType(STORED[storage], count)
        value = load_vector(builder, rows[row], ir.Constant(I64, first), vector)
        return from_storage(builder, value, storage, dtype)

    return load


@functools.cache
def transpose_square(dtype: str, lanes: int, storage: str):
    """Intrinsic: panel[d, n] = k[n, d] for lanes x lanes elements, through registers.

    k      of storage type, rows rs_k apart, columns contiguous: rows past the last repeat it; or a
           whole square of rows at the offsets that the table rs_k says
    panel  of dtype, row stride rs_panel, columns contiguous
    """

    def codegen(context, builder, sig, args):
        k, rs_k, last, panel, rs_panel = args
        load = _block_loader(builder, k, rs_k, last, dtype, lanes, storage)
        for d, column in enumerate(_columns(builder, load, lanes, _inner(dtype, lanes))):
            store_vector(builder, panel, builder.mul(ir.Constant(I64, d), rs_panel), column)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, k, rs_k, last, panel, rs_panel):
        size = types.int64
        return types.void(k, types.unliteral(rs_k), size, panel, size), codegen

    return run


@functools.cache
def dot_square(dtype: str, lanes: int, storage: str, rows: int):
    """Intrinsic: totals[m][n] + sum_d q[m, d] * k[n, d] for `lanes` keys n and as many dims d.

    The keys are transposed in registers, so that a score is one chain along d, as in product().

    q       (rows, lanes), row stride rs_q; rows past the last, too, repeat it
    k       as in transpose_square()
    totals  `rows` registers: see row_registers()
    asks    whether to load as many bytes as a square has from `near`, line by line, to have them
            when they are wanted; with several rows, what lies FAR bytes behind is asked for, too
    touched  a register that comes to depend on what they hold
    """
    register = Register("float", dtype, lanes)
    stored = ir.VectorType(STORED[storage], lanes)
    lines = lanes * lanes * ITEMSIZE[storage] // LINE

    def codegen(context, builder, sig, args):
        q, rs_q, last_q, k, rs_k, last, totals, near, asks, touched = args
        far = FAR // ITEMSIZE[storage] if rows > 1 else 0
        touched = _ask_for(builder, near, far, asks, touched, lines, (stored, storage, dtype))
        load = _block_loader(builder, k, rs_k, last, dtype, lanes, storage)
        q_rows = [q]
        for m in range(1, rows):
            is_there = builder.icmp_signed("<=", ir.Constant(I64, m), last_q)
            step = builder.select(is_there, rs_q, ir.Constant(I64, 0))
            q_rows.append(builder.gep(q_rows[-1], [step]))
        sums = cgutils.unpack_tuple(builder, totals, rows)
        for d, column in enumerate(_columns(builder, load, lanes, _inner(dtype, lanes))):
            for m, row in enumerate(q_rows):
                element = builder.load(builder.gep(row, [ir.Constant(I64, d)]))
                q_d = broadcast(builder, element, lanes)
                sums[m] = call(builder, "fma", [q_d, column, sums[m]])
        sums = context.make_tuple(builder, held, sums)
        return context.make_tuple(builder, sig.return_type, [sums, touched])

    held = types.UniTuple(register, rows)

    @intrinsic
    def run(typingctx, q, rs_q, last_q, k, rs_k, last, totals, near, asks, touched):
        size, result = types.int64, types.Tuple((held, register))
        return result(
            q, size, size, k, types.unliteral(rs_k), size, held, k, types.boolean, register
        ), codegen

    return run


def _ask_for(builder, near, far: int, asks, touched, lines: int, kinds: tuple):
    """LLVM value: `touched`, or the larger of it and a register of each line from `near` on. Lines
    `far` elements behind are asked for, unless that is 0.
    """
    stored, storage, dtype = kinds
    before = builder.block
    with builder.if_then(asks):
        top = touched
        for line in range(lines):
            place = line * LINE // ITEMSIZE[storage]
            value = load_vector(builder, near, ir.Constant(I64, place), stored)
            if far:
                prefetch_line(builder, near, ir.Constant(I64, place + far))
            top = greater(builder, top, from_storage(builder, value, storage, dtype))
        asked = builder.block
    result = builder.phi(touched.type)
    result.add_incoming(touched, before)
    result.add_incoming(top, asked)
    return result


@functools.cache
def row_registers(dtype: str, lanes: int, rows: int):
    """Intrinsics (zeros, store): a tuple of `rows` registers of 0; into rows of memory, `stride`
    elements apart.
    """
    register = Register("float", dtype, lanes)
    held = types.UniTuple(register, rows)

    @intrinsic
    def zeros(typingctx):
        def codegen(context, builder, sig, args):
            return context.make_tuple(builder, held, [constant(register.vector, 0.0)] * rows)

        return held(), codegen

    @intrinsic
    def store(typingctx, to, stride, values):
        def codegen(context, builder, sig, args):
            to, stride, values = args
            for m, value in enumerate(cgutils.unpack_tuple(builder, values, rows)):
                store_vector(builder, to, builder.mul(ir.Constant(I64, m), stride), value)
            return context.get_dummy_value()

        return types.void(to, types.int64, held), codegen

    return zeros, store
