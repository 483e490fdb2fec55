"""Which kernel answers a problem on a GPU, in which pieces, and why. Plain Python, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

from ..problem import Placement, Problem, Variant
from . import compile, driver
from .tensor.tilings import SPLIT_N as TENSOR_SPLIT_N
from .tensor.tilings import Tiling, forward_tiling
from .tile import ROW_THREADS, SPLIT_N, grid_of, splits_of, tile_of

TENSOR_CAPABILITY = (8, 0)  # whose tensor cores multiply both 16-bit types


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and how it is launched."""

    key: tuple[Hashable, ...]  # of compile.code(): its name, and all that it is specialised for
    grid: tuple[int, int, int]  # blocks of threads
    threads: int  # of a block
    shared_bytes: int = 0  # dynamic, of a block


@dataclass(frozen=True, slots=True)
class Choice:
    """How a problem is answered."""

    kernel: Kernel
    name: str
    reason: str
    device: str  # its name and compute capability
    block_m: int
    block_n: int
    m_blocks: int
    num_splits: int
    split_n: int

    def rows(self) -> list[tuple[str, str]]:
        """Rows of text for a plan."""
        blocks = "{} x {} x {}".format(*self.kernel.grid)
        threads = f"{self.kernel.threads} in each of {blocks} blocks"
        if self.num_splits > 1:
            threads += f", {self.num_splits} along the keys"
        kernel = f"{self.name}: {self.reason}"
        return [("device", self.device), ("kernel", kernel), ("threads", threads)]


@lru_cache(maxsize=1024)
def choose(
    problem: Problem, device: driver.Device, whole_rows: bool, options: bool = False
) -> Choice:
    """The kernel for a problem.

    whole_rows  rows of q, k, v and out begin at multiples of 16 bytes, and are contiguous
    options     a mask, a bias or ALiBi slopes are among the operands
    """
    tiling = None
    # They know neither of pages nor of parts, whose chunks begin elsewhere.
    special = problem.variant.paged or problem.keys_before
    if device.capability >= TENSOR_CAPABILITY and not special:
        tiling = forward_tiling(
            problem, options=options, strided=not whole_rows, shared_limit=device.shared_bytes
        )
    name = "{} ({}.{})".format(device.name, *device.capability)
    return _simt(problem, name) if tiling is None else _tensor(problem, tiling, name)


def _simt(problem: Problem, device: str) -> Choice:
    tile = tile_of(problem)
    return Choice(
        Kernel(("simt", problem.variant, tile), grid_of(problem, tile), tile.threads),
        "simt",
        "scalar arithmetic, which any GPU and any problem can do",
        device,
        tile.block_m,
        tile.block_n,
        -(-problem.group * problem.seqlen_q // tile.block_m),
        splits_of(problem),
        SPLIT_N,
    )


def _tensor(problem: Problem, tiling: Tiling, device: str) -> Choice:
    num_splits = -(-problem.seqlen_k // TENSOR_SPLIT_N) if tiling.packed else 1
    grid = tiling.grid(problem) * max(num_splits, 1), 1, 1
    return Choice(
        Kernel(("forward", tiling), grid, tiling.threads, tiling.shared_bytes),
        "forward",
        f"tensor cores multiply {problem.variant.storage}, sums are float32",
        device,
        tiling.block_m,
        tiling.block_n,
        tiling.m_blocks(problem),
        max(num_splits, 1),
        TENSOR_SPLIT_N,
    )


def choice_or_reason(problem: Problem, placement: Placement) -> tuple[Choice | None, str]:
    """(the kernel, "") or (None, why there is none, in one line)."""
    why_not = driver.unavailable()
    if why_not:
        return None, why_not
    device = driver.device(placement.ordinal)
    choice = choose(problem, device, placement.whole_rows, placement.options)
    why_not = compile.unavailable(choice.kernel.key, compile.ptx_target(device.capability))
    return (None, why_not) if why_not else (choice, "")


def row_kernel(name: str, problem: Problem, rows: int) -> Kernel:
    """The kernel of this name of combine.py, the same for all modifiers."""
    variant = Variant(problem.variant.dtype, problem.variant.storage)
    return Kernel((name, variant), (rows, 1, 1), ROW_THREADS)


def builder(key: tuple[Hashable, ...]) -> Callable[[], compile.Source]:
    """What compile.code() builds this kernel with: only then are Numba and its module imported."""

    def build() -> compile.Source:
        from . import combine, simt
        from .tensor.forward import forward_kernel

        name, *rest = key
        makers: dict[Hashable, Callable[..., compile.Source]] = {
            "simt": simt.forward_source,
            "forward": forward_kernel,
            "combine": combine.combine_source,
            "missing": combine.missing_source,
        }
        return makers[name](*rest)

    return build
