"""Calls with backend="cuda" in Numba's simulator, each held against the oracle: a script that
prints {name: what is wrong, or ""} of those that it is given by name; and of each barrier that one
of them needs, {file and line: what is wrong without it}.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
from simulated_gpu import simulated_gpu
from simulated_threads import Block

import fastattn
from fastattn import mods
from fastattn.cuda.tile import Tile
from fastattn.part import Part, attend
from fastattn.verifying.case import Case
from fastattn.verifying.trial import Trial, error_ratio, inputs_of, results


def trial(name, seqlen_q=5, seqlen_k=7, head_dim=3, kind="forward", poison="", layout="", **more):
    layouts = (layout or "plain",) * 3
    case = Case(name, seqlen_q, seqlen_k, head_dim, **more)
    return Trial(case, kind, layouts=layouts, poison=poison)


def gradient(name, *sizes, kind="backward", **more):
    return trial("gradients, " + name, *sizes, kind=kind, **more)


TRIALS = [
    trial("plain"),
    trial("float64", dtype="float64"),
    trial("float16", dtype="float16"),
    trial("bfloat16", dtype="bfloat16"),
    trial("one row and key", 1, 1, 1, heads_q=1),
    trial("no keys", 3, 0),
    trial("wide values", head_dim_v=9, heads_q=1),
    trial("batch and groups", batch=2, heads_q=4, heads_kv=2, causal=True),
    trial("more queries than keys", 7, 3, causal=True),
    trial("top left", align="top_left", causal=True, head_dim=2),
    trial("window", window=(2, 1), head_dim_v=2),
    trial("chunk", chunk=3, causal=True, align=-2),
    trial("softcap", softcap=1.5),
    trial("negative scale", scale=-1.3),
    trial("mask", mask="b1qk", batch=2, heads_q=1),
    trial("bias", bias="1h1k", bias_dtype="float64"),
    trial("bias of halves", bias="11qk", bias_dtype="float16", dtype="float16"),
    trial("alibi", alibi="bh", batch=2, causal=True),
    trial("sinks", sinks=True, mask="11qk"),
    trial("lengths", batch=2, lengths="q_len kv_len kv_start align", causal=True, sinks=True),
    trial("lengths with mask", batch=2, lengths="kv_len kv_start", mask="bhqk", bias="11qk"),
    trial("dropout", dropout_p=0.4, batch=2),
    trial("split keys", 1, 11, sinks=True),
    trial("split keys of lengths", 1, 11, batch=2, lengths="q_len kv_len kv_start", bias="1h1k"),
    trial("split keys with dropout", 1, 9, 2, dropout_p=0.3, heads_q=2, heads_kv=1),
    trial("nan in q", poison="q", heads_q=1),
    trial("nan in k", poison="k", causal=True, heads_q=1),
    trial("nan in v", poison="v", causal=True, heads_q=1),
    trial("nan in v, masked", poison="v", mask="11qk", heads_q=1),
    trial("layouts", layout="reversed", batch=2, heads_q=1),
    trial("packed", batch=2, kind="varlen", causal=True),
    trial("packed with sinks and window", batch=3, kind="varlen", window=(2, 0), sinks=True),
    gradient("plain"),
    gradient("float64", dtype="float64"),
    gradient("float16", dtype="float16"),
    gradient("no keys", 3, 0, sinks=True),
    gradient("wide values", head_dim_v=9, heads_q=1),
    gradient("batch and groups", batch=2, heads_q=4, heads_kv=2, causal=True),
    gradient("window and chunk", window=(2, 1), chunk=4, align=1),
    gradient("softcap", softcap=1.5, scale=-1.3),
    gradient("masks", mask="b1qk", bias="1h1k", bias_dtype="float64", batch=2),
    gradient("bias of rows", bias="11q1", heads_q=1, dtype="float64"),
    gradient("alibi", alibi="bh", batch=2, causal=True),
    gradient("alibi and sinks", alibi="h", sinks=True, batch=2),
    gradient("lengths", batch=2, lengths="q_len kv_len kv_start", bias="11qk", sinks=True),
    gradient("dropout", dropout_p=0.4, batch=2),
    gradient("layouts", layout="reversed", batch=2, heads_q=1),
    gradient("packed", batch=3, kind="varlen backward", causal=True, sinks=True, alibi="bh"),
    gradient("packed, no keys", 5, 0, batch=3, kind="varlen backward", sinks=True, alibi="h"),
]


def solved(one):
    """What is wrong with the answer to a trial."""
    x = inputs_of(one)
    ratio = error_ratio(one, x, results(one, x, "cuda"))
    return "" if ratio <= 1 else f"error {ratio:.2f} of what is allowed"


# --- modifiers and block masks, against the NumPy backend -----------------------------------------


def crooked(score, b, h, i, j, aux):
    """A score_mod with a word of each kind."""
    table, slope = aux
    bend = mods.where((j <= i) & ~(j == 3) | (b > 0), mods.tanh(score / 3) * 3, mods.exp(-score))
    bend = bend + table[h, j - i + 2] - abs(i - j) * slope + (j % 3) - j // (i - 2)
    bend = mods.maximum(mods.minimum(bend, 5.0), mods.floor(score) - 9)
    return mods.where(mods.logical_not(i == 1) ^ (j != 0), bend, -np.inf) + mods.sqrt(abs(score))


def modified(**flags):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 2, 5, 3)).astype(np.float32)
    k = rng.standard_normal((2, 1, 7, 3)).astype(np.float32)
    return compared(q, k, **flags)


def compared(q, k, v=None, **flags):
    """What the NumPy backend finds wrong."""
    arrays = q, k, k if v is None else v
    found = fastattn.attention(*arrays, **flags, return_lse=True, backend="cuda")
    wanted = fastattn.attention(*arrays, **flags, return_lse=True, backend="numpy")
    for name, ours, theirs in zip(("out", "lse"), found, wanted, strict=True):
        if not np.allclose(ours, theirs, rtol=0, atol=1e-5, equal_nan=True):
            return f"{name} differs by {np.abs(ours - theirs).max():.3g}"
    return ""


def block_mask():
    mask = fastattn.create_block_mask(mods.sliding_window(2, 1), None, None, 5, 7, block=(2, 2))
    return modified(block_mask=mask, causal=False)


def score_mod():
    table = np.linspace(-1, 1, 8).reshape(2, 4)[:, ::-1]
    return modified(score_mod=crooked, aux=(table, np.float32(0.25)))


def mask_mod():
    ids = np.array([0, 0, 1, 1, 1, 2, 2])
    return modified(mask_mod=mods.document_mask(), aux=(ids,), kv_start=[0, 1], kv_len=[7, 6])


def part():
    """A part of a larger call: chunk and dropout count keys from elsewhere."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 2, 5, 3)).astype(np.float32)
    k = rng.standard_normal((2, 1, 7, 3)).astype(np.float32)
    place = Part(np.array([4, 1]), h=3, i=20, j=8, keys_before=8, whole=(6, 9))
    flags = {"chunk": 5, "dropout_p": 0.3, "dropout_seed": 1}
    found = attend(place, q, k, k, "cuda", flags)
    wanted = attend(place, q, k, k, "numpy", flags)
    return "" if all(map(np.allclose, found, wanted, (1e-5,) * 2)) else "differs"


