"""The steps of the forward kernel: each works on a whole tile, unrolled, in registers."""

from __future__ import annotations

import math
from types import SimpleNamespace

from .end_steps import end_steps
from .lost_steps import lost_steps
from .mma import F32, I32
from .operation import boolean, floats, i32, i64, operation, types, u32, void, words
from .products import add_weighted_rows, rows_by_rows
from .shapes import Shapes
from .tiles import Copy, PagedSource, SharedTile, Source
from .tilings import Tiling


def forward_steps(tiling: Tiling) -> SimpleNamespace:
    """All steps of one kernel, by name."""
    return SimpleNamespace(
        **copy_steps(tiling),
        **product_steps(tiling),
        **softmax_steps(tiling),
        **lost_steps(tiling),
        **end_steps(tiling),
    )


def copy_steps(tiling: Tiling) -> dict:
    """What fills the shared memory, and waits for it."""
    shapes = Shapes.of(tiling)
    steps: dict = {}
    for name in "qkv":
        steps |= _tile_steps(tiling, name, getattr(shapes, name))
    q_copy = Copy(shapes.q, tiling.threads)

    @operation(tiling.storage, u32)
    def shared_base(e):
        return e.shared_base()

    @operation(tiling.storage, void)
    def commit(e):
        e.commit()

    @operation(tiling.storage, void)
    def wait_one(e):
        """For all groups of copies but the last, of all threads."""
        e.wait(1)
        e.barrier()

    @operation(tiling.storage, void)
    def barrier(e):
        e.barrier()

    @operation(tiling.storage, void, u32, types.float64)
    def sign_q(e, shared, sign):
        """q times the sign of scale: softmax() takes the maximum before it scales, by |scale|. And
        rounded, as factors are. Each thread changes what it has copied itself.
        """
        e.wait(1)
        times = e.times(e.b.fptrunc(sign, F32))
        for row, chunk in q_copy.passes():
            address, place = shapes.q.moved(e, shared, row, chunk)
            changed = [times(x) for x in e.load_shared_16(address, place)]
            e.store_shared(address, place, e.rounded(changed))

    return steps | {
        "shared_base": shared_base,
        "commit": commit,
        "wait_one": wait_one,
        "barrier": barrier,
        "sign_q": sign_q,
    }


def _tile_steps(tiling: Tiling, name: str, tile: SharedTile) -> dict:
    """{name}_offset, {name}_copy_to, load_{name}, and load_{name}_edge with a count of rows."""
    copying = Copy(tile, tiling.threads)

    @operation(tiling.storage, i64, i64, i64)
    def offset(e, row_bytes, column_bytes):
        """Of this thread's first chunk in global memory."""
        return copying.offset(e, row_bytes, column_bytes if tiling.strided else None)

    @operation(tiling.storage, u32, u32)
    def copy_to(e, base):
        """Where it goes."""
        return copying.shared_address(e, base)

    def start(e, address, row_bytes, columns, column_bytes, shared, rows):
        source = Source(
            address,
            row_bytes,
            e.b.trunc(columns, I32) if tiling.padded or tiling.strided else None,
            column_bytes if tiling.strided else None,
            tiling.item,
        )
        copying.start(e, source, shared, rows)

    @operation(tiling.storage, void, i64, i64, i64, i64, u32)
    def load(e, address, row_bytes, columns, column_bytes, shared):
        start(e, address, row_bytes, columns, column_bytes, shared, None)

    @operation(tiling.storage, void, i64, i64, i64, i64, u32, i64)
    def load_edge(e, address, row_bytes, columns, column_bytes, shared, rows):
        rows = e.b.trunc(e.smaller(rows, tile.rows), I32)
        start(e, address, row_bytes, columns, column_bytes, shared, rows)

    @operation(tiling.storage, void, i64, i64, i64, u32, i64, i64, i64, i64, i64)
    def load_pages(e, address, row_bytes, columns, shared, rows, table, first, size, page_bytes):
        """Rows on pages; see PagedSource."""
        rows = e.b.trunc(e.smaller(rows, tile.rows), I32)
        first, size = e.b.trunc(first, I32), e.b.trunc(size, I32)
        columns = e.b.trunc(columns, I32) if tiling.padded else None
        pages, own_row = (table, first, size, page_bytes), copying.own(e)[0]
        source = PagedSource(address, row_bytes, columns, pages, own_row, rows, tiling.item)
        copying.start(e, source, shared, rows)

    @operation(tiling.storage, u32, u32, u32)
    def buffer(e, address, number):
        """The same place in a buffer, 0 or 1."""
        return e.add(address, e.mul(number, tile.nbytes))

    steps = {f"{name}_offset": offset, f"{name}_copy_to": copy_to, f"{name}_buffer": buffer}
    if name == "q":
        return steps | {"load_q": load_edge}
    steps |= {f"load_{name}": load, f"load_{name}_edge": load_edge}
    return steps | {f"load_{name}_pages": load_pages}


