"""The table of shapes and flags on which every backend is held against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest


@dataclass(frozen=True)
class Case:
    """One call of attention().

    mask, bias and alibi name their axes: "b11k" is (batch, 1, 1, seqlen_k). lengths names what is
    drawn: "q_len", "kv_len", "kv_start" and "align", for each batch entry, or with "one" for all.
    """

    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 16
    head_dim_v: int | None = None
    batch: int = 1
    heads_q: int = 2
    heads_kv: int | None = None
    dtype: str = "float32"
    scale: float | None = None
    causal: bool = False
    align: str | int = "bottom_right"
    window: tuple = (None, None)
    chunk: int = 0
    softcap: float | None = None
    mask: str = ""
    bias: str = ""
    bias_dtype: str = ""
    alibi: str = ""
    sinks: bool = False
    lengths: str = ""
    dropout_p: float = 0.0
    spread: float = 1.0  # standard deviation of q: large values make one key win

    def __str__(self):
        heads = f"h{self.heads_q}" + (f"x{self.heads_kv}" if self.heads_kv else "")
        parts = [self.name, f"b{self.batch}", heads, f"q{self.seqlen_q}", f"k{self.seqlen_k}"]
        parts.append(f"d{self.head_dim}" + (f"x{self.head_dim_v}" if self.head_dim_v else ""))
        parts += [f"s{self.spread:g}"] * (self.spread != 1)
        parts += ["causal"] * self.causal
        parts += [f"{self.align}"] * (self.align != "bottom_right")
        parts += [f"w{self.window[0]}_{self.window[1]}"] * (self.window != (None, None))
        parts += [f"chunk{self.chunk}"] * bool(self.chunk)
        parts += [f"cap{self.softcap}"] * bool(self.softcap)
        parts += [f"alibi_{self.alibi}"] * bool(self.alibi)
        parts += ["sinks"] * self.sinks
        parts += [f"drop{self.dropout_p}"] * bool(self.dropout_p)
        parts += [self.lengths.replace(" ", "_")] * bool(self.lengths)
        parts += [f"mask_{self.mask}"] * bool(self.mask)
        parts += [f"bias_{self.bias}{self.bias_dtype}"] * bool(self.bias)
        return "-".join([*parts, self.dtype.replace("float", "f")])

    def shape(self, axes):
        """Return the shape that `axes` names."""
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.seqlen_q, "k": self.seqlen_k}
        return tuple(sizes.get(axis, 1) for axis in axes)

    def floor(self):
        """Return the roundings to allow where the formula's own error is a poor estimate of them:
        with few numbers. ALiBi makes scores as large as the distance to the keys that are seen.
        """
        return 16 + (self.seqlen_q + self.seqlen_k if self.alibi else 0)

    def arrays(self, seed=0):
        """Return (q, k, v)."""
        rng = np.random.default_rng(seed)
        heads_kv = self.heads_kv or self.heads_q
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        q = rng.standard_normal((self.batch, self.heads_q, self.seqlen_q, self.head_dim))
        k = rng.standard_normal((self.batch, heads_kv, self.seqlen_k, self.head_dim))
        v = rng.standard_normal((self.batch, heads_kv, self.seqlen_k, head_dim_v))
        return tuple(a.astype(dtype_of(self.dtype)) for a in (q * self.spread, k, v))

    def flags(self, seed=0):
        """Return the keyword arguments, their arrays drawn from `seed`."""
        rng = np.random.default_rng((seed, 1))
        flags = {"scale": self.scale, "causal": self.causal}
        flags |= {"align": self.align, "window": self.window}
        if self.mask:
            flags["mask"] = rng.random(self.shape(self.mask)) < 0.6
        if self.bias:
            bias = rng.standard_normal(self.shape(self.bias))
            bias = bias.astype(dtype_of(self.bias_dtype or self.dtype))
            bias[rng.random(bias.shape) < 0.1] = -np.inf
            flags["bias"] = bias
        if self.chunk:
            flags["chunk"] = self.chunk
        if self.softcap is not None:
            flags["softcap"] = self.softcap
        if self.alibi:
            flags["alibi"] = rng.random(self.shape(self.alibi)).astype(np.float32)
        if self.sinks:
            flags["sinks"] = rng.standard_normal(self.heads_q).astype(np.float32) * 3
        if self.dropout_p:
            flags |= {"dropout_p": self.dropout_p, "dropout_seed": seed + 3}
        return flags | self._lengths(rng)

    def _lengths(self, rng):
        size = () if "one" in self.lengths else self.batch
        start = rng.integers(0, self.seqlen_k + 1, size)
        drawn = {
            "q_len": rng.integers(0, self.seqlen_q + 1, size),
            "kv_start": start // 2,
            "kv_len": rng.integers(start // 2, self.seqlen_k + 1),
            "align": rng.integers(-self.seqlen_q, self.seqlen_k + 1, size),
        }
        return {name: drawn[name] for name in self.lengths.split() if name != "one"}


def dtype_of(name):
    """Return the dtype, bfloat16 included where ml_dtypes is installed."""
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


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
