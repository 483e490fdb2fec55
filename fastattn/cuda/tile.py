"""How the SIMT kernel cuts a problem: its constants, and why. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem

# Keys of one work item where there are few rows. Fixed, so that the order of additions depends on
# nothing but the call's own lengths; the partial results of one are 1/512 of the keys it reads.
SPLIT_N = 512
FEW_ROWS = 16
# The largest threadIdx.x. `threadIdx.x & LAST_THREAD` is the same, and LLVM knows its sign: 208
# registers and not 255, with spills, for the largest tile.
LAST_THREAD = 1023
WARP = 32
ROW_THREADS = 128  # of the kernels that write row by row: a column each, mostly


@dataclass(frozen=True, slots=True)
class Tile:
    """Constants of a kernel. threads_m * threads_n threads hold a tile of scores, each of them
    every threads_m-th row and every threads_n-th column of it.
    """

    threads_m: int
    threads_n: int
    rows: int  # of a thread
    keys: int  # columns of scores of a thread
    values: int  # columns of the result of a thread
    depth: int  # of head_dim that is in shared memory at once; divides the number of threads

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.threads_m * self.threads_n

    @property
    def block_m(self) -> int:
        """Query rows of a block, of all heads that share a key head."""
        return self.threads_m * self.rows

    @property
    def block_n(self) -> int:
        """Keys of one online-softmax step."""
        return self.threads_n * self.keys

    @property
    def block_v(self) -> int:
        """Columns of the result that a block computes."""
        return self.threads_n * self.values

    @property
    def pitch(self) -> int:
        """Elements from row to row of a piece of q or k: odd, so that rows lie in other banks."""
        return self.depth + 1

    @property
    def p_pitch(self) -> int:
        """The same of probabilities."""
        return self.block_n + 1

    @property
    def piece_size(self) -> int:
        """Elements of a piece of q and one of k; then of v."""
        return (self.block_m + self.block_n) * self.pitch

    @property
    def p_size(self) -> int:
        """Elements of a tile of probabilities."""
        return self.block_m * self.p_pitch

    @property
    def piece_keys(self) -> int:
        """Keys of a piece of v."""
        keys = self.block_n
        while keys * self.block_v > self.piece_size:
            keys //= 2
        return keys

    @property
    def buffer_size(self) -> int:
        """Elements of shared memory: pieces and probabilities, then the result."""
        return max(self.piece_size + self.p_size, self.block_m * self.block_v)

    @property
    def gradient_size(self) -> int:
        """The same for gradients, with two tiles of scores."""
        return max(self.piece_size + 2 * self.p_size, self.block_m * self.block_v)


# In a step along head_dim, a thread loads rows + keys numbers for rows * keys multiplications: 12
# for 32 in float32. Larger tiles would leave fewer threads for a multiprocessor's registers.
TALL = {"float32": (8, 16, 8, 4), "float64": (8, 16, 4, 2)}
SHORT = {"float32": (8, 16, 2, 4), "float64": (8, 16, 2, 2)}


# Of the kernels of gradients, which hold two tiles of scores and, for keys, two of results.
GRADIENT = {"float32": (8, 16, 4, 4), "float64": (8, 16, 4, 2)}


def gradient_tile(problem: Problem) -> Tile:
    """The tile for the gradients of a problem."""
    dtype, widest = problem.variant.dtype, max(problem.head_dim, problem.head_dim_v)
    wide = widest > 64 and dtype == "float32"
    return Tile(*GRADIENT[dtype], values=8 if wide else 4, depth=32)


def tile_of(problem: Problem) -> Tile:
    """The tile for a problem."""
    dtype = problem.variant.dtype
    wide = problem.head_dim_v > 64 and dtype == "float32"
    shape = SHORT if is_short(problem) else TALL
    return Tile(*shape[dtype], values=8 if wide else 4, depth=32)


def is_short(problem: Problem) -> bool:
    """Whether there are few rows, as in decoding: keys are then split over blocks."""
    return problem.group * problem.seqlen_q <= FEW_ROWS


def splits_of(problem: Problem) -> int:
    """Parts of the keys."""
    return max(1, -(-problem.seqlen_k // SPLIT_N)) if is_short(problem) else 1


def grid_of(problem: Problem, tile: Tile) -> tuple[int, int, int]:
    """Blocks of threads."""
    m_blocks = -(-problem.group * problem.seqlen_q // tile.block_m)
    blocks = problem.batch * problem.heads_kv * m_blocks * splits_of(problem)
    return blocks, pieces_of(problem.head_dim_v, tile), 1


def pieces_of(width: int, tile: Tile) -> int:
    """Blocks of threads for the columns of a result; one where there are none, for its lse."""
    return max(1, -(-width // tile.block_v))
