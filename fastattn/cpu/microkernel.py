"""Register-tile products.

The order of additions is part of the contract: every element of a product is one chain of fused
multiply-adds along the contracted axis, whatever tile it falls into. A row's result therefore does
not depend on its neighbours.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..machine import AVX512, VectorUnit
from .asks import INTEGERS, take
from .job import LINE
from .memory import at
from .registers import (
    FLOAT,
    I64,
    ITEMSIZE,
    broadcast,
    call,
    constant,
    halves,
    jit,
    load_vector,
    lower_lanes,
    prefetch_line,
    row_offset,
    store_vector,
    twice,
)

# (mr rows, nv registers of columns) by number of vector registers: mr * nv accumulators + nv
# columns + 1 broadcast fit. 14 rows would, too, but plan.MC is whole tiles of 12: a tile of two
# rows takes as long as one of four, as each sum waits for itself (Zen 5: 0.97 of the time).
TILE = {16: (6, 2), 32: (12, 2)}
# The same where half a register of columns follows, in which two rows share one: 12 rows by 2.5
# would need 34 registers. Both are parts of plan.MC.
HALF_TILES = ((8, 2), (12, 1))
ROWS_AHEAD = 32  # rows to ask for while one is packed, or found by a table


def tile_shape(unit: VectorUnit) -> tuple[int, int]:
    """(mr, nv) of the register tile on this vector unit."""
    return TILE[unit.registers]


@functools.cache
def product(
    dtype: str,
    lanes: int,
    mr: int,
    nv: int,
    transposed: bool = False,
    asks: int = 0,
    level: int = 2,
    besides: bool = False,
    goes_on: bool = False,
    half: bool = False,
    fewer: bool = False,
):
    """Intrinsic: c[m, n] (+)= sum_d a[m, d] * b[d, n] for one mr x (nv * lanes) tile, held in
    registers.

    The sum starts at 0 and c is added last: rounding errors grow with the length of one chain, not
    of all of them.

    a  (mr, depth), row stride rs_a, columns contiguous; if transposed, (depth, mr) likewise
    b  (depth, nv * lanes), row stride rs_b, columns contiguous: one packed panel, or rows as they
       lie; or where the table of offsets at rs_b says
    c  (mr, nv * lanes), row stride rs_c, columns contiguous
    accumulate  int64: 0 to overwrite c, else to add to it
    asks  how many rows of b ahead to ask for, if any, and into which level of the caches;
          ROWS_AHEAD where a table says
    besides  whether it takes two more arguments, of asks.take(): what to ask for besides
    goes_on  whether the chains go on from what c holds, instead
    half  whether the tile has half a register of columns more, of two rows in one register; then mr
          is even, and after those of `besides` come two more arguments: where these columns of b
          lie, and their row stride
    fewer  whether it takes, after those of `besides`, how many rows there are: past the last one of
           a and c comes that one again

    Requires  mr * nv + nv + 1 vector registers, with `half` mr // 2 + 2 more. depth may be 0.
    Writes    c only; reads it only if accumulate (its old contents may else be NaN).
    Source    Van Zee and van de Geijn 2015, BLIS: A Framework for Rapidly Instantiating BLAS
              Functionality.
    """
    vector = ir.VectorType(FLOAT[dtype], lanes)
    tile = [(m, n) for m in range(mr) for n in range(nv)]
    tile += [(m, nv) for m in range(0, mr, 2) if half]

    def codegen(context, builder, sig, args):
        a, rs_a, b, rs_b, c, rs_c, depth, accumulate, *more = args
        other, shared = more[:2], more[2:] if half else []
        number = functools.partial(ir.Constant, I64)
        rows = [number(m) for m in range(mr)]
        if fewer:
            last = builder.sub(more[2], number(1))
            rows = [builder.select(builder.icmp_signed("<", m, last), m, last) for m in rows]
        a_rows = [builder.gep(a, [builder.mul(row, rs_a)]) for row in rows]
        c_at = {
            (m, n): builder.add(builder.mul(rows[m], rs_c), number(n * lanes))
            for m in range(mr)
            for n in range(nv + half)
        }
        zero, is_table = constant(vector, 0.0), isinstance(rs_b.type, ir.PointerType)
        start = {t: load_vector(builder, c, c_at[t], vector) if goes_on else zero for t in tile}
        lower = lower_lanes(builder, lanes) if half else None
        before = builder.block
        loop, done = builder.append_basic_block("depth"), builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed(">", depth, number(0)), loop, done)

        builder.position_at_end(loop)
        d = builder.phi(I64)
        row, a_row = builder.phi(b.type), builder.phi(a.type)
        lines = [builder.phi(pointer.type) for pointer in other[:1]]
        shared_rows = [builder.phi(pointer.type) for pointer in shared[:1]]
        acc = {t: builder.phi(vector) for t in tile}
        own_row = builder.gep(b, [row_offset(builder, rs_b, d)]) if is_table else row
        if is_table or asks:
            ahead = builder.add(d, number(ROWS_AHEAD)) if is_table else number(asks)
            later_row = builder.gep(b if is_table else row, [row_offset(builder, rs_b, ahead)])
            for place in range(0, nv * lanes, LINE // ITEMSIZE[dtype]):
                prefetch_line(builder, later_row, number(place), level)
        for line in lines:
            prefetch_line(builder, line, number(0))
        columns = [load_vector(builder, own_row, number(n * lanes), vector) for n in range(nv)]
        for line in shared_rows:
            part = load_vector(builder, line, number(0), ir.VectorType(vector.element, lanes // 2))
            columns.append(twice(builder, part))
        new, elements = {}, []
        for m in range(mr):
            place = builder.gep(a_row, [rows[m]]) if transposed else builder.gep(a_rows[m], [d])
            elements.append(broadcast(builder, builder.load(place), lanes))
            for n in range(nv):
                new[m, n] = call(builder, "fma", [elements[m], columns[n], acc[m, n]])
            if half and m % 2 == 1:
                pair, both = (m - 1, nv), builder.select(lower, elements[m - 1], elements[m])
                new[pair] = call(builder, "fma", [both, columns[nv], acc[pair]])
        d_next = builder.add(d, number(1))
        row_next = row if is_table else builder.gep(row, [rs_b])
        steps = [(d, number(0), d_next), (row, b, row_next), (a_row, a, builder.gep(a_row, [rs_a]))]
        steps += [(line, other[0], builder.gep(line, [other[1]])) for line in lines]
        steps += [(line, shared[0], builder.gep(line, [shared[1]])) for line in shared_rows]
        for phi, first, step in steps + [(acc[t], start[t], new[t]) for t in tile]:
            phi.add_incoming(first, before)
            phi.add_incoming(step, loop)
        builder.cbranch(builder.icmp_signed("<", d_next, depth), loop, done)

        builder.position_at_end(done)
        for t in tile:
            total = acc[t] = builder.phi(vector)
            total.add_incoming(start[t], before)
            total.add_incoming(new[t], loop)
        if goes_on:
            for t in tile:
                store_vector(builder, c, c_at[t], acc[t])
            return context.get_dummy_value()
        parts = {t: acc[t] for t in tile if t[1] < nv}
        for m in range(0, mr if half else 0, 2):
            parts[m, nv], parts[m + 1, nv] = halves(builder, acc[m, nv])
        with builder.if_else(builder.icmp_signed("!=", accumulate, number(0))) as (add, overwrite):
            with add:
                # All of them before the first is written: rows may be one row.
                old = {t: load_vector(builder, c, c_at[t], parts[t].type) for t in parts}
                for t, part in parts.items():
                    store_vector(builder, c, c_at[t], builder.fadd(old[t], part))
            with overwrite:
                for t, part in parts.items():
                    store_vector(builder, c, c_at[t], part)
        return context.get_dummy_value()

    def typed(a, b, rs_b, c, *other):
        size = types.int64
        return types.void(a, size, b, types.unliteral(rs_b), c, size, size, size, *other), codegen

    @intrinsic
    def tile_product(typingctx, a, rs_a, b, rs_b, c, rs_c, depth, accumulate):
        return typed(a, b, rs_b, c)

    @intrinsic
    def asking_product(typingctx, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, line, step):
        return typed(a, b, rs_b, c, line, types.int64)

    @intrinsic
    def half_product(
        typingctx, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, line, step, shared, rs_shared
    ):
        return typed(a, b, rs_b, c, line, types.int64, shared, types.int64)

    @intrinsic
    def low_product(typingctx, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, line, step, count):
        return typed(a, b, rs_b, c, line, types.int64, types.int64)

    if half or fewer:
        return half_product if half else low_product
    return asking_product if besides else tile_product


@functools.cache
def rows_product(dtype: str, lanes: int, mr: int, nv: int, transposed: bool = False):
    """Kernel: product() for any number of rows: the tall tile, then lower ones.

    asks  a list of asks.py, or null

    Four rows of two registers or fewer take four cycles a step, as each sum waits for itself. So no
    tile is lower, and a few rows more than a tall one's are two of even height (Zen 5, cycles: five
    rows as 4 + 1 7.4 to 8.0, as six 5.9; seven as 4 + 2 + 1 10.8 to 12, as eight 8.0).
    """
    tall = product(dtype, lanes, mr, nv, transposed, besides=True)
    high, six, four = (
        product(dtype, lanes, m, nv, transposed, besides=True, fewer=True)
        for m in (mr * 2 // 3, 6, 4)
    )

    @jit
    def run(rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks):
        m = 0
        while m < rows:
            line, step = take(asks, depth, b)
            x, y, left = at(a, m if transposed else m * rs_a), at(c, m * rs_c), rows - m
            if left == mr or left > mr + 2:
                m += mr
                tall(x, rs_a, b, rs_b, y, rs_c, depth, accumulate, line, step)
            elif left == 7 or left == 8 or left > mr:
                m += mr * 2 // 3
                high(x, rs_a, b, rs_b, y, rs_c, depth, accumulate, line, step, left)
            elif left > 4:
                m += 6
                six(x, rs_a, b, rs_b, y, rs_c, depth, accumulate, line, step, left)
            else:
                m += 4
                four(x, rs_a, b, rs_b, y, rs_c, depth, accumulate, line, step, left)

    return run


@functools.cache
def shared_product(dtype: str, lanes: int, mr: int, nv: int):
    """Kernel: product() with half a register of columns more, for as many rows as fill tiles;
    returns how many these are.
    """
    tile = product(dtype, lanes, mr, nv, besides=True, half=True)

    @jit
    def run(rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks, shared, rs_shared):
        done = rows // mr * mr
        for m in range(0, done, mr):
            line, step = take(asks, depth, b)
            x, y = at(a, m * rs_a), at(c, m * rs_c)
            tile(x, rs_a, b, rs_b, y, rs_c, depth, accumulate, line, step, shared, rs_shared)
        return done

    return run


@functools.cache
def asking_product(dtype: str, unit: VectorUnit, transposed: bool = False):
    """Kernel: product() for any number of rows against one panel.

    wide  whether the panel has nv registers, or one
    asks  a list of asks.py, or null
    """
    lanes, (mr, nv) = unit.lanes(ITEMSIZE[dtype]), tile_shape(unit)
    whole, slim = (rows_product(dtype, lanes, mr, n, transposed) for n in (nv, 1))

    @jit
    def run(wide, rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks):
        if wide:
            whole(rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks)
        else:
            slim(rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks)

    return run


@functools.cache
def panel_product(dtype: str, unit: VectorUnit, transposed: bool = False):
    """Kernel: the same, asking for nothing."""
    multiply = asking_product(dtype, unit, transposed)

    @jit
    def run(wide, rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate):
        multiply(wide, rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, INTEGERS(0))

    return run


@functools.cache
def sharing_product(dtype: str, unit: VectorUnit):
    """Kernel: asking_product() where rows may share registers in the last columns.

    left     columns from those of this panel on
    done     rows that share registers in all of these columns, and need nothing here
    after, rs_after  the panel that follows, and its row stride
    Returns `done` of the panel that follows.
    """
    multiply, lanes = asking_product(dtype, unit), unit.lanes(ITEMSIZE[dtype])
    # Zen 5, and servers before it, take as long for half a register as for a whole one.
    shares, half, nr = unit == AVX512, lanes // 2, tile_shape(unit)[1] * lanes
    two, one = (shared_product(dtype, lanes, m, n) for m, n in HALF_TILES)

    @jit
    def run(left, done, rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks, after, rs_after):
        if shares:
            place = rows, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks
            if nr < left and left <= nr + half:
                done = two(*place, after, rs_after)
            elif lanes < left and left <= lanes + half:
                done = one(*place, at(b, lanes), rs_b)
        a, c, rest = at(a, done * rs_a), at(c, done * rs_c), rows - done
        multiply(left > lanes, rest, a, rs_a, b, rs_b, c, rs_c, depth, accumulate, asks)
        return done

    return run
