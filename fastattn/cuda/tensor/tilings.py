"""Which kernel runs a problem on the tensor cores, as data: Numba is not needed to choose one."""

from __future__ import annotations

from dataclasses import dataclass

from ...modifier import Modifier
from ...problem import Problem

ITEM = 2  # bytes of a storage element, unless it is float32
HEAD_DIMS = (64, 96, 128, 192, 256)  # what kernels are compiled for; others are padded to the next
Shape = tuple[int, int, int]  # warps, block_m, block_n
BARRIER_BYTES = 128  # of a specialised kernel: one for q, and four for each buffer


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a forward kernel is specialised for: every field is a constant to it and part of its
    cache key.
    """

    storage: str  # "float16", "bfloat16", or "float32", whose factors are rounded to tf32
    head_dim: int  # of HEAD_DIMS
    head_dim_v: int
    warps: int
    block_m: int  # query rows of a thread block; each warp has as many
    block_n: int  # keys of one step
    stages: int = 2  # buffers of keys, and of values
    padded: bool = False  # head_dim or head_dim_v of the problem is smaller
    strided: bool = False  # rows of q, k, v or out are not whole aligned chunks of 16 bytes
    # Scores are more than scaled products, or a key may be hidden inside a window: mask, bias,
    # softcap, ALiBi, chunk, modifiers.
    general: bool = False
    # One query: the rows are the heads that share a key head, which are read once for all of them.
    packed: bool = False
    paged: bool = False  # keys and values lie on pages, which a table names
    score_mod: Modifier | None = None
    mask_mod: Modifier | None = None
    # Four more warps do nothing but copy, and four warps multiply together: warpgroup_forward.py.
    specialised: bool = False

    @property
    def item(self) -> int:
        """Bytes of a storage element."""
        return 4 if self.storage == "float32" else ITEM

    @property
    def threads(self) -> int:
        return 32 * self.warps + 128 * self.specialised

    @property
    def min_blocks(self) -> int:
        """Thread blocks that a multiprocessor must hold; 0 = as many as ptxas likes."""
        # It would like three, in 168 registers, and then spills: at head_dim 64, with options, 32
        # bytes for sm_90 and 136 for sm_120. Two have 255. Of four, for 32 keys a step, 40.
        # One warp that looks up pages would have 128, and spill 88 at head_dim 128; one of float32
        # 96 at head_dim 64, and 20. Of eight warps, two blocks have 128, and spill 472.
        if self.packed:
            return 2 if self.paged or self.item > ITEM else 0
        crowded = self.general or self.strided or self.block_n <= 32
        return 2 if self.paged or (crowded and self.warps < 8) else 0

    @property
    def warp_m(self) -> int:
        """Query rows of a warp."""
        return self.block_m // self.warps

    @property
    def q_columns(self) -> int:
        """Columns of the shared memory of q, in which out is put together."""
        return max(self.head_dim, self.head_dim_v)

    def m_blocks(self, problem: Problem) -> int:
        """Thread blocks for the rows of one head, or of one key head."""
        rows = problem.group if self.packed else problem.seqlen_q
        return -(-rows // self.block_m)

    def grid(self, problem: Problem) -> int:
        """All thread blocks, for one part of the keys."""
        heads = problem.heads_kv if self.packed else problem.heads_q
        return self.m_blocks(problem) * heads * problem.batch

    @property
    def shared_bytes(self) -> int:
        def row(columns: int) -> int:
            return -(-columns * self.item // 128) * 128

        keys = self.stages * self.block_n * (row(self.head_dim) + row(self.head_dim_v))
        barriers = BARRIER_BYTES if self.specialised else 0
        return self.block_m * row(self.q_columns) + keys + barriers


# (warps, block_m, block_n) for each head_dim, the best first; the first whose shared memory a
# device has is taken. Two row tiles of 16 for a warp (block_m / warps = 32) halve what it reads
# from shared memory for each product, which would else be the limit; from 192 on, the output of 32
# rows does not fit into the registers. tests/test_cuda_code.py holds what ptxas says of each.
SHAPES = {
    64: ((4, 128, 64), (4, 64, 64)),
    96: ((4, 128, 64), (4, 64, 64)),
    128: ((4, 128, 64), (4, 64, 64)),
    192: ((8, 128, 64), (4, 64, 64), (4, 64, 32)),
    256: ((8, 128, 64), (4, 64, 64), (4, 64, 32)),
}
# Of float32, whose rows have twice the bytes. With 64 keys of head_dim 128, ptxas spills 412 bytes;
# with 64 rows and 16 keys of 256 that are padded, 12.
SHAPES_OF_FLOAT32 = {
    64: ((4, 128, 64), (4, 64, 64), (4, 64, 32)),
    96: ((4, 128, 32), (4, 64, 32)),
    128: ((4, 128, 32), (4, 64, 32)),
    192: ((8, 128, 32), (4, 64, 32), (4, 64, 16)),
    256: ((4, 64, 32), (2, 32, 16)),
}
# For one query: a thread block is one warp, so that its rows are no more than the tensor cores'
# least, and a multiprocessor has three of them, whose copies are on their way together.
PACKED = (1, 16, 64)
# Of float32. Of head_dim 192 and 32 keys, ptxas spills 24 bytes for sm_80.
PACKED_OF_FLOAT32 = {64: (1, 16, 32), 96: (1, 16, 32), 128: (1, 16, 32)}
PACKED_OF_FLOAT32 |= {192: (1, 16, 16), 256: (1, 16, 16)}
# Keys of a part, for one query: parts are merged afterwards. Always the same number: what else is
# in a batch must not change a result. A row of float32 for each head of a group is then written for
# 256 keys and values read: 3 % more for a group of 8.
SPLIT_N = 256
# Shapes of 128 rows are for devices that have so many bytes of shared memory: those that have fewer
# (8.6, 8.9, 12.0) had one such block at a time, and for sm_120 ptxas spills.
LARGE = 128 << 10
# From this head_dim on, options or addresses of single elements leave registers for 32 keys of a
# step only: with 64, ptxas spills 16 to 288 bytes.
WIDE = 192
FEW_ROWS = 64  # at most so many queries: a block of more would be empty for the most part


def forward_tiling(
    problem: Problem, *, options: bool, strided: bool, shared_limit: int
) -> tuple[Tiling | None, str]:
    """(the kernel for a problem, "") or (None, why none of them runs it).

    options       a mask, a bias or ALiBi slopes are among the operands
    strided       a row of q, k, v or out is not whole chunks of 16 aligned bytes
    shared_limit  bytes of shared memory that a thread block may have
    """
    variant, general = problem.variant, _is_general(problem, options)
    why_not = _why_none(problem, general, strided)
    if why_not:
        return None, why_not
    head_dim, head_dim_v = (_padded(size) for size in (problem.head_dim, problem.head_dim_v))
    packed = problem.seqlen_q == 1 and not general
    padded = (head_dim, head_dim_v) != (problem.head_dim, problem.head_dim_v)
    crowded = general or strided or variant.paged
    small = crowded or padded or shared_limit < LARGE or problem.seqlen_q <= FEW_ROWS
    widest = max(head_dim, head_dim_v)
    shapes = _shapes(problem, widest, small, crowded)
    if packed:
        shapes = [PACKED_OF_FLOAT32[widest] if problem.tf32 else PACKED]
    for shape in shapes:
        tiling = Tiling(
            variant.storage,
            head_dim,
            head_dim_v,
            *shape,
            padded=padded,
            strided=strided,
            general=general,
            packed=packed,
            paged=variant.paged,
            score_mod=variant.score_mod,
            mask_mod=variant.mask_mod,
        )
        if tiling.shared_bytes <= shared_limit:
            return tiling, ""
    return None, "a thread block has too little shared memory"


def _padded(size: int) -> int:
    """The head_dim of the kernels that run this one."""
    return next(width for width in HEAD_DIMS if width >= size)


def _why_none(problem: Problem, general: bool, strided: bool) -> str:
    """Why no kernel runs a problem, whatever the device; "" if one does."""
    variant, largest = problem.variant, max(problem.head_dim, problem.head_dim_v)
    if variant.storage not in ("float16", "bfloat16") and not problem.tf32:
        allowed = " unless precision='tf32'" if variant.storage == "float32" else ""
        return f"tensor cores multiply 16-bit types, not {variant.storage}{allowed}"
    if largest > HEAD_DIMS[-1]:
        return f"head_dim is above {HEAD_DIMS[-1]}"
    if variant.paged and strided:
        return "rows of pages are not whole chunks of 16 aligned bytes"
    # One warp that copies all elements of wider rows one by one spills 590 to 1120 bytes.
    if problem.seqlen_q == 1 and not general and strided and largest > HEAD_DIMS[0]:
        return "rows for one query are not whole chunks of 16 aligned bytes"
    if problem.tf32 and strided and _padded(largest) >= WIDE:  # which spills 16 to 320 bytes
        return "rows of more than 128 float32 are not whole chunks of 16 aligned bytes"
    return ""


# (warps that multiply, block_m, block_n) of the specialised kernel for each head_dim. All registers
# of a multiprocessor are those of one such block.
SPECIALISED = {64: (12, 192, 128), 128: (8, 128, 128), 192: (8, 128, 64), 256: (8, 128, 64)}
FEWEST_KEYS = 256  # two blocks of 128: below, nothing is copied while others multiply


def specialised_tiling(
    problem: Problem, options: bool, shared_limit: int
) -> tuple[Tiling | None, str]:
    """(the specialised kernel for a problem, "") or (None, why there is none, or not worth it).

    options, shared_limit  as in forward_tiling(), which has a kernel for it
    """
    if problem.variant.paged:
        return None, "no wgmma: keys lie on pages"
    if _is_general(problem, options):
        return None, "no wgmma: masks, biases and other options change scores"
    if problem.scale <= 0:
        return None, "no wgmma: scale is not above 0"
    if problem.seqlen_q <= FEW_ROWS or problem.seqlen_k < FEWEST_KEYS:
        return None, f"no wgmma below {FEW_ROWS + 1} queries and {FEWEST_KEYS} keys"
    head_dim, head_dim_v = (
        next(width for width in SPECIALISED if width >= size)
        for size in (problem.head_dim, problem.head_dim_v)
    )
    warps, block_m, block_n = SPECIALISED[max(head_dim, head_dim_v)]
    padded = head_dim_v != problem.head_dim_v  # copies see to head_dim themselves
    storage = problem.variant.storage
    tiling = Tiling(
        storage, head_dim, head_dim_v, warps, block_m, block_n, padded=padded, specialised=True
    )
    fits = tiling.shared_bytes <= shared_limit
    return (tiling, "") if fits else (None, "no wgmma: too little shared memory")


def _is_general(problem: Problem, options: bool) -> bool:
    """Whether scores are more than scaled products, or a key may be hidden inside a window."""
    variant = problem.variant
    modified = variant.score_mod is not None or variant.mask_mod is not None
    return options or modified or bool(problem.softcap or problem.chunk or problem.dropout_p)


def _shapes(problem: Problem, head_dim: int, small: bool, crowded: bool) -> list[Shape]:
    """Those to try; small: of no more than 64 rows, 16 for each warp."""
    most_keys = 32 if crowded and head_dim >= WIDE else 64
    if problem.tf32 and crowded:
        most_keys //= 2
    shapes = (SHAPES_OF_FLOAT32 if problem.tf32 else SHAPES)[head_dim]
    most_rows = 64 if small else 128
    return [s for s in shapes if s[1] <= most_rows and s[2] <= most_keys]
