"""The two products of attention on tensor cores; every other one has the form of one of them."""

from __future__ import annotations

from .mma import Emitter
from .tiles import Accumulator, SharedTile


def rows_by_rows(e: Emitter, a: SharedTile, a_at, b: SharedTile, b_at, shape: Accumulator):
    """a · b^T of a warp's rows of a, rounded already, and all rows of b, as q · k. a_at:
    lane_address(), b_at: lane_address_b().
    """
    result = [e.f32(0)] * shape.size
    for column in range(0, a.columns, a.depth):
        left = [a.a_operand(e, a_at, m, column) for m in range(0, shape.rows, 16)]
        for n in range(0, shape.columns, 16):
            _multiply(e, left, b.b_operands(e, b_at, n, column), result, shape, n // 8)
    return result


def add_weighted_rows(
    e: Emitter, acc, weights, of: Accumulator, b: SharedTile, b_at, shape: Accumulator
):
    """acc + weights · b, as p · v. weights: packed, from an accumulator of shape `of`. b_at:
    lane_address_v().
    """
    acc = list(acc)
    for n in range(0, of.columns, b.depth):
        left = [of.a_operand(weights, m, n // b.depth) for m in range(of.tiles[0])]
        for column in range(0, b.columns, b.v_columns):
            _multiply(e, left, b.v_operands(e, b_at, n, column), acc, shape, column // 8)
    return acc


def _multiply(e: Emitter, left, right, acc, shape: Accumulator, n: int):
    """Add 16-row operands times operands of 8 columns, which begin at tile n and are rounded here:
    each is used for all rows of a warp.
    """
    for more, b in enumerate(right):
        b = e.rounded(b)
        for m, a in enumerate(left):
            i = shape.place(m, n + more)
            acc[i : i + 4] = e.mma(a, b, acc[i : i + 4])
