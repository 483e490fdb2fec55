"""Where a call spends its time: the processor's clock, read inside the kernel around each piece.

python bench/inside.py
python bench/inside.py --cases 'bert-*,dim-96' --json

ns for each visible pair of query and key, on one thread. The pieces are those of
fastattn/cpu/forward.py; "rest" is what lies between them: ranges, loops, drawing items. Waiting for
memory counts to the piece that waits. The calls are timed without clocks, with what Python does.
"peak": both products, did they run at the multiply-add peak. "least": the same with all that is
computed for registers' sake (keys past the last visible one, columns past the last dimension), and
with the softmax and the packing as fast as they are alone, in the second cache (pieces.py).
Per cent: the peak over that least time, over a call of one thread and over one of all threads.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pieces
import repository
import simulate
from rich.table import Table

from fastattn import repeat
from fastattn.benchmark import cases, peers, record, work
from fastattn.benchmark.contest import calls_per_sample, sample
from fastattn.benchmark.roofline import multiply_add_peak
from fastattn.commands import terminal
from fastattn.cpu import compile
from fastattn.cpu import run as cpu_run
from fastattn.cpu.threads import num_threads
from fastattn.machine import AVX512, VectorUnit, default_num_threads
from fastattn.problem import Variant

# What makes the kernels of each piece, in modules of fastattn.cpu.
PIECES = {
    "queries in": ["rows.pack_q"],
    "packing": ["forward.pack_k", "forward.pack_v"],
    "scores": ["products.asking_scores", "products.few_scores"],
    "masks": ["forward.scores_block", "forward.mask_block"],
    "softmax": ["forward.softmax_block"],  # and the output within it
    "output": ["products.asking_outputs", "products.few_outputs"],
    "rows out": ["rows.write_rows"],
    "rest": ["forward.work_item"],  # and all others within it
}
# As the table shows them.
SUMS = {
    "products": ("scores", "output"),
    "softmax": ("softmax",),
    "packing": ("packing",),
    "rows": ("queries in", "rows out"),
    "rest": ("masks", "rest"),
}
DEFAULT = (
    "bert-*,vit-197,minilm-256,causal-1k,gpt2-1k-causal,llama-2k-gqa,dense-4k,sd-4k-d40,dim-*,"
    "mask-1k,bias-512,float64-1k"
)


@functools.cache
def ticks():
    """Intrinsic: the processor's clock."""
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def codegen(context, builder, sig, args):
        kind = ir.FunctionType(ir.IntType(64), [])
        name = "llvm.readcyclecounter"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])

    return intrinsic(lambda typingctx: (types.int64(), codegen))


def clocked(factory: Callable, place: int) -> Callable:
    """A factory whose kernels add the ticks between call and return to the int64 at `place`."""
    from fastattn.cpu.fields import INTEGERS
    from fastattn.cpu.registers import jit

    make, clock = getattr(factory, "__wrapped__", factory), ticks()

    def make_clocked(*constants):
        kernel = make(*constants)

        @jit
        def run(*arguments):
            start = clock()
            result = kernel(*arguments)
            INTEGERS(place)[0] += clock() - start
            return result

        return run

    return make_clocked


def clocked_kernel(variant: Variant, totals: np.ndarray) -> compile.Kernel:
    """The forward kernel with clocks that add to `totals`, one for each of PIECES."""

    def build(unit: VectorUnit) -> Callable:
        from fastattn.cpu import forward

        places = (totals.ctypes.data + totals.itemsize * n for n in range(totals.size))
        with ExitStack() as patches:

            def put(module, name, factory):
                patches.enter_context(mock.patch.object(module, name, factory))

            put(forward, "key_block", forward.key_block.__wrapped__)  # may have pieces from before
            for place, factories in zip(places, PIECES.values(), strict=True):
                for path in factories:
                    module, _, name = path.partition(".")
                    module = importlib.import_module(f"fastattn.cpu.{module}")
                    put(module, name, clocked(getattr(module, name), place))
            return forward.forward_kernel(variant, unit)

    # Kept nowhere: an address is that of this process.
    with mock.patch.dict(os.environ, {"FASTATTN_CACHE": "0"}):
        return compile.kernel(("bench.inside", variant, totals.ctypes.data), build)


