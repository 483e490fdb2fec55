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
    load_vector,
    prefetch_line,
    row_offset,
    store_vector,
)

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


def _block_loader(builder, rows: list, dtype: str, storage: str) -> Callable:
    """load(row, first, count): part of one of the rows at these pointers, as dtype."""

    def load(row: int, first: int, count: int):
        vector = ir.VectorType(STORED[storage], count)
        value = load_vector(builder, rows[row], ir.Constant(I64, first), vector)
        return from_storage(builder, value, storage, dtype)

    return load


def _rows_of_square(builder, k, rs_k, last, lanes: int) -> list:
    """Pointers to `lanes` rows, rs_k apart; those past the last repeat it. A table of offsets goes
    on past it.
    """
    numbers = [ir.Constant(I64, n) for n in range(lanes)]
    if isinstance(rs_k.type, ir.PointerType):
        return [builder.gep(k, [row_offset(builder, rs_k, number)]) for number in numbers]
    rows = [k]
    for number in numbers[1:]:
        is_there = builder.icmp_signed("<=", number, last)
        step = builder.select(is_there, rs_k, ir.Constant(I64, 0))
        rows.append(builder.gep(rows[-1], [step]))
    return rows


@functools.cache
def transpose_square(dtype: str, lanes: int, storage: str):
    """Intrinsic: panel[d, n] = k[n, d] for lanes x lanes elements, through registers.

    k      of storage type, rows rs_k apart, columns contiguous: rows past the last repeat it; or a
           whole square of rows at the offsets that the table rs_k says
    panel  of dtype, row stride rs_panel, columns contiguous
    """

    def codegen(context, builder, sig, args):
        k, rs_k, last, panel, rs_panel = args
        load = _block_loader(
            builder, _rows_of_square(builder, k, rs_k, last, lanes), dtype, storage
        )
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
    """Intrinsic: totals[m] + sum_d q[m, d] * k[n, d] for `lanes` keys n and as many dims d.

    The keys are transposed in registers, so that a score is one chain along d, as in product().

    q       (rows, lanes), row stride rs_q; rows past the last, too, repeat it
    k       as in transpose_square()
    totals  `rows` registers: see row_registers()
    """
    held = types.UniTuple(Register("float", dtype, lanes), rows)

    def codegen(context, builder, sig, args):
        q, rs_q, last_q, k, rs_k, last, totals = args
        load = _block_loader(
            builder, _rows_of_square(builder, k, rs_k, last, lanes), dtype, storage
        )
        q_rows = _rows_of_square(builder, q, rs_q, last_q, rows)
        sums = cgutils.unpack_tuple(builder, totals, rows)
        for d, column in enumerate(_columns(builder, load, lanes, _inner(dtype, lanes))):
            _add_products(builder, sums, q_rows, d, column)
        return context.make_tuple(builder, held, sums)

    @intrinsic
    def run(typingctx, q, rs_q, last_q, k, rs_k, last, totals):
        size = types.int64
        return held(q, size, size, k, types.unliteral(rs_k), size, held), codegen

    return run


def _add_products(builder, sums: list, q_rows: list, d: int, column) -> None:
    """sums[m] += q[m, d] * column, in place."""
    for m, row in enumerate(q_rows):
        element = builder.load(builder.gep(row, [ir.Constant(I64, d)]))
        q_d = broadcast(builder, element, column.type.count)
        sums[m] = call(builder, "fma", [q_d, column, sums[m]])


def _columns_in_turn(builder, load: Callable, dtype: str, lanes: int, squares: int) -> Iterator:
    """(square, d, column d) of squares that lie one behind the other, some of each in turn: a chain
    of sums waits for itself.
    """
    inner = _inner(dtype, lanes)

    def load_of(square):
        return lambda row, first, count: load(square * lanes + row, first, count)

    sources = [_columns(builder, load_of(n), lanes, inner) for n in range(squares)]
    for first in range(0, lanes, inner):
        for n, source in enumerate(sources):
            for d in range(first, first + inner):
                yield n, d, next(source)


@functools.cache
def dot_squares(dtype: str, lanes: int, storage: str, rows: int, squares: int):
    """Intrinsic: dot_square() for `squares` of them, one behind the other, while later keys are
    asked for.

    k        whole squares, rows rs_k apart
    totals   squares * rows registers
    later    as many bytes as the squares have are asked for from here, a line at a time between the
             products; any address will do
    """
    held = types.UniTuple(Register("float", dtype, lanes), squares * rows)
    line, columns = LINE // ITEMSIZE[storage], squares * lanes
    lines = columns * lanes // line

    def codegen(context, builder, sig, args):
        q, rs_q, last_q, k, rs_k, totals, later = args
        q_rows = _rows_of_square(builder, q, rs_q, last_q, rows)
        sums = cgutils.unpack_tuple(builder, totals, squares * rows)
        parts = [sums[n * rows : (n + 1) * rows] for n in range(squares)]
        places = [builder.mul(rs_k, ir.Constant(I64, n)) for n in range(columns)]
        load = _block_loader(builder, [builder.gep(k, [p]) for p in places], dtype, storage)
        for done, (n, d, column) in enumerate(
            _columns_in_turn(builder, load, dtype, lanes, squares)
        ):
            for number in range(lines * done // columns, lines * (done + 1) // columns):
                prefetch_line(builder, later, ir.Constant(I64, number * line), 1)
            _add_products(builder, parts[n], q_rows, d, column)
        return context.make_tuple(builder, held, [x for part in parts for x in part])

    @intrinsic
    def run(typingctx, q, rs_q, last_q, k, rs_k, totals, later):
        size = types.int64
        return held(q, size, size, k, size, held, k), codegen

    return run


@functools.cache
def row_registers(dtype: str, lanes: int, rows: int, squares: int):
    """Intrinsics (zeros, keep): a tuple of squares * rows registers of 0; such registers into
    `rows` rows of memory `stride` elements apart, rows past the last into it once more (they hold
    the same): added to what is there if `accumulate`.
    """
    register = Register("float", dtype, lanes)
    held = types.UniTuple(register, squares * rows)

    @intrinsic
    def zeros(typingctx):
        def codegen(context, builder, sig, args):
            zero = constant(register.vector, 0.0)
            return context.make_tuple(builder, held, [zero] * (squares * rows))

        return held(), codegen

    @intrinsic
    def keep(typingctx, to, stride, last, values, accumulate):
        def codegen(context, builder, sig, args):
            to, stride, last, values, accumulate = args
            to_rows = _rows_of_square(builder, to, stride, last, rows)
            places = [(row, ir.Constant(I64, n * lanes)) for n in range(squares) for row in to_rows]
            new = cgutils.unpack_tuple(builder, values, squares * rows)
            old = [load_vector(builder, *place, register.vector) for place in places]
            for place, x, y in zip(places, old, new, strict=True):
                total = builder.select(accumulate, builder.fadd(x, y), y)
                store_vector(builder, *place, total)
            return context.get_dummy_value()

        size = types.int64
        return types.void(to, size, size, held, types.boolean), codegen

    return zeros, keep