def product_steps(tiling: Tiling) -> dict:
    """q · k and p · v."""
    shapes = Shapes.of(tiling)
    scores, output = shapes.scores, shapes.output

    @operation(tiling.storage, u32, u32)
    def q_lane(e, base):
        return shapes.q.lane_address(e, base, e.mul(e.warp(), tiling.warp_m))

    @operation(tiling.storage, u32, u32)
    def k_lane(e, base):
        return shapes.k.lane_address_b(e, base)

    @operation(tiling.storage, u32, u32)
    def v_lane(e, base):
        return shapes.v.lane_address_v(e, base)

    @operation(tiling.storage, floats(scores.size), u32, u32)
    def products(e, q, k):
        """q · k of the warp's rows and the block's keys."""
        return rows_by_rows(e, shapes.q, q, shapes.k, k, scores)

    @operation(tiling.storage, floats(output.size), floats(output.size), words(shapes.weights), u32)
    def add_values(e, acc, p, v):
        """acc + p · v."""
        return add_weighted_rows(e, acc, p, scores, shapes.v, v, output)

    return {
        "q_lane": q_lane,
        "k_lane": k_lane,
        "v_lane": v_lane,
        "products": products,
        "add_values": add_values,
    }


def softmax_steps(tiling: Tiling) -> dict:
    """From scores to probabilities."""
    shapes = Shapes.of(tiling)
    scores, output = shapes.scores, shapes.output
    state = floats(scores.thread_rows)

    def constant(count: int, value: float):
        @operation(tiling.storage, floats(count))
        def start(e):
            return [e.f32(value)] * count

        return start

    @operation(tiling.storage, floats(scores.size), floats(scores.size), i32, i32, i32)
    def window(e, s, low, high, keys):
        """-inf for keys that a row does not see: row i of the thread block sees those in
        [low + i, high + i) that exist. All count from the first key of the block.
        """
        s = list(s)
        lane = e.lane()
        row = e.add(e.mul(e.warp(), tiling.warp_m), e.shr(lane, 2))
        column = e.shl(e.both(lane, 3), 1)
        for r in range(scores.thread_rows):
            here = e.i32(0) if tiling.packed else e.add(row, scores.row_of(r))
            begin = e.sub(e.add(low, here), column)
            end = e.sub(e.smaller(e.add(high, here), keys), column)
            for i, n in scores.of_row(r):
                seen = e.b.and_(e.less(n, end), e.b.not_(e.less(n, begin)))
                s[i] = e.b.select(seen, s[i], e.f32(-math.inf))
        return s

    @operation(
        tiling.storage,
        types.Tuple((floats(scores.size), state, state, state, boolean)),
        floats(scores.size),
        state,
        state,
        types.float64,
    )
    def weigh(e, s, row_max, row_sum, scale):
        """(p, row_max, row_sum, alpha, grown): probabilities less their sum; the state of the rows;
        what earlier outputs are to be multiplied by, and whether that is not 1 in any row of the
        warp. row_sum is a thread's own part of it.
        """
        scale = e.b.fptrunc(scale, F32)
        weights = [None] * scores.size
        new_max, new_sum, alphas, grown = [], [], [], None
        for r in range(scores.thread_rows):
            values = [s[i] for i, _ in scores.of_row(r)]
            here = _reduced(e, e.fmax, values)
            for mask in (1, 2):  # the four lanes that share the row
                here = e.fmax(here, e.lane_xor(here, mask))
            largest = e.fmax(row_max[r], here)
            # Where a row has seen nothing, exp2(-inf - 0) is 0, as it should be.
            nothing = e.b.fcmp_ordered("==", largest, e.f32(-math.inf))
            shift = e.negative(e.b.fmul(e.b.select(nothing, e.f32(0), largest), scale))
            alpha = e.exp2(e.fma(row_max[r], scale, shift))
            p = [e.exp2(e.fma(x, scale, shift)) for x in values]
            for (i, _), weight in zip(scores.of_row(r), p, strict=True):
                weights[i] = weight
            new_max.append(largest)
            new_sum.append(e.fma(row_sum[r], alpha, _reduced(e, e.b.fadd, p)))
            alphas.append(alpha)
            changed = e.b.fcmp_unordered("!=", alpha, e.f32(1))
            grown = changed if grown is None else e.b.or_(grown, changed)
        return [weights, new_max, new_sum, alphas, e.any_lane(grown)]

    @operation(tiling.storage, words(shapes.weights), floats(scores.size))
    def pack(e, p):
        """As add_values() takes them."""
        return packed(e, p)

    @operation(tiling.storage, floats(output.size), floats(output.size), types.float64)
    def times(e, acc, factor):
        factor = e.b.fptrunc(factor, F32)
        return [e.b.fmul(x, factor) for x in acc]

    @operation(tiling.storage, floats(output.size), floats(output.size), state)
    def rescale(e, acc, alpha):
        acc = list(acc)
        for r in range(output.thread_rows):
            for i, _ in output.of_row(r):
                acc[i] = e.b.fmul(acc[i], alpha[r])
        return acc

    return {
        "no_maximum": constant(scores.thread_rows, -math.inf),
        "no_sum": constant(scores.thread_rows, 0),
        "no_output": constant(output.size, 0),
        "window": window,
        "weigh": weigh,
        "pack": pack,
        "rescale": rescale,
        "times": times,
    }


def packed(e, p):
    """Floats as factors: pairs of neighbours, or each for itself."""
    return e.rounded(p) if e.storage == "tf32" else e.stored(p)


def _reduced(e, operation, values):
    """Of two independent chains."""
    chains = []
    for chain in (values[::2], values[1::2]):
        total = chain[0]
        for value in chain[1:]:
            total = operation(total, value)
        chains.append(total)
    return operation(*chains)