def pages():
    """Keys of two members on pages of three, in any order; what is on no used page is NaN."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((2, 2, 3, 3)).astype(np.float32)
    pages = np.full((6, 1, 3, 3), np.nan, np.float32)
    pages[[4, 1, 0]] = rng.standard_normal((3, 1, 3, 3))
    table = [[4, 1, 99], [0, -7, 5]]
    flags = {"block_table": table, "kv_len": [5, 3], "kv_start": [1, 0], "causal": True}
    return compared(q, pages, **flags)


def big_tile():
    """A tile whose sizes differ, with v in two pieces of keys and two of columns."""
    tile = Tile(threads_m=3, threads_n=2, rows=1, keys=3, values=4, depth=3)
    assert tile.piece_keys == 3 < tile.block_n
    with simulated_gpu(tile, split_n=6):
        return solved(trial("other tile", 7, 9, 4, head_dim_v=11, causal=True, heads_q=1))


def differentiated(wanted=(), nan="", widths=(3, 3), **flags):
    """What the NumPy backend finds wrong with gradients. widths: head_dim and head_dim_v."""
    rng, (width, width_v) = np.random.default_rng(3), widths
    shapes = {"dout": (2, 5, width_v), "q": (2, 5, width), "k": (1, 7, width), "v": (1, 7, width_v)}
    arrays = {n: rng.standard_normal((2, *s)).astype(np.float32) for n, s in shapes.items()}
    if nan:
        arrays[nan][0, 0, 3, 1] = np.nan
    dout, *inputs = arrays.values()
    out, lse = fastattn.attention(*inputs, **flags, return_lse=True, backend="numpy")
    flags |= {f"return_{name}": True for name in wanted}
    found, exact = (
        fastattn.attention_backward(dout, *inputs, out, lse, **flags, backend=backend)
        for backend in ("cuda", "numpy")
    )
    for name, ours, theirs in zip(("dq", "dk", "dv", *wanted), found, exact, strict=True):
        if not np.allclose(ours, theirs, rtol=0, atol=2e-5, equal_nan=True):
            return f"{name} differs by {np.abs(ours - theirs).max():.3g}"
    return ""


def gradients_with_score_mod():
    table = np.linspace(-1, 1, 8).reshape(2, 4)[:, ::-1]
    return differentiated(score_mod=crooked, aux=(table, np.float32(0.25)), softcap=4.0)


def gradients_with_block_mask():
    mask = fastattn.create_block_mask(mods.sliding_window(2, 1), None, None, 5, 7, block=(2, 2))
    return differentiated(block_mask=mask)


def gradients_of_large_rows():
    """Biases so large that lse has lost the sum: of 0.3 to 1e6 along the rows."""
    bias = -np.array([0.3, 3e3, 1e5, 1e6, 2e3], np.float32)[:, None] + np.zeros(7, np.float32)
    flags = {"bias": bias, "sinks": np.array([-1e6, 0.5], np.float32)}
    return differentiated(("dbias", "dsinks"), **flags)


def gradients_beside_nan():
    """What holds NaN and is not seen adds nothing."""
    wrong = (differentiated(nan=name, window=(1, 0)) for name in ("dout", "q", "k", "v"))
    return " ".join(wrong).strip()


def gradients_with_big_tile():
    tile = Tile(threads_m=3, threads_n=2, rows=1, keys=3, values=1, depth=3)
    with simulated_gpu(tile):
        return differentiated(("dbias",), bias=np.ones((1, 7), np.float32), causal=True)


def no_columns():
    """Of q and k, of v, or of all: what bias and lse are is left."""
    bias, wrong = np.linspace(-1, 2, 35).reshape(5, 7).astype(np.float32), ""
    for a, b in ((0, 3), (3, 0), (0, 0)):
        q, k, v = (np.ones((2, n, d), np.float32) for n, d in ((5, a), (7, a), (7, b)))
        wrong += compared(q, k, v, bias=bias, scale=1.0)
        wrong += differentiated(("dbias",), widths=(a, b), bias=bias, scale=1.0)
    return wrong


def nothing_is_kept():
    """All scratch is given back."""
    with simulated_gpu() as memory:
        modified(causal=True, kv_len=[3, 5], alibi=np.ones(2, np.float32))
        differentiated(("dalibi",), alibi=np.ones(2, np.float32))
        return f"{len(memory.blocks)} blocks are left" if memory.blocks else ""


OTHERS = (
    block_mask,
    score_mod,
    mask_mod,
    part,
    pages,
    big_tile,
    gradients_with_score_mod,
    gradients_with_block_mask,
    gradients_of_large_rows,
    gradients_beside_nan,
    gradients_with_big_tile,
    no_columns,
    nothing_is_kept,
)
CASES = {one.case.name: one for one in TRIALS} | {f.__name__: f for f in OTHERS}


def answer(case):
    """What is wrong with a case."""
    try:
        if case in (big_tile, gradients_with_big_tile, nothing_is_kept):
            return case()
        with simulated_gpu():
            return case() if callable(case) else solved(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    answers, needed = {}, {}
    for name in sys.argv[1:] or CASES:
        answers[name] = answer(CASES[name])
        needed |= dict.fromkeys(Block.needed - set(needed), CASES[name])
    without = {}
    for barrier, case in needed.items():
        Block.missing = barrier
        without["{}:{}".format(*barrier)] = answer(case)
    print(json.dumps([answers, without]))


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, in the simulator's threads
    main()
