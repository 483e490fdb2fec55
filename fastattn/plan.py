"""Problem + machine -> Plan: which backend, which blocks, and why. Arithmetic only: no arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from .cpu.threads import get_num_threads
from .problem import Plan, Problem, Variant

# Keys of one online-softmax step and of one run of it. They fix the order of additions of a row, so
# they may depend on nothing but the dtype: never on lengths, batch or threads.
BLOCK_N = {"float32": 256, "float64": 128}
SPLIT_N = 1024
# Query rows of a work item. More rows share the packing of a key block; their state should stay in
# the level-2 cache.
BLOCK_M = 384
MC = 48  # rows whose scores are held at once
# Query rows and keys of a block of the gradients, for all dtypes and head_dim: whole register tiles
# both ways, as each stands for rows in one product and for columns in another.
BACKWARD_M, BACKWARD_N = 112, 224
# Work below this is faster on one thread: waking another costs about 10 us.
FLOP_PER_THREAD = 2_000_000
SLOWER = "slower: its scores and probabilities go through memory"


def plan(problem: Problem, backend: str = "auto") -> Plan:
    """Return how `problem` will be run with the present number of threads. Only "auto" falls back.

    Raises
    ------
    ImportError  backend="cpu" and no compiler is installed, or the CPU lacks the registers that
                 kernels need
    """
    return _plan(problem, backend, get_num_threads())


@lru_cache(maxsize=1024)
def _plan(problem: Problem, backend: str, num_threads: int) -> Plan:
    # Here, and not at the top: asking for a kernel loads the compiler's run-time part.
    from .cpu.run import unavailable

    return _choose(problem, backend, num_threads, unavailable, _cpu_plan)


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


def plan_backward(problem: Problem, backend: str = "auto") -> Plan:
    """Return how the gradients of `problem` will be computed. Errors are those of plan()."""
    return _plan_backward(problem, backend, get_num_threads())


@lru_cache(maxsize=1024)
def _plan_backward(problem: Problem, backend: str, num_threads: int) -> Plan:
    from .cpu.run_backward import unavailable

    return _choose(problem, backend, num_threads, unavailable, _cpu_plan_backward)


def _cpu_plan_backward(problem: Problem, reason: str, num_threads: int) -> Plan:
    threads = max(1, min(num_threads, problem.flop // FLOP_PER_THREAD))
    items = problem.batch * problem.heads_kv * -(-problem.seqlen_k // BACKWARD_N)
    return Plan(
        backend="cpu",
        problem=problem,
        reason=reason,
        rejected=(("numpy", SLOWER),),
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
        rejected=(("cpu", why_not_cpu),),
        block_m=256,
        block_n=1024,
        num_threads=num_threads,  # the BLAS library decides
    )


def _cpu_plan(problem: Problem, reason: str, num_threads: int) -> Plan:
    from .cpu.run import can_split

    heads = problem.batch * problem.heads_kv
    rows = problem.group * problem.seqlen_q
    threads = max(1, min(num_threads, problem.flop // FLOP_PER_THREAD))
    block_m = block_m_for(rows, heads, threads)
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
        rejected=(("numpy", SLOWER),),
        block_m=block_m,
        block_n=BLOCK_N[problem.variant.dtype],
        num_threads=min(threads, blocks * num_splits),
        mc=MC,
        split_n=SPLIT_N,
        num_splits=num_splits,
        work_items=blocks * num_splits,
    )


def block_m_for(rows: int, heads: int, threads: int) -> int:
    """Rows of a work item: BLOCK_M, or fewer where the threads would otherwise wait for the last
    item.
    """
    block_m = min(BLOCK_M, rows)
    while block_m > 2 * MC and heads * -(-rows // block_m) < 4 * threads:
        block_m = -(-block_m // 2 // MC) * MC
    return max(block_m, 1)
