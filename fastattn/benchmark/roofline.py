"""The loops that measure what a processor can do: multiply-adds on registers, reads of memory."""

from __future__ import annotations

import time
from ctypes import addressof, c_int64

import numpy as np

from ..cpu import compile, threads

# Independent accumulators: more than latency x units of any present core (4 cycles x 2), and with
# the two operands fewer than 16 registers. A loop of only 12 instructions loses 5 % to its own end.
CHAINS, UNROLL = 12, 4
CHUNK = 4 << 20  # bytes that a thread reads before it asks for more


def _peak_loop(dtype: str, lanes: int):
    """Intrinsic: `rounds` times CHAINS * UNROLL multiply-adds on registers, started from x."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    from ..cpu.registers import FLOAT, I64, call, load_vector, store_vector

    vector = ir.VectorType(FLOAT[dtype], lanes)

    def codegen(context, builder, sig, args):
        x, rounds = args
        number = [ir.Constant(I64, n) for n in (0, lanes, 1)]
        factor, term = (load_vector(builder, x, n, vector) for n in number[:2])
        before, loop = builder.block, builder.append_basic_block("loop")
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(I64)
        chains = [builder.phi(vector) for _ in range(CHAINS)]
        values = list(chains)
        for _ in range(UNROLL):
            values = [call(builder, "fma", [value, factor, term]) for value in values]
        i_next = builder.add(i, number[2])
        for phi, start, step in [(i, number[0], i_next)] + [
            (chain, term, value) for chain, value in zip(chains, values, strict=True)
        ]:
            phi.add_incoming(start, before)
            phi.add_incoming(step, loop)
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", i_next, rounds), loop, done)
        builder.position_at_end(done)
        total = values[0]
        for value in values[1:]:
            total = builder.fadd(total, value)
        store_vector(builder, x, number[0], total)
        return context.get_dummy_value()

    return intrinsic(lambda typingctx, x, rounds: (types.void(x, types.int64), codegen))


def _peak_kernel(dtype: str):
    """Kernel builder: `quota` rounds of the peak loop."""

    def build(unit):
        from ..cpu.memory import address, pointer_to
        from ..cpu.registers import ITEMSIZE

        loop, real = _peak_loop(dtype, unit.lanes(ITEMSIZE[dtype])), pointer_to(dtype)

        def peak(job, scratch, quota):
            loop(real(address(job)), quota)
            return 0

        return peak

    return build


def multiply_add_peak(dtype: str = "float32", seconds: float = 0.05) -> float:
    """Gflop/s of one thread that does nothing but multiply-adds on registers.

    The best of short runs over about `seconds`, by the thread's CPU time.
    """
    kernel = compile.kernel(("benchmark.peak", dtype, CHAINS, UNROLL), _peak_kernel(dtype))
    lanes = compile.vector_unit_of(compile.host_target()).lanes(np.dtype(dtype).itemsize)
    x = np.full(2 * lanes, 0.5, dtype)
    rounds = 10_000
    best = 0.0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        x[:] = 0.5
        before = time.thread_time()
        kernel(x.ctypes.data, 0, rounds)
        spent = time.thread_time() - before
        best = max(best, 2 * CHAINS * UNROLL * lanes * rounds / spent / 1e9)
    return best


def _read_kernel(unit):
    """Kernel: draw chunks from a counter and add them up; job is (array, counter, chunks, sums)."""
    from ..cpu.memory import address, at, fetch_add, pointer_to
    from ..cpu.registers import jit
    from ..cpu.simd import operations

    simd = operations("float32", unit.lanes(4))
    load, store, lanes = simd.load, simd.store, simd.lanes
    real, integers = pointer_to("float32"), pointer_to("int64")
    elements = CHUNK // 4

    @jit
    def read(x, sums):
        a, b, c, d = load(x, 0), load(x, lanes), load(x, 2 * lanes), load(x, 3 * lanes)
        for i in range(4 * lanes, elements, 4 * lanes):
            a, b = a + load(x, i), b + load(x, i + lanes)
            c, d = c + load(x, i + 2 * lanes), d + load(x, i + 3 * lanes)
        store(sums, 0, (a + b) + (c + d))

    def read_chunks(job, scratch, quota):
        fields = integers(address(job))
        counter = integers(fields[1])
        while True:
            chunk = fetch_add(counter, 1)
            if chunk >= fields[2]:
                return 0
            read(at(real(fields[0]), chunk * elements), at(real(fields[3]), chunk * lanes))

    return read_chunks


def read_bandwidth(num_threads: int, nbytes: int = 1 << 29) -> float:
    """GB/s at which `num_threads` threads together read memory: a plain loop, the best of 5.

    nbytes should be far more than the caches hold.
    """
    kernel = compile.kernel(("benchmark.read", CHUNK), _read_kernel)
    chunks = max(num_threads, nbytes // CHUNK)
    data = np.ones(chunks * CHUNK // 4, np.float32)
    sums = np.zeros((chunks, 16), np.float32)
    counter = c_int64()
    job = np.array([data.ctypes.data, addressof(counter), chunks, sums.ctypes.data], np.int64)
    best = float("inf")
    for _ in range(5):
        counter.value = 0
        start = time.perf_counter()
        threads.run_on_threads(lambda: kernel(job.ctypes.data, 0, 1), num_threads)
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best / 1e9
