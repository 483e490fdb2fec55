"""Problem + machine -> Plan: which backend, which blocks, and why. Arithmetic only: no arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import isqrt

from .cpu.threads import get_num_threads
from .problem import Placement, Plan, Problem, Variant

# Keys of one online-softmax step and of one run of it. They fix the order of additions of a row, so
# they may depend on nothing but the dtype: never on lengths, batch or threads.
BLOCK_N = {"float32": 256, "float64": 128}
SPLIT_N = 1024
# Query rows of a work item at most. More rows share the packing of a key block; their state should
# stay in the level-2 cache, or little of it leave it (384: 1.02 times the time, head_dim 256 too).
BLOCK_M = 768
ROW_BYTES = 3 << 20  # of their queries and two outputs at most: packed keys and scores take more
MC = 48  # rows whose scores are held at once
NUMPY_LEAST = 16  # query rows: smaller blocks save nothing beside NumPy's own
# Query rows and keys of a block of the gradients, for all dtypes and head_dim: whole registers both
# ways, as each stands for rows in one product and for columns in another.
BACKWARD_M, BACKWARD_N = 112, 224
# Work below this is faster on one thread: waking another costs 10 us, and 40 under a hypervisor.
FLOP_PER_THREAD = 3_000_000
# In the time that a thread needs to read one byte of keys and values: few queries leave it no more.
FLOP_PER_BYTE = 3
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# One thread starts after the other, 1.9 us apart. T of them then take W / T + T * 1.9 us / 2 for
# work of W seconds, which is least for T ** 2 = flop / this, at 100 GFLOP/s a thread.
FLOP_PER_START = 95_000
NO_TF32 = "products are of float32: only cuda's tensor cores multiply tf32"
SLOWER = "slower: its scores and probabilities go through memory"
NOT_THERE = ("cuda", "the arrays are in the memory of the CPU: only if asked for by name")
IN_HOST_MEMORY = Placement(ordinal=0, on_device=False, whole_rows=False, options=False)


def plan(problem: Problem, backend: str = "auto", placement: Placement | None = None) -> Plan:
    """Return how `problem` will be run with the present number of threads. Only "auto" falls back.

    placement  where arrays are, if they are a GPU's or backend="cuda"

    Raises
    ------
    ImportError  backend="cpu" and no compiler is installed, or the CPU lacks the registers that
                 kernels need; backend="cuda" or arrays of a GPU, and no kernel can run there
    ValueError   another backend than "cuda" is asked for arrays of a GPU
    """
    if backend == "cuda" or (placement is not None and placement.on_device):
        return _cuda_plan(problem, backend, placement or IN_HOST_MEMORY, gradients=False)
    return _plan(problem, backend, get_num_threads())


@lru_cache(maxsize=1024)
def _cuda_plan(problem: Problem, backend: str, placement: Placement, gradients: bool) -> Plan:
    if backend not in ("auto", "cuda"):
        rule = f"backend={backend!r} needs arrays in the memory of the CPU, got arrays of a GPU"
        raise ValueError(f"{rule}. Copy them, or use backend='cuda'.")
    from .cuda.choice import choice_or_reason

    choice, why_not = choice_or_reason(problem, placement, gradients)
    if choice is None:
        raise ImportError(f"backend='cuda' cannot run here: {why_not}")
    away = "the arrays are in the memory of a GPU" if placement.on_device else "not asked for"
    return Plan(
        backend="cuda",
        problem=problem,
        reason="asked for by name" if backend == "cuda" else away,
        rejected=(("cpu", away), ("numpy", away)),
        block_m=choice.block_m,
        block_n=choice.block_n,
        num_threads=0,
        num_splits=choice.num_splits,
        choice=choice,
    )


@lru_cache(maxsize=1024)
def _plan(problem: Problem, backend: str, num_threads: int) -> Plan:
    # Here, and not at the top: asking for a kernel loads the compiler's run-time part.
    from .cpu.run import unavailable

    return _noted(_choose(problem, backend, num_threads, unavailable, _cpu_plan))


def _noted(plan: Plan) -> Plan:
    """Return the plan of a backend without tf32; it says so if that was asked for."""
    return replace(plan, notes=(*plan.notes, NO_TF32)) if plan.problem.tf32 else plan


def _choose(
    problem: Problem,
    backend: str,
    num_threads: int,
    unavailable: Callable[[Variant], str],
    cpu_plan: Callable[[Problem, str, int], Plan],
) -> Plan:
    """Return the plan of the backend that is asked for, or of the one that is best."""
    if backend == "numpy":
        return _numpy_plan(
            problem, "asked for by name", "backend='numpy' was asked for", num_threads
        )
    from .cpu.run import not_kept

    why_not = unavailable(problem.variant)
    if not why_not:
        reason = (
            "asked for by name" if backend == "cpu" else "the compiled kernel is the fastest here"
        )
        chosen = cpu_plan(problem, reason, num_threads)
        why_anew = not_kept(problem.variant)
        note = f"every process compiles this kernel anew: {why_anew}"
        return replace(chosen, notes=(note,)) if why_anew else chosen
    if backend == "cpu":
        raise ImportError(
            f"backend='cpu' cannot run here: {why_not}. backend='auto' falls back to NumPy."
        )
    return _numpy_plan(problem, "the fallback that always answers", why_not, num_threads)


def plan_backward(
    problem: Problem, backend: str = "auto", placement: Placement | None = None
) -> Plan:
    """Return how the gradients of `problem` will be computed. Errors are those of plan()."""
    if backend == "cuda" or (placement is not None and placement.on_device):
        return _cuda_plan(problem, backend, placement or IN_HOST_MEMORY, gradients=True)
    return _plan_backward(problem, backend, get_num_threads())


@lru_cache(maxsize=1024)
def _plan_backward(problem: Problem, backend: str, num_threads: int) -> Plan:
    from .cpu.run_backward import unavailable

    return _noted(_choose(problem, backend, num_threads, unavailable, _cpu_plan_backward))


def _cpu_plan_backward(problem: Problem, reason: str, num_threads: int) -> Plan:
    threads = threads_for(problem, num_threads)
    items = problem.batch * problem.heads_kv * -(-problem.seqlen_k // BACKWARD_N)
    return Plan(
        backend="cpu",
        problem=problem,
        reason=reason,
        rejected=(("numpy", SLOWER), NOT_THERE),
        block_m=BACKWARD_M,
        block_n=BACKWARD_N,
        num_threads=min(threads, max(items, 1)),
        work_items=items,
    )


def _numpy_plan(problem: Problem, reason: str, why_not_cpu: str, num_threads: int) -> Plan:
    return Plan(
        backend="numpy",
        problem=problem,
        reason=reason,
        rejected=(("cpu", why_not_cpu), NOT_THERE),
        block_m=256,
        block_n=1024,
        num_threads=num_threads,  # the BLAS library decides
    )


def _cpu_plan(problem: Problem, reason: str, num_threads: int) -> Plan:
    from .cpu.run import can_split

    heads = problem.batch * problem.heads_kv
    rows = problem.group * problem.seqlen_q
    threads = threads_for(problem, num_threads)
    width = (problem.head_dim + 2 * problem.head_dim_v) * ITEMSIZE[problem.variant.dtype]
    block_m = block_m_for(rows, heads, threads, ROW_BYTES // max(width, 1))
    blocks = heads * -(-rows // block_m)
    splits = -(-problem.seqlen_k // SPLIT_N)
    # Splitting pays where there are too few blocks of queries to go round, and costs a pass over
    # the partial results.
    wanted = threads > 1 and blocks < 4 * threads and splits > 1
    num_splits = splits if wanted and can_split(problem.variant) else 1
    return Plan(
        backend="cpu",
        problem=problem,
        reason=reason,
        rejected=(("numpy", SLOWER), NOT_THERE),
        block_m=block_m,
        block_n=BLOCK_N[problem.variant.dtype],
        num_threads=min(threads, blocks * num_splits),
        mc=MC,
        split_n=SPLIT_N,
        num_splits=num_splits,
        work_items=blocks * num_splits,
    )


def threads_for(problem: Problem, num_threads: int) -> int:
    """Threads that the work pays for, of those allowed."""
    width = (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.variant.storage]
    keys = min(problem.seqlen_k, problem.visible_pairs)
    reading = FLOP_PER_BYTE * problem.batch * problem.heads_kv * keys * width
    work = max(problem.flop, reading)
    return max(1, min(num_threads, work // FLOP_PER_THREAD, isqrt(work // FLOP_PER_START)))


def smaller(plan: Plan) -> Plan | None:
    """Return the plan in less memory; None if there is nothing to save. On cpu, the bits stay."""
    if plan.num_splits > 1:
        items = plan.work_items // plan.num_splits
        threads = min(plan.num_threads, items)
        return replace(plan, num_splits=1, work_items=items, num_threads=threads)
    if plan.backend == "numpy":
        block_m, block_n = plan.block_m // 2, plan.block_n // 2
        return replace(plan, block_m=block_m, block_n=block_n) if block_m >= NUMPY_LEAST else None
    block_m = -(-plan.block_m // 2 // MC) * MC
    if block_m >= plan.block_m:
        return None
    rows = plan.problem.group * plan.problem.seqlen_q
    blocks = plan.problem.batch * plan.problem.heads_kv * -(-rows // block_m)
    return replace(plan, block_m=block_m, work_items=blocks)


def block_m_for(rows: int, heads: int, threads: int, most: int = BLOCK_M) -> int:
    """Rows of a work item: even parts of at most BLOCK_M and `most`, or fewer where threads would
    otherwise wait for the last item.
    """
    most = max(min(BLOCK_M, most) // MC * MC, MC)
    block_m = rows if rows <= most else -(-rows // -(-rows // most) // MC) * MC
    while block_m > 2 * MC and heads * -(-rows // block_m) < 4 * threads:
        block_m = -(-block_m // 2 // MC) * MC
    return max(block_m, 1)
