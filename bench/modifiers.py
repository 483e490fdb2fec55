"""What each ready-made modifier costs on registers, on top of a pass over the scores.

python bench/modifiers.py [float32 | float64]
"""

from __future__ import annotations

import sys
import time

import numpy as np

from fastattn import mods
from fastattn.cpu import compile
from fastattn.cpu.job import aux_table
from fastattn.modifier import Modifier, aux_arrays, aux_types
from fastattn.trace import trace

HEADS, ROWS, KEYS = 8, 96, 256  # one tile of scores, which fits into the second cache
FIRST_ROW, FIRST_KEY = 1000, 768
REPEATS, SECONDS = 100, 0.3


def kernel_of(modifier: Modifier | None, dtype: str):
    """Kernel builder: `quota` times a modifier on a tile, in place; None only loads and stores.

    job is (scores, aux table, head, first row, first key, rows, keys): known only at run time, as
    in the forward kernel, where too a mask takes a minimum with -inf.
    """

    def build(unit):
        from fastattn.cpu.memory import address, at, pointer_to
        from fastattn.cpu.modifiers import mask_mod, score_mod
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.simd import operations

        lanes = unit.lanes(ITEMSIZE[dtype])
        simd = operations(dtype, lanes)
        load, store, where, vmin = simd.load, simd.store, simd.where, simd.vmin
        real, integers = pointer_to(dtype), pointer_to("int64")
        scalar = getattr(np, dtype)
        inf, scale = scalar(np.inf), scalar(1.0000001)

        if modifier is None:

            @jit
            def change(x, h, i, j, aux):
                return x * scale

        elif modifier.argument == "score_mod":
            run = score_mod(modifier, dtype, lanes)

            @jit
            def change(x, h, i, j, aux):
                return run(x * scale, 0, h, i, j, aux)

        else:
            run = mask_mod(modifier, dtype, lanes)

            @jit
            def change(x, h, i, j, aux):
                return vmin(x * scale, where(run(0, h, i, j, aux), inf, -inf))

        def repeat(job, scratch, quota):
            fields = integers(address(job))
            s, aux, h, first_row, first_key, rows, keys = (
                real(fields[0]),
                fields[1],
                fields[2],
                fields[3],
                fields[4],
                fields[5],
                fields[6],
            )
            while quota > 0:
                for m in range(rows):
                    row = at(s, m * keys)
                    for n in range(0, keys, lanes):
                        x = change(load(row, n), h, first_row + m, first_key + n, aux)
                        store(row, n, x)
                quota -= 1
            return 0

        return repeat

    return build


def ns_per_score(modifier: Modifier | None, dtype: str, aux: tuple[np.ndarray, ...] = ()) -> float:
    """The best of short runs, by the thread's CPU time."""
    kernel = compile.kernel(("bench.modifiers", modifier, dtype), kernel_of(modifier, dtype))
    scores = np.random.default_rng(0).standard_normal((ROWS, KEYS)).astype(dtype)
    table = aux_table(aux)
    places = (HEADS // 2, FIRST_ROW, FIRST_KEY, ROWS, KEYS)
    job = np.array([scores.ctypes.data, table.ctypes.data, *places], np.int64)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        before = time.thread_time()
        kernel(job.ctypes.data, 0, REPEATS)
        best = min(best, time.thread_time() - before)
    return best / (REPEATS * scores.size) * 1e9


def ready_made() -> list[tuple[str, str, object, tuple]]:
    """(name, argument, function, aux) of each ready-made modifier."""
    rng = np.random.default_rng(0)
    slopes = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)
    weight = rng.standard_normal((32, HEADS)).astype(np.float32)
    ids = np.repeat(np.arange(32, dtype=np.int32), 64)
    band = mods.sliding_window(128, 128)
    return [
        ("causal", "mask_mod", mods.causal, ()),
        ("sliding_window", "mask_mod", band, ()),
        ("dilated_window", "mask_mod", mods.dilated_window(64, 64, 3), ()),
        ("prefix_lm", "mask_mod", mods.prefix_lm(), (np.array([900]),)),
        ("document_mask", "mask_mod", mods.document_mask(), (ids,)),
        ("document_mask int64", "mask_mod", mods.document_mask(), (ids.astype(np.int64),)),
        ("and_masks", "mask_mod", mods.and_masks(mods.document_mask(), mods.causal), (ids,)),
        ("softcap", "score_mod", mods.softcap(30.0), ()),
        ("alibi", "score_mod", mods.alibi(), (slopes,)),
        ("t5_bias", "score_mod", mods.t5_bias(), mods.t5_table(weight, 2048, 2048)),
        ("gather aux[0][id[j]]", "score_mod", _gathered, (slopes, ids % HEADS)),
    ]


def _gathered(score, b, h, i, j, aux):
    return score + aux[0][aux[1][j]]


if __name__ == "__main__":
    name_of_dtype = sys.argv[1] if len(sys.argv) > 1 else "float32"
    floor = ns_per_score(None, name_of_dtype)
    print(f"{name_of_dtype}, ns per score on top of {floor:.3f} for a pass over them")
    for name, argument, function, given in ready_made():
        arrays = aux_arrays(given)
        traced = trace(function, argument, aux_types(arrays))
        print(f"{name:22s} {ns_per_score(traced, name_of_dtype, arrays) - floor:6.3f}")
