"""The table of shapes and flags on which every backend is held against the oracle."""

from __future__ import annotations

from dataclasses import replace

from fastattn.verifying.case import Case, dtype_of

__all__ = ["CASES", "Case", "dtype_of"]

SIZES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257]
HEAD_DIMS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 128, 224, 257]
PRIMES = [(7, 11), (13, 101), (101, 13), (211, 307), (307, 211)]
LONG = [(64, 1023), (33, 1024), (5, 1025), (1023, 64), (1025, 40)]
MASKS = [
    "",
    "k",
    "1k",
    "qk",
    "q1",
    "11",
    "hqk",
    "1qk",
    "h1k",
    "bhqk",
    "b1qk",
    "b11k",
    "1h1k",
    "bhq1",
]
WINDOWS = [
    (0, 0),
    (0, None),
    (None, 0),
    (3, 5),
    (16, 0),
    (0, 16),
    (40, 40),
    (1000, 1000),
    (7, None),
]
GROUPS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (5, 1), (40, 8)]


def _sizes():
    for n, size in enumerate(SIZES):
        yield Case("size", size, size, causal=n % 2 == 0)
        yield Case("size-q", size, 33, causal=n % 2 == 1)
        yield Case("size-k", 33, size, causal=n % 3 == 0)
    for seqlen_q, seqlen_k in PRIMES:
        yield Case("prime", seqlen_q, seqlen_k, 37, 29, causal=seqlen_q < seqlen_k)
    for seqlen_q, seqlen_k in LONG:
        yield Case("long", seqlen_q, seqlen_k, 32, causal=True)
        yield Case("long", seqlen_q, seqlen_k, 32)


def _head_dims():
    for head_dim in HEAD_DIMS:
        yield Case("dim", 33, 70, head_dim)
        yield Case("dim-v", 20, 35, 24, head_dim)
        yield Case("dim-qk", 20, 35, head_dim, 24, causal=True)


def _flags():
    for n, window in enumerate(WINDOWS):
        yield Case("window", 70, 70, window=window)
        yield Case("window", 50, 131, window=window, causal=n % 2 == 0)
        yield Case("window", 131, 50, window=window, align="top_left")
        yield Case("window", 300, 300, window=window, mask="qk", align=(-20, 3, 40)[n % 3])
    for align in ("top_left", "bottom_right", -40, -1, 0, 1, 17, 200):
        yield Case("align", 33, 70, align=align, causal=True)
        yield Case("align", 70, 33, align=align, causal=True)
    for scale in (0.0, -0.5, 1.0, 3.0, 1e-3):
        yield Case("scale", 33, 47, scale=scale)
    for spread in (10.0, 100.0):
        yield Case("peaked", 33, 300, 32, spread=spread)
        yield Case("peaked", 65, 300, 32, spread=spread, causal=True)


def _masks():
    for axes in MASKS[1:]:
        yield Case("mask", 33, 70, batch=2, heads_q=4, heads_kv=2, mask=axes)
        yield Case("bias", 33, 70, batch=2, heads_q=4, heads_kv=2, bias=axes, causal=True)
    for bias_dtype in ("float16", "float32", "float64"):
        yield Case("bias-dtype", 40, 130, heads_q=3, bias="hqk", bias_dtype=bias_dtype)
        yield Case("bias-dtype", 40, 130, heads_q=3, bias="1k", bias_dtype=bias_dtype, mask="qk")


def _decode():
    for seqlen_k in (1, 2, 33, 255, 256, 257, 1025, 4097):
        yield Case("decode", 1, seqlen_k, 64, batch=1, heads_q=8, heads_kv=2)
        yield Case("decode", 1, seqlen_k, 32, batch=2, heads_q=2, causal=True)
    yield Case("decode", 3, 2049, 64, heads_q=4, heads_kv=1, causal=True)
    yield Case("decode", 1, 2049, 64, heads_q=4, heads_kv=1, mask="b11k")
    yield Case("decode", 1, 2049, 64, heads_q=4, heads_kv=2, window=(300, 0))
    yield Case("decode", 2, 2049, 40, 24, heads_q=4, heads_kv=2, bias="h1k", causal=True)
    for heads_q, heads_kv in GROUPS:
        yield Case("group", 17, 40, batch=2, heads_q=heads_q, heads_kv=heads_kv, causal=True)
        yield Case("group", 65, 129, 32, heads_q=heads_q, heads_kv=heads_kv, mask="h1k")


LENGTHS = ["q_len", "kv_len", "kv_start", "align", "kv_len align", "q_len kv_len kv_start align"]


def _variants():
    for seqlen_q, seqlen_k in [(33, 70), (1, 300), (70, 33), (130, 260)]:
        sizes = (seqlen_q, seqlen_k)
        heads = {"batch": 3, "heads_q": 4, "heads_kv": 2}
        yield Case("softcap", *sizes, softcap=2.0, spread=4.0)
        yield Case("softcap", *sizes, softcap=30.0, mask="qk", bias="hqk", causal=True)
        for alibi in ("h", "bh", "1h"):
            yield Case("alibi", *sizes, **heads, alibi=alibi, causal=seqlen_q == 33)
        yield Case("sinks", *sizes, **heads, sinks=True)
        yield Case("sinks", *sizes, **heads, sinks=True, mask="b1qk", align=-20, causal=True)
        for chunk in (1, 7, 16, 64, 1000):
            yield Case("chunk", *sizes, chunk=chunk, causal=chunk == 16)
            yield Case("chunk", *sizes, chunk=chunk, align=-5, window=(9, 3))
        for lengths in LENGTHS:
            yield Case("lengths", *sizes, **heads, lengths=lengths)
            yield Case("lengths", *sizes, **heads, lengths=lengths, causal=True, mask="bhqk")
            yield Case("lengths", *sizes, **heads, lengths=lengths, window=(20, 5), bias="h1k")
            yield Case("lengths", *sizes, **heads, lengths="one " + lengths, chunk=9, mask="qk")
        everything = {"softcap": 5.0, "alibi": "bh", "sinks": True, "lengths": LENGTHS[-1]}
        yield Case("all", *sizes, **heads, **everything, window=(40, 9), mask="h1k", bias="b1qk")
        for dropout_p in (0.1, 0.5, 1.0):
            yield Case("dropout", *sizes, **heads, dropout_p=dropout_p, lengths="kv_start")
            yield Case("dropout", *sizes, **heads, dropout_p=dropout_p, sinks=True, causal=True)


def _halves():
    for dtype in ("float16", "bfloat16"):
        for size in (1, 16, 65, 257):
            yield Case("half", size, 70, 40, 24, heads_q=4, heads_kv=2, dtype=dtype, causal=True)
        yield Case("half", 33, 1025, 64, dtype=dtype, spread=10.0)
        yield Case("half", 33, 70, dtype=dtype, mask="qk", bias="hqk")
        yield Case("half", 33, 70, dtype=dtype, bias="qk", bias_dtype="float32", alibi="h")
        yield Case("half", 33, 70, bias="qk", bias_dtype=dtype, sinks=True)
        yield Case("half", 33, 70, dtype=dtype, batch=3, lengths=LENGTHS[-1], sinks=True)


def _cases():
    for make in (_sizes, _head_dims, _flags, _masks, _decode, _variants):
        for n, case in enumerate(make()):
            yield case
            if n % 3 == 0:
                yield replace(case, dtype="float64")
    yield from _halves()


CASES = list(dict.fromkeys(_cases()))
