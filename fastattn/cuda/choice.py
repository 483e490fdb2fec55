"""Which kernel answers a problem on a GPU, in which pieces, and why. Plain Python, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..problem import Placement, Problem, Variant
from . import compile, driver
from .tensor.gradient_tilings import gradient_tiling
from .tensor.tilings import SPLIT_N as TENSOR_SPLIT_N
from .tensor.tilings import Tiling, forward_tiling, specialised_tiling
from .tile import ROW_THREADS, SPLIT_N, WARP, gradient_tile, grid_of, pieces_of, splits_of, tile_of

NO_TENSOR_CORES = "no tensor cores for {} below compute capability {}.{}".format(
    "both 16-bit types and tf32", *compile.TENSOR_CORES.capability
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and how it is launched."""

    key: tuple[Hashable, ...]  # of compile.code(): its name, and all that it is specialised for
    grid: tuple[int, int, int]  # blocks of threads
    threads: int  # of a block
    shared_bytes: int = 0  # dynamic, of a block


class Pieces(NamedTuple):
    """Into what a grid cuts rows and keys, for the job."""

    m_blocks: int
    num_splits: int = 1
    split_n: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """How a problem is answered."""

    kernel: Kernel
    name: str
    reason: str
    device: str  # its name and compute capability
    block_m: int
    block_n: int
    pieces: Pieces
    mapped: Tiling | None = None  # of a kernel that takes a MappedJob

    @property
    def num_splits(self) -> int:
        """Parts of the keys."""
        return self.pieces.num_splits

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
    problem: Problem,
    device: driver.Device,
    whole_rows: bool,
    options: bool = False,
    no_maps: str = "",
) -> Choice:
    """The kernel for a problem; the arguments but `device` as in Placement."""
    tiling, why_not = None, NO_TENSOR_CORES
    if problem.keys_before:
        why_not = "a part of a call, whose chunks and dropout begin elsewhere"
    elif device.capability >= compile.TENSOR_CORES.capability:
        tiling, why_not = forward_tiling(
            problem, options=options, strided=not whole_rows, shared_limit=device.shared_bytes
        )
    name = "{} ({}.{})".format(device.name, *device.capability)
    if tiling is None:
        return _simt(problem, name, why_not)
    if device.capability == compile.WARPGROUPS.capability:
        why_not = no_maps if whole_rows else "no wgmma: rows are not whole chunks of 16 bytes"
        why_not = "no wgmma: that kernel multiplies 16-bit types" if problem.tf32 else why_not
        if not why_not:
            specialised, why_not = specialised_tiling(problem, options, device.shared_bytes)
            tiling = specialised or tiling
    return _tensor(problem, tiling, name, why_not)


