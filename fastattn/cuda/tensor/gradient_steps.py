"""The steps of the kernels of gradients: each works on a whole tile, unrolled, in registers."""

from __future__ import annotations

import math
from types import SimpleNamespace

from .lost_steps import finite_steps
from .mma import F32, I16, I32, I64
from .operation import floats, i32, i64, operation, types, u32, void, words
from .products import add_weighted_rows, rows_by_rows
from .tiles import ITEM, Accumulator, Copy, SharedTile, Source

LOG2_E = 1 / math.log(2)


def gradient_steps(tiling) -> SimpleNamespace:
    """All of them, by name."""
    storage, warp_m = tiling.storage, tiling.block_m // tiling.warps
    own = SharedTile.of(tiling.block_m, tiling.head_dim)
    other = SharedTile.of(tiling.block_n, tiling.head_dim)
    scores = Accumulator(warp_m, tiling.block_n)
    output = Accumulator(warp_m, tiling.head_dim)
    own_copy, other_copy = Copy(own, tiling.threads), Copy(other, tiling.threads)
    state = floats(scores.thread_rows)

    def copier(copying: Copy):
        @operation(storage, void, i64, i64, i64, i64, u32, i64)
        def load(e, address, row_bytes, columns, column_bytes, base, rows):
            """Start to copy `rows` rows from an address to a tile at `base`."""
            columns = e.b.trunc(columns, I32) if tiling.padded or tiling.strided else None
            column_bytes = column_bytes if tiling.strided else None
            address = e.add(address, copying.offset(e, row_bytes, column_bytes))
            rows = e.b.trunc(e.larger(e.smaller(rows, copying.tile.rows), 0), I32)
            source = Source(address, row_bytes, columns, column_bytes)
            copying.start(e, source, copying.shared_address(e, base), rows)

        return load

    @operation(storage, u32)
    def shared_base(e):
        return e.shared_base()

    @operation(storage, u32, u32)
    def copy_to(e, base):
        """Where a thread's first copy goes, of a tile at `base` of those that stream through."""
        return other_copy.shared_address(e, base)

    @operation(storage, void)
    def commit(e):
        e.commit()

    @operation(storage, void)
    def wait_one(e):
        e.wait(1)
        e.barrier()

    @operation(storage, void)
    def wait_all(e):
        e.wait(0)

    @operation(storage, void)
    def barrier(e):
        e.barrier()

    @operation(storage, void, u32, types.float64)
    def signed(e, base, sign):
        """The tile at `base`, which has arrived, times the sign of scale."""
        times, shared = e.times(e.b.fptrunc(sign, F32)), own_copy.shared_address(e, base)
        for row, chunk in own_copy.passes():
            address, place = own.moved(e, shared, row, chunk)
            changed = [times(x) for x in e.load_shared_16(address, place)]
            e.store_shared(address, place, changed)

    @operation(storage, floats(scores.size), u32, u32)
    def products(e, base, other_base):
        """The warp's own rows times those that stream through, transposed."""
        rows = own.lane_address(e, base, e.mul(e.warp(), warp_m))
        columns = other.lane_address_b(e, other_base)
        return rows_by_rows(e, own, rows, other, columns, scores)

    @operation(storage, floats(output.size), floats(output.size), words(scores.size // 2), u32)
    def add_product(e, acc, weights, other_base):
        at = other.lane_address_v(e, other_base)
        return add_weighted_rows(e, acc, weights, scores, other, at, output)

    @operation(storage, floats(output.size))
    def no_output(e):
        return [e.f32(0)] * output.size

    def lane_place(e):
        """(first row, first column) of a thread's scores, in the thread block and the step."""
        row = e.add(e.mul(e.warp(), warp_m), e.shr(e.lane(), 2))
        return row, e.shl(e.both(e.lane(), 3), 1)

    def seen(e, low, high, stop):
        """Of each of a thread's scores, whether its column lies in [low + row, high + row) and
        before `stop`.
        """
        found = [None] * scores.size
        first, column = lane_place(e)
        for r in range(scores.thread_rows):
            row = e.add(first, scores.row_of(r))
            begin = e.sub(e.add(low, row), column)
            end = e.sub(e.smaller(e.add(high, row), stop), column)
            for i, n in scores.of_row(r):
                found[i] = e.b.and_(e.less(n, end), e.b.not_(e.less(n, begin)))
        return found

    def vector(e, address, first, count):
        """Element `first` of float32 in global memory, 0 from `count` on."""
        wanted = e.b.and_(e.less(first, count), e.b.not_(e.less(first, e.i32(0))))
        place = e.add(address, e.shl(e.b.sext(first, I64), 2))
        return e.load_global("f32", place, wanted), wanted

    def exponent(e, reference, wanted):
        """What is added to base-2 scores: -inf for rows that are not there, whose p is then 0."""
        return e.b.select(wanted, e.b.fmul(reference, e.f32(-LOG2_E)), e.f32(-math.inf))

    @operation(storage, types.UniTuple(state, 2), i64, i64, i64)
    def row_vectors(e, reference, delta, count):
        """(exponent, delta) of a thread's rows. Addresses of those of the block's first row."""
        first, _ = lane_place(e)
        count = e.b.trunc(e.smaller(count, tiling.block_m), I32)
        found = [], []
        for r in range(scores.thread_rows):
            row = e.add(first, scores.row_of(r))
            value, wanted = vector(e, reference, row, count)
            found[0].append(exponent(e, value, wanted))
            found[1].append(vector(e, delta, row, count)[0])
        return found

    def differences(e, s, dp, scale, exponents, delta, window):
        """(p, ds) packed: p = exp2(s * scale + exponent), ds = p * (dp - delta), and 0 outside the
        window, if there is one, even where they are NaN.
        """
        scale = e.b.fptrunc(scale, F32)
        p = [e.exp2(e.fma(x, scale, exponents[i])) for i, x in enumerate(s)]
        ds = [e.b.fmul(p[i], e.b.fsub(dp[i], delta[i])) for i in range(len(s))]
        if window:
            visible = seen(e, *window)
            p, ds = (
                [e.b.select(visible[i], x, e.f32(0)) for i, x in enumerate(values)]
                for values in (p, ds)
            )
        return [[e.pack(*pair) for pair in zip(x[::2], x[1::2], strict=True)] for x in (p, ds)]

    pairs = types.UniTuple(words(scores.size // 2), 2)
    inputs = floats(scores.size), floats(scores.size), types.float64
    limits = i32, i32, i32

    def by_rows(*window_types):
        @operation(storage, pairs, *inputs, state, state, *window_types)
        def of_rows(e, s, dp, scale, exponents, delta, *window):
            """differences() where rows are queries."""
            of = {i: r for r in range(scores.thread_rows) for i, _ in scores.of_row(r)}
            exponents, delta = ([x[of[i]] for i in range(scores.size)] for x in (exponents, delta))
            return differences(e, s, dp, scale, exponents, delta, window)

        return of_rows

    def by_columns(*window_types):
        @operation(storage, pairs, *inputs, i64, i64, i64, *window_types)
        def of_columns(e, s, dp, scale, reference, delta, count, *window):
            """differences() where columns are queries, whose numbers are at these addresses."""
            count = e.b.trunc(e.smaller(count, tiling.block_n), I32)
            _, first = lane_place(e)
            known = {}
            for _, n in scores.of_row(0):
                value, wanted = vector(e, reference, e.add(first, n), count)
                taken = vector(e, delta, e.add(first, n), count)[0]
                known[n] = exponent(e, value, wanted), taken
            of = {i: n for r in range(scores.thread_rows) for i, n in scores.of_row(r)}
            found = zip(*(known[of[i]] for i in range(scores.size)), strict=True)
            return differences(e, s, dp, scale, *map(list, found), window)

        return of_columns

    @operation(storage, void, floats(output.size), types.float64, i64, i64, i64, i64)
    def store(e, acc, factor, address, row_bytes, columns, rows):
        """acc * factor, rounded, to rows whose columns are neighbours."""
        factor = e.b.fptrunc(factor, F32)
        first, column = lane_place(e)
        columns = e.b.trunc(columns, I32)
        rows = e.b.trunc(e.smaller(rows, tiling.block_m), I32)
        for r in range(output.thread_rows):
            row = e.add(first, output.row_of(r))
            to = e.add(address, e.mul(e.i64(row), row_bytes))
            to = e.add(to, e.shl(e.i64(column), 1))
            registers = output.of_row(r)
            for (low, n), (high, _) in zip(registers[::2], registers[1::2], strict=True):
                pair = e.pack(*(e.b.fmul(acc[i], factor) for i in (low, high)))
                exists, place = e.less(row, rows), e.add(to, ITEM * n)
                if not tiling.padded:
                    e.store_global("b32", place, [pair], exists)
                    continue
                for half in (0, 1):  # rows may begin at odd elements
                    value = e.b.trunc(e.shr(pair, 16 * half), I16)
                    wanted = e.b.and_(exists, e.less(e.add(column, n + half), columns))
                    e.store_global("b16", e.add(place, ITEM * half), [value], wanted)

    return SimpleNamespace(
        own_bytes=own.nbytes,
        other_bytes=other.nbytes,
        load_own=copier(own_copy),
        load_other=copier(other_copy),
        shared_base=shared_base,
        copy_to=copy_to,
        commit=commit,
        wait_one=wait_one,
        wait_all=wait_all,
        barrier=barrier,
        signed=signed,
        products=products,
        add_product=add_product,
        no_output=no_output,
        row_vectors=row_vectors,
        by_rows=by_rows(),
        by_rows_in=by_rows(*limits),
        by_columns=by_columns(),
        by_columns_in=by_columns(*limits),
        store=store,
        **finite_steps(storage, other_copy, waits=False),
    )