def ticks_per_ns() -> float:
    """Of the processor's clock, over 20 ms."""

    def build(unit):
        clock = ticks()

        def kernel(job, scratch, quota):
            return clock()

        return kernel

    read = compile.kernel("bench.inside.ticks", build)
    start, before = time.perf_counter_ns(), read(0, 0, 0)
    while time.perf_counter_ns() - start < 20_000_000:
        pass
    return (read(0, 0, 0) - before) / (time.perf_counter_ns() - start)


def measure(case: cases.Case, rounds: int) -> dict[str, float]:
    """ns a pair: of each piece; of the call, on one thread and on all, times threads; "peak" and
    "least".
    """
    variant, totals = case.problem.variant, np.zeros(len(PIECES), np.int64)
    run = peers.entry(peers.OURS, case, case.inputs(), 1).run
    run()
    kernel, plain, calls = clocked_kernel(variant, totals), cpu_run.kernel, calls_per_sample(run)
    pairs = work.flop(case) / (4 * case.head_dim)
    rate, found, seconds, threads = ticks_per_ns(), [], [], default_num_threads()

    def chosen(name: str, variant: Variant) -> compile.Kernel:
        return kernel if name == "forward" else plain(name, variant)

    for _ in range(rounds):
        prepare_anew()
        with num_threads(threads):
            run()
            shared = threads * sample(run, calls)
        run()
        seconds.append((sample(run, calls), shared))
        with mock.patch.object(cpu_run, "kernel", chosen):
            prepare_anew()
            run()
            totals[:] = 0
            sample(run, calls)
            found.append(totals / calls / rate / pairs)
    prepare_anew()
    ns = dict(zip(PIECES, np.median(found, 0).tolist(), strict=True))
    ns["softmax"] -= ns["output"]
    ns["rest"] -= sum(value for name, value in ns.items() if name != "rest")
    one, shared = (np.median(seconds, 0) * 1e9 / pairs).tolist()
    peak = multiply_add_peak(case.dtype)
    limits = {"peak": 4 * case.head_dim / peak, "least": least(case, peak) / pairs}
    return {**ns, "call": one, "shared": shared, **limits}


def least(case: cases.Case, peak: float) -> float:
    """ns of a call whose products run at the peak, and all else as it does alone."""
    alone = pieces.measure(["softmax", f"pack *, {case.dtype}"], case.dtype, case.head_dim)
    ns = {name.partition(",")[0]: found["ns"] for name, found in alone.items()}
    chosen = simulate.plan_for(case, 1)
    unit = compile.vector_unit_of(compile.host_target())
    step = unit.lanes(np.dtype(case.dtype).itemsize) // (2 if unit == AVX512 else 1)
    columns = case.head_dim + -(-case.head_dim // step) * step
    blocks = range(0, case.group * case.seqlen_q, chosen.block_m)
    pairs, keys = np.sum([simulate.block_work(chosen, first, 0) for first in blocks], 0)
    packing = case.head_dim * (ns["pack keys"] + ns["pack values"])
    heads = case.batch * case.heads_kv
    return float(heads * (pairs * (2 * columns / peak + ns["softmax"]) + keys * packing))


def sums(ns: dict[str, float]) -> list[float]:
    """Of the pieces, as the columns of SUMS."""
    return [sum(ns[piece] for piece in together) for together in SUMS.values()]


def percents(ns: dict[str, float]) -> list[str]:
    """Of the peak: at most, a call on one thread, a call on all."""
    return [f"{100 * ns['peak'] / ns[name]:.0f} %" for name in ("least", "call", "shared")]


def prepare_anew() -> None:
    """Forget which kernel calls have found."""
    cpu_run._prepare.cache_clear()
    repeat.forget()


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--cases", type=terminal.checked(cases.select), default=DEFAULT)
    parser.add_argument("--rounds", type=terminal.count, default=7, help="default 7")
    options = parser.parse_args()
    shown = Table("workload", title="ns a pair, one thread; per cent of the multiply-add peak")
    for heading in ("peak", *SUMS, "call", "least", "at most", "one", "all"):
        shown.add_column(heading, justify="right")
    results = {}
    for case in options.cases:
        ns = results[case.name] = measure(case, options.rounds)
        spent = (ns["peak"], *sums(ns), ns["call"], ns["least"])
        shown.add_row(case.name, *(f"{each:.2f}" for each in spent), *percents(ns))
    terminal.console().print(shown)
    if options.json:
        kept = {name: {"ns": ns} for name, ns in results.items()}
        record.save(options.json, "inside", repository.setting(1), kept)


if __name__ == "__main__":
    main()
