"""A call of attention() as a few numbers and words, and its arrays, drawn from a seed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..optional import bfloat16


@dataclass(frozen=True)
class Case:
    """One call of attention().

    mask, bias and alibi name their axes: "b11k" is (batch, 1, 1, seqlen_k). lengths names what is
    drawn: "q_len", "kv_len", "kv_start" and "align", for each batch entry, or with "one" for all.
    modifiers is a name that modifiers.py knows, and block the size of the blocks of its mask.
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
    window: tuple[int | None, int | None] = (None, None)
    chunk: int = 0
    softcap: float | None = None
    mask: str = ""
    bias: str = ""
    bias_dtype: str = ""
    alibi: str = ""
    sinks: bool = False
    lengths: str = ""
    dropout_p: float = 0.0
    modifiers: str = ""
    block: tuple[int, int] | None = None
    precision: str = ""  # or "tf32"
    spread: float = 1.0  # standard deviation of q: large values make one key win

    def __str__(self) -> str:
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
        parts += [self.modifiers] * bool(self.modifiers)
        parts += ["block{}x{}".format(*self.block)] if self.block else []
        parts += [self.precision] * bool(self.precision)
        parts += [self.lengths.replace(" ", "_")] * bool(self.lengths)
        parts += [f"mask_{self.mask}"] * bool(self.mask)
        parts += [f"bias_{self.bias}{self.bias_dtype}"] * bool(self.bias)
        return "-".join([*parts, self.dtype.replace("float", "f")])

    def shape(self, axes: str) -> tuple[int, ...]:
        """Return the shape that `axes` names."""
        sizes = {"b": self.batch, "h": self.heads_q, "q": self.seqlen_q, "k": self.seqlen_k}
        return tuple(sizes.get(axis, 1) for axis in axes)

    def floor(self) -> int:
        """Return the roundings to allow where the formula's own error is a poor estimate of them:
        with few numbers. ALiBi makes scores as large as the distance to the keys that are seen.
        """
        return 16 + (self.seqlen_q + self.seqlen_k if self.alibi else 0)

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (q, k, v)."""
        rng = np.random.default_rng(seed)
        heads_kv = self.heads_kv or self.heads_q
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        q = rng.standard_normal((self.batch, self.heads_q, self.seqlen_q, self.head_dim))
        k = rng.standard_normal((self.batch, heads_kv, self.seqlen_k, self.head_dim))
        v = rng.standard_normal((self.batch, heads_kv, self.seqlen_k, head_dim_v))
        dtype = dtype_of(self.dtype)
        return (q * self.spread).astype(dtype), k.astype(dtype), v.astype(dtype)

    def flags(self, seed: int = 0) -> dict[str, Any]:
        """Return the keyword arguments, their arrays drawn from `seed`."""
        rng = np.random.default_rng((seed, 1))
        flags: dict[str, Any] = {"scale": self.scale, "causal": self.causal}
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
        if self.precision:
            flags["precision"] = self.precision
        return flags | self._lengths(rng)

    def _lengths(self, rng: np.random.Generator) -> dict[str, Any]:
        size = () if "one" in self.lengths else self.batch
        start = rng.integers(0, self.seqlen_k + 1, size)
        drawn = {
            "q_len": rng.integers(0, self.seqlen_q + 1, size),
            "kv_start": start // 2,
            "kv_len": rng.integers(start // 2, self.seqlen_k + 1),
            "align": rng.integers(-self.seqlen_q, self.seqlen_k + 1, size),
        }
        return {name: drawn[name] for name in self.lengths.split() if name != "one"}


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of this name. Raises ImportError where bfloat16 is not installed."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def has_bfloat16() -> bool:
    """Whether there are arrays of bfloat16 here."""
    return importlib.util.find_spec("ml_dtypes") is not None


def laid_out(a: np.ndarray, layout: str) -> np.ndarray:
    """Return `a` with other strides or bytes; the values are the same."""
    match layout:
        case "heads last":
            return np.ascontiguousarray(a.swapaxes(-3, -2)).swapaxes(-3, -2)
        case "transposed":
            return np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
        case "reversed":
            return np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1]
        case "strided":
            return np.repeat(a, 2, axis=-1)[..., 1::2]
        case "swapped" if a.dtype.kind == "f":  # others have one byte order
            return a.astype(a.dtype.newbyteorder())
    return a


LAYOUTS = ("plain", "heads last", "transposed", "reversed", "strided", "swapped")
