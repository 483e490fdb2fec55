"""The steps of the specialised forward kernel that differ from forward_steps.py's."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

from .end_steps import end_steps
from .forward_steps import packed, softmax_steps
from .lost_steps import carried, cleared
from .operation import boolean, floats, i64, operation, u32, void, words
from .shapes import Shapes
from .tilings import Tiling
from .warpgroup import (
    GROUP,
    BoxedTile,
    add_product,
    any_thread_of,
    arrive_at,
    barrier_of,
    copy_tile,
    expect_at,
    group_number,
    kept,
    multiply_tiles,
    see_barriers,
    see_writes,
    share_registers,
    start_barrier,
    stay,
    wait_at,
    wait_for,
)

STAGES = 2  # buffers: those of a block are the lowest bit of how many there were before it
CHUNK_BYTES = 16  # what a thread looks at, at once
MULTIPLIERS = 1  # the barrier of those that multiply; 0 is that of all threads
# Registers of a thread that copies, and of one that multiplies, by how many warpgroups do: together
# no more than the block has. Counts are multiples of 8.
REGISTERS = {2: (24, 240), 3: (32, 160)}


class Barriers:
    """Places in shared memory: bytes from the first one."""

    q_full = 0
    k_full, k_empty, v_full, v_empty = (8 + 8 * STAGES * i for i in range(4))


def warpgroup_steps(tiling: Tiling) -> SimpleNamespace:
    """All steps, by name."""
    shared = softmax_steps(tiling) | end_steps(tiling)
    return SimpleNamespace(
        **shared
        | _copy_steps(tiling)
        | _turn_steps(tiling)
        | _product_steps(tiling)
        | _value_steps(tiling)
    )


def tiles_of(tiling: Tiling) -> tuple[BoxedTile, BoxedTile, BoxedTile]:
    """q, k and v in shared memory."""
    return (
        BoxedTile(tiling.block_m, tiling.head_dim),
        BoxedTile(tiling.block_n, tiling.head_dim),
        BoxedTile(tiling.block_n, tiling.head_dim_v),
    )


def _copy_steps(tiling: Tiling) -> dict:
    """Who does what; copies."""
    storage, groups = tiling.storage, tiling.warps // 4
    few, many = REGISTERS[groups]

    @operation(storage, u32)
    def shared_base(e):
        return e.shared_base()

    @operation(storage, void, u32)
    def start_barriers(e, barriers):
        """By the first thread, for all."""
        with e.b.if_then(e.b.icmp_signed("==", e.thread(), e.i32(0))):
            start_barrier(e, barriers, 1)
            for stage in range(STAGES):
                for place, arrivals in (
                    (Barriers.k_full, 1),
                    (Barriers.k_empty, tiling.warps),
                    (Barriers.v_full, 1),
                    (Barriers.v_empty, tiling.warps),
                ):
                    start_barrier(e, e.add(barriers, place + 8 * stage), arrivals)
            see_barriers(e)
        e.barrier()

    @operation(storage, boolean)
    def copies(e):
        """Whether this is a thread of the last warpgroup."""
        return e.b.icmp_signed("==", group_number(e), e.i32(groups))

    @operation(storage, boolean)
    def copies_alone(e):
        """Whether it is the first of them."""
        return e.b.icmp_signed("==", e.thread(), e.i32(groups * GROUP))

    @operation(storage, void)
    def give_registers(e):
        share_registers(e, False, few)

    @operation(storage, void)
    def take_registers(e):
        share_registers(e, True, many)

    @operation(storage, i64, i64, i64)
    def index_along(e, stride, index):
        """In a map, where an axis along which the array repeats itself has one place only."""
        return e.b.select(e.b.icmp_signed("==", stride, e.i64(0)), e.i64(0), index)

    steps = {
        "shared_base": shared_base,
        "index_along": index_along,
        "start_barriers": start_barriers,
        "copies": copies,
        "copies_alone": copies_alone,
        "give_registers": give_registers,
        "take_registers": take_registers,
    }
    for name, tile in zip("qkv", tiles_of(tiling), strict=True):
        steps[f"copy_{name}"] = _copy_step(storage, tile)
    return steps


def _copy_step(storage: str, tile: BoxedTile):
    @operation(storage, void, u32, u32, u32, i64, i64, i64, i64)
    def copy(e, to, full, turn, tensor, row, head, batch):
        """Into the buffer that it is the turn of."""
        full, to = _of_turn(e, full, turn, 8), _of_turn(e, to, turn, tile.nbytes)
        expect_at(e, full, tile.nbytes)
        row, head, batch = (e.b.trunc(x, e.i32(0).type) for x in (row, head, batch))
        copy_tile(e, tile, to, full, tensor, row, head, batch)

    return copy


def _of_turn(e, address, turn, nbytes: int):
    """The address in the buffer that it is the turn of."""
    return e.add(address, e.mul(e.both(turn, STAGES - 1), nbytes))


def _turn_steps(tiling: Tiling) -> dict:
    """Barriers of buffers. turn: how many blocks were in the buffers before."""
    storage = tiling.storage

    def parity(e, turn):
        return e.both(e.shr(turn, STAGES.bit_length() - 1), 1)

    @operation(storage, void, u32, u32)
    def wait_full(e, barriers, turn):
        wait_at(e, _of_turn(e, barriers, turn, 8), parity(e, turn))

    @operation(storage, void, u32, u32)
    def wait_empty(e, barriers, turn):
        """The first turn of a buffer does not wait: the phase before the first one is over."""
        wait_at(e, _of_turn(e, barriers, turn, 8), e.xor(parity(e, turn), 1))

    @operation(storage, void, u32, u32)
    def release(e, barriers, turn):
        """This warp needs the buffer no more."""
        arrive_at(e, _of_turn(e, barriers, turn, 8))

    @operation(storage, u32, u32)
    def next_turn(e, turn):
        return e.add(turn, 1)

    return {
        "wait_full": wait_full,
        "wait_empty": wait_empty,
        "release": release,
        "next_turn": next_turn,
    }


def _product_steps(tiling: Tiling) -> dict:
    shapes, (q_tile, k_tile, v_tile) = Shapes.of(tiling), tiles_of(tiling)
    storage, scores, output = tiling.storage, shapes.scores, shapes.output

    @operation(storage, i64, u32)
    def q_operand(e, base):
        """Of this warpgroup's rows."""
        first = e.mul(group_number(e), GROUP // 2 * 128)
        return q_tile.descriptor(e, e.add(base, first), True)

    @operation(storage, floats(scores.size), i64, u32, u32)
    def start_products(e, q, k, turn):
        """q · k of the warpgroup's rows and the block's keys."""
        k = k_tile.descriptor(e, _of_turn(e, k, turn, k_tile.nbytes), True)
        return multiply_tiles(e, q_tile, q, k_tile, k)

    @operation(storage, floats(scores.size), floats(scores.size))
    def all_products(e, s):
        return wait_for(e, s, 0)

    @operation(storage, floats(scores.size), floats(scores.size))
    def older_products(e, s):
        """All but those that add_values() has started since."""
        return wait_for(e, s, 1)

    @operation(storage, floats(output.size), floats(output.size), words(scores.size // 2), u32, u32)
    def add_values(e, acc, p, v, turn):
        """Start acc + p · v."""
        v = v_tile.descriptor(e, _of_turn(e, v, turn, v_tile.nbytes), False)
        return add_product(e, acc, p, v_tile, v)

    @operation(storage, floats(output.size), floats(output.size))
    def all_values(e, acc):
        return wait_for(e, acc, 0)

    @operation(storage, void)
    def weigh_first(e):
        """Before all_values(), which ptxas would else move above the softmax."""
        stay(e)

    @operation(storage, words(scores.size // 2), floats(scores.size))
    def pack(e, p):
        """Not before here: while a product reads the last ones, ptxas would let all of them wait
        for each other.
        """
        return packed(e, kept(e, p))

    return {
        "q_operand": q_operand,
        "start_products": start_products,
        "all_products": all_products,
        "older_products": older_products,
        "add_values": add_values,
        "all_values": all_values,
        "weigh_first": weigh_first,
        "pack": pack,
    }


def _value_steps(tiling: Tiling) -> dict:
    """As lost_steps.py: a look at values that some row does not see, by those that multiply."""
    storage, tile = tiling.storage, tiles_of(tiling)[2]
    threads = 32 * tiling.warps

    def chunks(e, v, turn):
        """(address, whether it is one of the tile's) of each of a thread's chunks."""
        first = e.shl(e.thread(), 4)
        base = _of_turn(e, v, turn, tile.nbytes)
        for start in range(0, tile.nbytes, CHUNK_BYTES * threads):
            exists = None
            if start + CHUNK_BYTES * threads > tile.nbytes:
                exists = e.less(first, tile.nbytes - start)
                first = e.b.select(exists, first, e.i32(0))
            yield e.add(e.add(base, first), start), exists

    @operation(storage, boolean, u32, u32)
    def look(e, v, turn):
        """Whether a value is not finite among a thread's."""
        found = e.i32(0)
        for address, _ in chunks(e, v, turn):
            for x in e.load_shared_16(address):
                found = e.b.or_(found, carried(e, storage, x))
        return e.b.icmp_unsigned("!=", found, e.i32(0))

    @operation(storage, void, u32, u32)
    def clear(e, v, turn):
        """Make 0 of them."""
        for address, exists in chunks(e, v, turn):
            with e.b.if_then(exists) if exists is not None else nullcontext():
                finite = [cleared(e, storage, x) for x in e.load_shared_16(address)]
                e.store_shared(address, 0, finite)
        see_writes(e)

    @operation(storage, boolean, boolean)
    def any_multiplier(e, truth):
        """Whether it is true in any thread that multiplies; a barrier of theirs."""
        return any_thread_of(e, truth, MULTIPLIERS, threads)

    @operation(storage, void)
    def multipliers_meet(e):
        barrier_of(e, MULTIPLIERS, threads)

    return {
        "look": look,
        "clear": clear,
        "any_multiplier": any_multiplier,
        "multipliers_meet": multipliers_meet,
    }
