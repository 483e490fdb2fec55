"""Register-tile products and the packing of their operands.

The order of additions is part of the contract: every element of a product is one chain of fused
multiply-adds along the contracted axis, whatever tile it falls into. A row's result therefore does
not depend on its neighbours.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..machine import VectorUnit
from .job import LINE
from .memory import at, element_loader, prefetch, row_at, rows_from
from .registers import (
    FLOAT,
    I64,
    ITEMSIZE,
    STORED,
    broadcast,
    call,
    constant,
    from_storage,
    jit,
    load_vector,
    prefetch_line,
    row_offset,
    store_vector,
)
from .simd import operations

# (mr rows, nv registers of columns) by number of vector registers: mr * nv accumulators + nv
# columns + 1 broadcast fit.
TILE = {16: (6, 2), 32: (14, 2)}
ROWS_AHEAD = 32  # rows to ask for while one is packed


def tile_shape(unit: VectorUnit) -> tuple[int, int]:
    """(mr, nv) of the register tile on this vector unit."""
    return TILE[unit.registers]


@functools.cache
def product(dtype: str, lanes: int, mr: int, nv: int, transposed: bool = False):
    """Intrinsic: c[m, n] (+)= sum_d a[m, d] * b[d, n] for one mr x (nv * lanes) tile, held in
    registers.

    The sum starts at 0 and c is added last: rounding errors grow with the length of one chain, not
    of all of them.

    a  (mr, depth), row stride rs_a, columns contiguous; if transposed, (depth, mr) likewise
    b  (depth, nv * lanes), row stride rs_b, columns contiguous: one packed panel, or rows as they
       lie; or where the table of offsets at rs_b says
    c  (mr, nv * lanes), row stride rs_c, columns contiguous
    accumulate  int64: 0 to overwrite c, else to add to it

    Requires  mr * nv + nv + 1 vector registers. depth may be 0.
    Writes    c only; reads it only if accumulate (its old contents may else be NaN).
    Source    Van Zee and van de Geijn 2015, BLIS: A Framework for Rapidly Instantiating BLAS
              Functionality.
    """
    vector = ir.VectorType(FLOAT[dtype], lanes)
    tile = [(m, n) for m in range(mr) for n in range(nv)]

    def codegen(context, builder, sig, args):
        a, rs_a, b, rs_b, c, rs_c, depth, accumulate = args
        number = functools.partial(ir.Constant, I64)
        a_rows = [builder.gep(a, [builder.mul(number(m), rs_a)]) for m in range(mr)]
        c_at = {
            (m, n): builder.add(builder.mul(number(m), rs_c), number(n * lanes)) for m, n in tile
        }
        zero, is_table = constant(vector, 0.0), isinstance(rs_b.type, ir.PointerType)
        before = builder.block
        loop, done = builder.append_basic_block("depth"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", depth, number(0)), loop, done)

        builder.position_at_end(loop)
        d = builder.phi(I64)
        row, a_row = builder.phi(b.type), builder.phi(a.type)
        acc = {t: builder.phi(vector) for t in tile}
        own_row = builder.gep(b, [row_offset(builder, rs_b, d)]) if is_table else row
        if is_table:
            ahead = builder.add(d, number(ROWS_AHEAD))
            later_row = builder.gep(b, [row_offset(builder, rs_b, ahead)])
            for place in range(0, nv * lanes, LINE // ITEMSIZE[dtype]):
                prefetch_line(builder, later_row, number(place))
        columns = [load_vector(builder, own_row, number(n * lanes), vector) for n in range(nv)]
        new = {}
        for m in range(mr):
            place = builder.gep(a_row, [number(m)]) if transposed else builder.gep(a_rows[m], [d])
            element = broadcast(builder, builder.load(place), lanes)
            for n in range(nv):
                new[m, n] = call(builder, "fma", [element, columns[n], acc[m, n]])
        d_next = builder.add(d, number(1))
        row_next = row if is_table else builder.gep(row, [rs_b])
        steps = [(d, number(0), d_next), (row, b, row_next), (a_row, a, builder.gep(a_row, [rs_a]))]
        for phi, start, step in steps + [(acc[t], zero, new[t]) for t in tile]:
            phi.add_incoming(start, before)
            phi.add_incoming(step, loop)
        builder.cbranch(builder.icmp_signed("<", d_next, depth), loop, done)

        builder.position_at_end(done)
        for t in tile:
            total = acc[t] = builder.phi(vector)
            total.add_incoming(zero, before)
            total.add_incoming(new[t], loop)
        with builder.if_else(builder.icmp_signed("!=", accumulate, number(0))) as (add, overwrite):
            with add:
                for t in tile:
                    old = load_vector(builder, c, c_at[t], vector)
                    store_vector(builder, c, c_at[t], builder.fadd(old, acc[t]))
            with overwrite:
                for t in tile:
                    store_vector(builder, c, c_at[t], acc[t])
        return context.get_dummy_value()

    @intrinsic
    def tile_product(typingctx, a, rs_a, b, rs_b, c, rs_c, depth, accumulate):
        size = types.int64
        return types.void(a, size, b, types.unliteral(rs_b), c, size, size, size), codegen

    return tile_product


@functools.cache
def panel_product(dtype: str, unit: VectorUnit, transposed: bool = False):
    """Kernel: product() for any number of rows against one panel: the tall tile, then lower ones.

    wide  whether the panel has nv registers, or one
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    mr, nv = tile_shape(unit)
    tall, four, two, one, slim_tall, slim_four, slim_two, slim_one = (
        product(dtype, lanes, m, n, transposed) for n in (nv, 1) for m in (mr, 4, 2, 1)
    )

    @jit
    def run(wide, rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate):
        m = 0
        while m < rows:
            x, y, left = at(a, m if transposed else m * rs_a), at(c, m * rs_c), rows - m
            if left >= mr:
                m += mr
                if wide:
                    tall(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
                else:
                    slim_tall(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
            elif left >= 4:
                m += 4
                if wide:
                    four(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
                else:
                    slim_four(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
            elif left >= 2:
                m += 2
                if wide:
                    two(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
                else:
                    slim_two(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
            else:
                m += 1
                if wide:
                    one(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)
                else:
                    slim_one(x, rs_a, b, rs_b, y, rs_c, depth, accumulate)

    return run


def _interleave(builder, x, y, size: int, lanes: int, group: int):
    """(low, high): within each group of lanes, runs of `size` lanes of x and y in turn: x0 y0 x1
    y1 ... (one instruction).
    """
    index = ir.VectorType(ir.IntType(32), lanes)
    halves = []
    for half in range(2):
        order = []
        for start in range(0, lanes, group):
            for run in range(group // (2 * size)):
                first = start + (half * group // 2) + run * size
                order += list(range(first, first + size))
                order += list(range(lanes + first, lanes + first + size))
        halves.append(builder.shuffle_vector(x, y, ir.Constant(index, order)))
    return halves


def _swap_blocks(builder, x, y, size: int, lanes: int):
    """(x', y'): blocks of `size` lanes; x' takes the even blocks of x and y in turn, y' the odd
    ones.
    """
    index = ir.VectorType(ir.IntType(32), lanes)
    pair = []
    for odd in range(2):
        order = []
        for start in range(0, lanes, 2 * size):
            first = start + odd * size
            order += list(range(first, first + size)) + list(
                range(lanes + first, lanes + first + size)
            )
        pair.append(builder.shuffle_vector(x, y, ir.Constant(index, order)))
    return pair


def transposed(builder, rows: list) -> list:
    """LLVM values: the transpose of a square of registers. First inside 128-bit lanes, then whole
    lanes change places.
    """
    lanes = len(rows)
    inner = min(lanes, 16 // (4 if rows[0].type.element == ir.FloatType() else 8))
    for size in (1, 2) if inner == 4 else (1,):
        rows = _transpose_stage(builder, rows, size, inner, lanes)
    size = inner
    while size < lanes:
        for i in range(lanes):
            if not i & size:
                rows[i], rows[i + size] = _swap_blocks(
                    builder, rows[i], rows[i + size], size, lanes
                )
        size *= 2
    return rows


def _transpose_stage(builder, rows, size, inner, lanes):
    """One stage inside 128-bit lanes: size 1 then (for four floats a lane) size 2, by the
    interleaving instructions.
    """
    out = list(rows)
    for base in range(0, lanes, inner):
        if inner == 2:
            out[base], out[base + 1] = _interleave(builder, rows[base], rows[base + 1], 1, lanes, 2)
        elif size == 1:
            # rows 0, 1 -> (columns 0, 1), (columns 2, 3); rows 2, 3 likewise
            out[base], out[base + 1] = _interleave(builder, rows[base], rows[base + 1], 1, lanes, 4)
            out[base + 2], out[base + 3] = _interleave(
                builder, rows[base + 2], rows[base + 3], 1, lanes, 4
            )
        else:
            out[base], out[base + 1] = _interleave(builder, rows[base], rows[base + 2], 2, lanes, 4)
            out[base + 2], out[base + 3] = _interleave(
                builder, rows[base + 1], rows[base + 3], 2, lanes, 4
            )
    return out


def _load_square(builder, k, rs_k, last, dtype, lanes, storage):
    """LLVM values: `lanes` rows, rs_k apart, as dtype; rows past the last repeat it. A table of
    offsets goes on past it.
    """
    rows, is_table = [], isinstance(rs_k.type, ir.PointerType)
    for n in range(lanes):
        row = number = ir.Constant(I64, n)
        if not is_table:
            row = builder.select(builder.icmp_signed("<", number, last), number, last)
        stored = ir.VectorType(STORED[storage], lanes)
        value = load_vector(builder, k, row_offset(builder, rs_k, row), stored)
        rows.append(from_storage(builder, value, storage, dtype))
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
        rows = _load_square(builder, k, rs_k, last, dtype, lanes, storage)
        columns = transposed(builder, rows)
        for d, column in enumerate(columns):
            store_vector(builder, panel, builder.mul(ir.Constant(I64, d), rs_panel), column)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, k, rs_k, last, panel, rs_panel):
        size = types.int64
        return types.void(k, types.unliteral(rs_k), size, panel, size), codegen

    return run


@functools.cache
def dot_square(dtype: str, lanes: int, storage: str, rows: int):
    """Intrinsic: part[m, n] += sum_d q[m, d] * k[n, d] for `lanes` keys n and as many dims d.

    The keys are transposed in registers, so that a score is one chain along d, as in product().

    q     (rows, lanes), row stride rs_q
    k     as in transpose_square()
    part  (rows, lanes), contiguous
    """
    vector = ir.VectorType(FLOAT[dtype], lanes)

    def codegen(context, builder, sig, args):
        q, rs_q, k, rs_k, last, part = args
        number = functools.partial(ir.Constant, I64)
        square = _load_square(builder, k, rs_k, last, dtype, lanes, storage)
        columns = transposed(builder, square)
        for m in range(rows):
            place = number(m * lanes)
            row = builder.gep(q, [builder.mul(number(m), rs_q)])
            total = load_vector(builder, part, place, vector)
            for d, column in enumerate(columns):
                element = builder.load(builder.gep(row, [number(d)]))
                total = call(builder, "fma", [broadcast(builder, element, lanes), column, total])
            store_vector(builder, part, place, total)
        return context.get_dummy_value()

    @intrinsic
    def run(typingctx, q, rs_q, k, rs_k, last, part):
        size = types.int64
        return types.void(q, size, k, types.unliteral(rs_k), size, part), codegen

    return run


@functools.cache
def pack_k(dtype: str, unit: VectorUnit, storage: str):
    """Kernel: keys as panels (ceil(count / nr), head_dim, nr), so that a tile reads nr keys of one
    dim as registers.

    k  (count, head_dim) of storage type, strides rs_k (or a table of offsets), cs_k. Keys past the
       last repeat it: finite if it is, and masked by the caller.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    transpose, element = transpose_square(dtype, lanes, storage), element_loader(storage, dtype)
    line = LINE // ITEMSIZE[storage]

    @jit
    def run(k, rs_k, cs_k, count, head_dim, panels):
        whole = head_dim // lanes * lanes if cs_k == 1 else 0
        for n in range(0, count, lanes):
            panel = at(panels, n // nr * nr * head_dim + n % nr)
            (key, keys), last = rows_from(k, rs_k, n), count - 1 - n
            for d in range(0, whole, lanes):
                if d % line == 0:
                    for i in range(lanes):
                        prefetch(row_at(key, keys, ROWS_AHEAD + i), d)
                transpose(at(key, d), keys, last, at(panel, d * nr), nr)
            for d in range(whole, head_dim):
                for i in range(lanes):
                    panel[d * nr + i] = element(row_at(key, keys, min(i, last)), d * cs_k)

    return run


@functools.cache
def pack_v(dtype: str, unit: VectorUnit, storage: str):
    """Kernel: values as panels of nr columns, (block_n, width) each, the last one as wide as it
    needs to be.

    v  (count, head_dim_v) of storage type, strides rs_v (or a table of offsets), cs_v. Missing
       columns of the last panel become 0.
    Returns 0 if all values are finite, else 1.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    simd = operations(dtype, lanes)
    load, store, splat, fma, reduce_add = (
        simd.load,
        simd.store,
        simd.splat,
        simd.fma,
        simd.reduce_add,
    )
    scalar, line = getattr(np, dtype), LINE // ITEMSIZE[storage]
    load_stored, element = simd.loader(storage), element_loader(storage, dtype)

    @jit
    def run(v, rs_v, cs_v, count, block_n, head_dim_v, panels):
        zero = splat(scalar(0))
        check = zero  # stays 0 while all is finite: 0 * inf and 0 * NaN are NaN
        padded = (head_dim_v + lanes - 1) // lanes * lanes
        for n in range(count):
            row, ahead = row_at(v, rs_v, n), row_at(v, rs_v, n + ROWS_AHEAD)
            for d in range(0, head_dim_v if cs_v == 1 else 0, line):
                prefetch(ahead, d)
            for start in range(0, padded, nr):
                width = min(nr, padded - start)
                to = at(panels, start * block_n + n * width)
                for d in range(0, width, lanes):
                    if cs_v == 1 and start + d + lanes <= head_dim_v:
                        value = load_stored(row, start + d)
                        store(to, d, value)
                    else:
                        for i in range(lanes):
                            inside = start + d + i < head_dim_v
                            place = (start + d + i) * cs_v
                            to[d + i] = element(row, place) if inside else scalar(0)
                        value = load(to, d)
                    check = fma(value, zero, check)
        return 0 if reduce_add(check) == scalar(0) else 1

    return run
