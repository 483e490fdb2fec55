"""Instructions of compute capability 9.0: products of four warps, copies of whole tiles, barriers
in shared memory.

A warpgroup, four warps, multiplies 64 rows by operands that lie in shared memory (wgmma), and goes
on before the product is there. Tiles lie as the copies put them: blocks of 64 columns one after
the other, each with rows of 128 bytes, whose chunk c of 16 bytes is where chunk c ^ (row % 8) would
be. (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "cp.async.bulk.tensor",
"mbarrier"; for descriptors also "Matrix Descriptor Format".)
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from .mma import F32, I32, I64, MEMORY, Emitter
from .tiles import ITEM, LINE

GROUP = 128  # threads of a warpgroup
BOX = LINE // ITEM  # columns of a block: a row of it is one line
STEP = 16  # of both operands' common axis, in one product
ROWS_8 = 8 * LINE  # bytes from 8 rows to the next 8
SWIZZLE_128 = 1 << 62


@dataclass(frozen=True)
class BoxedTile:
    """(rows, columns) storage elements in shared memory, in blocks of BOX columns."""

    rows: int
    columns: int

    @property
    def box_bytes(self) -> int:
        return self.rows * LINE

    @property
    def boxes(self) -> int:
        return self.columns // BOX

    @property
    def nbytes(self) -> int:
        return self.boxes * self.box_bytes

    def descriptor(self, e: Emitter, address, along_rows: bool):
        """What wgmma takes for an operand that begins there, a multiple of 1024.

        along_rows  the product is summed over columns, whose neighbours lie together; else over
                    rows
        """
        start = e.i64(e.shr(e.both(address, 0x3FFFF), 4))
        blocks = 16 if along_rows else self.box_bytes  # of no use in the first case
        constant = SWIZZLE_128 | ((ROWS_8 >> 4) << 32) | ((blocks >> 4) << 16)
        return e.b.or_(start, ir.Constant(I64, constant))

    def along(self, step: int) -> int:
        """What to add to a descriptor for the step-th 16 columns."""
        column = step * STEP
        return (column // BOX * self.box_bytes + column % BOX * ITEM) >> 4

    @staticmethod
    def down(step: int) -> int:
        """The same for the step-th 16 rows."""
        return step * STEP * LINE >> 4


def multiply_tiles(e: Emitter, a: BoxedTile, a_at, b: BoxedTile, b_at):
    """Start a · b^T of 64 rows of a and all of b: registers that wait_for() fills."""
    count = b.rows // 2
    lines = []
    for step in range(a.columns // STEP):
        lines.append(f"setp.ne.b32 more, {step}, 0;")  # the first product begins at 0
        lines.append(f"add.s64 a, ${count}, {a.along(step)};")
        lines.append(f"add.s64 b, ${count + 1}, {b.along(step)};")
        lines.append(_product(e, b.rows, count, "a", 0))
    constraints = ",".join(["=f"] * count + ["l", "l", MEMORY])
    return e.asm(_pipelined(lines), constraints, [F32] * count, [a_at, b_at], True)


def add_product(e: Emitter, acc, weights, b: BoxedTile, b_at):
    """Start acc + weights · b. weights: packed, as an earlier product left them; neither they nor
    acc may be touched until wait_for().
    """
    count, pairs = len(acc), len(weights)
    descriptor = 2 * count + pairs
    lines = ["setp.ne.b32 more, 1, 0;"]
    for step in range(b.rows // STEP):
        first = 2 * count + 4 * step
        a = "{" + ",".join(f"${first + i}" for i in range(4)) + "}"
        lines.append(f"add.s64 b, ${descriptor}, {b.down(step)};")
        lines.append(_product(e, b.columns, count, a, 1))
    same = [str(i) for i in range(count)]
    constraints = ",".join(["=f"] * count + same + ["r"] * pairs + ["l", MEMORY])
    return e.asm(_pipelined(lines), constraints, [F32] * count, [*acc, *weights, b_at], True)


def _product(e: Emitter, columns: int, count: int, a: str, transposed: int) -> str:
    """One wgmma; a: a descriptor, or registers."""
    acc = ",".join(f"${i}" for i in range(count))
    signs = f"1, 1, {transposed}" if a.startswith("{") else f"1, 1, 0, {transposed}"
    kinds = f"m64n{columns}k16.f32.{e.storage}.{e.storage}"
    return f"wgmma.mma_async.sync.aligned.{kinds} {{{acc}}}, {a}, b, more, {signs};"


def _pipelined(lines: list[str]) -> str:
    body = " ".join(lines)
    return (
        "{ .reg .pred more; .reg .b64 a, b; wgmma.fence.sync.aligned; "
        f"{body} wgmma.commit_group.sync.aligned; }}"
    )


def wait_for(e: Emitter, values, others: int):
    """Until all products are there but the last `others`; returns the registers, which may be used
    from then on.
    """
    e.asm(f"wgmma.wait_group.sync.aligned {others};", MEMORY, [], [], True)
    return kept(e, values)


def kept(e: Emitter, values):
    """The values; nothing that makes or uses them moves across."""
    count = len(values)
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)])
    return e.asm("", constraints, [F32] * count, list(values), True)


def start_barrier(e: Emitter, address, arrivals: int):
    """Make one of 8 bytes of shared memory."""
    e.asm(
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        f"r,r,{MEMORY}",
        [],
        [address, e.i32(arrivals)],
        True,
    )


def wait_at(e: Emitter, address, parity):
    """Until the phase of this parity is over."""
    text = (
        "{ .reg .pred over; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; "
        "@over bra DONE; bra AGAIN; DONE: }"
    )
    e.asm(text, f"r,r,{MEMORY}", [], [address, parity], True)


def arrive_at(e: Emitter, address):
    """Once for the warp."""
    text = (
        "{ .reg .pred first; .reg .b64 state; setp.eq.u32 first, $1, 0; "
        "@first mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    )
    e.asm(text, f"r,r,{MEMORY}", [], [address, e.lane()], True)


def expect_at(e: Emitter, address, nbytes: int):
    """Arrive; the phase is over when so many bytes have been copied."""
    text = (
        f"{{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], {nbytes}; }}"
    )
    e.asm(text, f"r,{MEMORY}", [], [address], True)


def copy_tile(e: Emitter, tile: BoxedTile, shared, barrier, tensor, row, head, batch):
    """Start to copy the tile from `row` on; what does not exist becomes 0. All but tensor, the
    address of a map, are of 32 bits.
    """
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[$0], [$2, {$3, $4, $5, $6}], [$1];"
    )
    for box in range(tile.boxes):
        to = e.add(shared, box * tile.box_bytes)
        place = [e.i32(box * BOX), row, head, batch]
        constraints = f"r,r,l,r,r,r,r,{MEMORY}"
        e.asm(text, constraints, [], [to, barrier, tensor, *place], True)


def share_registers(e: Emitter, more: bool, count: int):
    """Give registers back, or take more of them: a thread then has `count`."""
    how = "inc" if more else "dec"
    e.asm(f"setmaxnreg.{how}.sync.aligned.u32 {count};", MEMORY, [], [], True)


def group_number(e: Emitter):
    """Of this thread's warpgroup; ptxas sees that all lanes have the same."""
    number = e.shr(e.thread(), 7)
    return e.asm("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [I32], [number], True)


def see_barriers(e: Emitter):
    """Barriers that this thread has made are there for all, copies included."""
    e.asm("fence.mbarrier_init.release.cluster;", MEMORY, [], [], True)
    see_writes(e)


def see_writes(e: Emitter):
    """Products and copies see what this thread has written to shared memory."""
    e.asm("fence.proxy.async.shared::cta;", MEMORY, [], [], True)


def stay(e: Emitter):
    """ptxas moves a wait for products no further up than here."""
    e.asm("fence.acq_rel.cta;", MEMORY, [], [], True)


def barrier_of(e: Emitter, number: int, threads: int):
    """Of some of the block's threads."""
    e.asm(f"bar.sync {number}, {threads};", MEMORY, [], [], True)


def any_thread_of(e: Emitter, truth, number: int, threads: int):
    """Whether it is true in any of them; a barrier."""
    text = (
        f"{{ .reg .pred p, q; setp.ne.u32 p, $1, 0; bar.red.or.pred q, {number}, {threads}, p; "
        "selp.u32 $0, 1, 0, q; }"
    )
    result = e.asm(text, f"=r,r,{MEMORY}", [I32], [e.b.zext(truth, I32)], True)
    return e.b.icmp_unsigned("!=", result, e.i32(0))