def _simt(problem: Problem, device: str, why: str) -> Choice:
    tile = tile_of(problem)
    return Choice(
        Kernel(("simt", problem.variant, tile), grid_of(problem, tile), tile.threads),
        "simt",
        f"scalar arithmetic: {why}",
        device,
        tile.block_m,
        tile.block_n,
        Pieces(-(-problem.group * problem.seqlen_q // tile.block_m), splits_of(problem), SPLIT_N),
    )


def _tensor(problem: Problem, tiling: Tiling, device: str, why_not: str) -> Choice:
    """why_not: why tiling is not a specialised one, where there are such."""
    num_splits = -(-problem.seqlen_k // TENSOR_SPLIT_N) if tiling.packed else 1
    grid = tiling.grid(problem) * max(num_splits, 1), 1, 1
    name = "warpgroups" if tiling.specialised else "forward"
    factors = "float32 rounded to tf32" if problem.tf32 else problem.variant.storage
    reason = f"tensor cores multiply {factors}, sums are float32"
    return Choice(
        Kernel((name, tiling), grid, tiling.threads, tiling.shared_bytes),
        name,
        f"{reason}; {why_not}" if why_not else reason,
        device,
        tiling.block_m,
        tiling.block_n,
        Pieces(tiling.m_blocks(problem), max(num_splits, 1), TENSOR_SPLIT_N),
        tiling if tiling.specialised else None,
    )


@dataclass(frozen=True, slots=True)
class GradientChoice:
    """How the gradients of a problem are found: kernels, one after another."""

    kernels: tuple[tuple[Kernel, Pieces], ...]
    weighs: bool  # whether rows have weights
    name: str
    reason: str
    device: str
    block_m: int
    block_n: int
    num_splits: int = 1

    def rows(self) -> list[tuple[str, str]]:
        """Rows of text for a plan."""
        blocks = (f"{kernel.grid[0]} of {kernel.threads}" for kernel, _ in self.kernels)
        names = ("rows", "dq", "dk and dv")
        threads = (f"{n} for {name}" for n, name in zip(blocks, names, strict=False))
        kernel = f"{self.name}: {self.reason}"
        return [("device", self.device), ("kernel", kernel), ("threads", ", ".join(threads))]


@lru_cache(maxsize=1024)
def choose_gradients(
    problem: Problem, device: driver.Device, whole_rows: bool, options: bool = False
) -> GradientChoice:
    """The kernels for the gradients of a problem, as in choose()."""
    tiling, why_not = None, NO_TENSOR_CORES
    if device.capability >= compile.TENSOR_CORES.capability:
        tiling, why_not = gradient_tiling(
            problem, options=options, strided=not whole_rows, shared_limit=device.shared_bytes
        )
    where = "{} ({}.{})".format(device.name, *device.capability)
    if tiling is None:
        return _simt_gradients(problem, where, why_not)
    variant, kernels = problem.variant, [_rows(problem, False)]
    for name, heads, rows in (
        ("gradient_q", problem.heads_q, problem.seqlen_q),
        ("gradient_kv", problem.heads_kv, problem.seqlen_k),
    ):
        m_blocks = -(-rows // tiling.block_m)
        grid = m_blocks * heads * problem.batch, 1, 1
        kernel = Kernel((name, tiling), grid, tiling.threads, tiling.shared_bytes)
        kernels.append((kernel, Pieces(m_blocks)))
    return GradientChoice(
        tuple(kernels),
        False,
        "gradients",
        f"tensor cores multiply {variant.storage}, sums are float32",
        where,
        tiling.block_m,
        tiling.block_n,
    )


def _simt_gradients(problem: Problem, device: str, why: str) -> GradientChoice:
    tile, variant, kernels = gradient_tile(problem), problem.variant, [_rows(problem, True)]
    of_keys = max(problem.head_dim, problem.head_dim_v)
    for name, rows, width in (
        ("simt_gradient_q", problem.group * problem.seqlen_q, problem.head_dim),
        ("simt_gradient_kv", problem.seqlen_k, of_keys),
    ):
        m_blocks = -(-rows // tile.block_m)
        grid = m_blocks * problem.heads_kv * problem.batch, pieces_of(width, tile), 1
        kernels.append((Kernel((name, variant, tile), grid, tile.threads), Pieces(m_blocks)))
    return GradientChoice(
        tuple(kernels),
        True,
        "simt gradients",
        f"scalar arithmetic: {why}",
        device,
        tile.block_m,
        tile.block_n,
    )


def bias_kernel(problem: Problem, shape: tuple[int, ...], stored: str) -> tuple[Kernel, Pieces]:
    """The kernel of dbias, whose last axes have this shape."""
    tile = gradient_tile(problem)
    blocks = -(-shape[-2] // tile.block_m), -(-shape[-1] // tile.block_n)
    grid = blocks[0] * blocks[1] * problem.heads_q * problem.batch, 1, 1
    key = ("gradient_bias", problem.variant, tile, stored)
    return Kernel(key, grid, tile.threads), Pieces(*blocks)


def sums_kernel(problem: Problem, name: str, stored: str) -> tuple[Kernel, Pieces]:
    """The kernel of dsinks or dalibi."""
    variant = Variant(problem.variant.dtype, problem.variant.storage)
    grid = problem.heads_q * problem.batch, 1, 1
    return Kernel(("gradient_sums", variant, name, stored), grid, ROW_THREADS), Pieces(0)


def _rows(problem: Problem, weighs: bool) -> tuple[Kernel, Pieces]:
    """The kernel of gradient_rows.py, which comes first."""
    variant = problem.variant if weighs else Variant(problem.variant.dtype, problem.variant.storage)
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    grid = -(-rows // (ROW_THREADS // WARP)), 1, 1
    return Kernel(("gradient_rows", variant, weighs), grid, ROW_THREADS), Pieces(0)


def choice_or_reason(
    problem: Problem, placement: Placement, gradients: bool
) -> tuple[Choice | GradientChoice | None, str]:
    """(the kernel, "") or (None, why there is none, in one line)."""
    why_not = driver.unavailable()
    if why_not:
        return None, why_not
    device, where = driver.device(placement.ordinal), (placement.whole_rows, placement.options)
    choice: Any = (
        choose_gradients(problem, device, *where)
        if gradients
        else choose(problem, device, *where, placement.no_maps)
    )
    kernels = [kernel for kernel, _ in choice.kernels] if gradients else [choice.kernel]
    for kernel in kernels:
        why_not = compile.unavailable(kernel.key)
        if why_not:
            return None, why_not
    return choice, ""


def row_kernel(name: str, problem: Problem, rows: int) -> Kernel:
    """The kernel of this name of combine.py, the same for all modifiers."""
    variant = Variant(problem.variant.dtype, problem.variant.storage)
    return Kernel((name, variant), (rows, 1, 1), ROW_THREADS)


def builder(key: tuple[Hashable, ...]) -> Callable[[], compile.Source]:
    """What compile.code() builds this kernel with: only then are Numba and its module imported."""

    def build() -> compile.Source:
        from . import combine, gradient_rows, gradient_sums, simt, simt_gradients
        from .tensor.forward import forward_kernel
        from .tensor.gradients import key_kernel, query_kernel
        from .tensor.warpgroup_forward import warpgroup_kernel

        name, *rest = key
        makers: dict[Hashable, Callable[..., compile.Source]] = {
            "simt": simt.forward_source,
            "forward": forward_kernel,
            "warpgroups": warpgroup_kernel,
            "combine": combine.combine_source,
            "missing": combine.missing_source,
            "gradient_rows": gradient_rows.rows_source,
            "gradient_bias": gradient_sums.bias_source,
            "gradient_sums": gradient_sums.row_sums_source,
            "simt_gradient_q": simt_gradients.query_source,
            "simt_gradient_kv": simt_gradients.key_source,
            "gradient_q": query_kernel,
            "gradient_kv": key_kernel,
        }
        return makers[name](*rest)

    return build
