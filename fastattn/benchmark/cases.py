"""The named workloads: what people run, what is hard, and a sweep over seqlen."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem, Variant


class Inputs(NamedTuple):
    """The arrays of one workload. mask is bool, True = may attend; bias is added after scale."""

    q: np.ndarray  # (batch, heads_q, seqlen_q, head_dim)
    k: np.ndarray  # (batch, heads_kv, seqlen_k, head_dim)
    v: np.ndarray  # (batch, heads_kv, seqlen_k, head_dim)
    mask: np.ndarray | None  # (batch, 1, 1, seqlen_k) or (1, 1, seqlen_q, seqlen_k)
    bias: np.ndarray | None  # (1, heads_q, seqlen_q, seqlen_k), dtype of q


@dataclass(frozen=True)
class Case:
    """One workload. Causal ones are square, so top-left and bottom-right alignment agree."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    causal: bool = False
    masking: str = ""  # "padding" (a mask of keys), "mask" (of pairs), "bias", or nothing
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def problem(self) -> Problem:
        """The same workload as fastattn's own record, which counts its work."""
        return Problem(
            variant=Variant(dtype=self.dtype, storage=self.dtype),
            batch=self.batch,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            scale=self.head_dim**-0.5,
            offset=self.seqlen_k - self.seqlen_q,
            left=None,
            right=0 if self.causal else None,
        )

    def inputs(self, seed: int = 0) -> Inputs:
        """Standard normal q, k, v; masks that leave every row at least one key."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.dtype(self.dtype).type)

        q = normal(self.batch, self.heads_q, self.seqlen_q, self.head_dim)
        k = normal(self.batch, self.heads_kv, self.seqlen_k, self.head_dim)
        v = normal(self.batch, self.heads_kv, self.seqlen_k, self.head_dim)
        mask = bias = None
        if self.masking == "padding":
            kv_len = rng.integers(self.seqlen_k // 2, self.seqlen_k, (self.batch, 1, 1, 1))
            mask = np.arange(self.seqlen_k) < kv_len
        elif self.masking == "mask":
            mask = rng.random((1, 1, self.seqlen_q, self.seqlen_k)) < 0.5
            mask[..., 0] = True
        elif self.masking == "bias":
            bias = normal(1, self.heads_q, self.seqlen_q, self.seqlen_k)
        return Inputs(q, k, v, mask, bias)


def _square(name: str, batch: int, heads: int, seqlen: int, head_dim: int, **flags: Any) -> Case:
    return Case(name, batch, heads, heads, seqlen, seqlen, head_dim, **flags)


FORWARD = (
    _square("bert-128", 8, 12, 128, 64),
    _square("bert-512", 1, 12, 512, 64),
    _square("vit-197", 4, 12, 197, 64),
    _square("minilm-256", 16, 12, 256, 32),
    _square("causal-1k", 1, 8, 1024, 64, causal=True),
    _square("gpt2-1k-causal", 1, 12, 1024, 64, causal=True),
    replace(_square("llama-2k-gqa", 1, 32, 2048, 128, causal=True), heads_kv=8),
    _square("dense-4k", 1, 8, 4096, 64),
    _square("long-8k", 1, 8, 8192, 64),
    _square("sd-4k-d40", 2, 8, 4096, 40),
    *(_square(f"dim-{head_dim}", 1, 8, 1024, head_dim) for head_dim in (37, 80, 96, 256)),
    _square("padding-384", 4, 12, 384, 64, masking="padding"),
    _square("mask-1k", 1, 12, 1024, 64, masking="mask"),
    _square("bias-512", 1, 12, 512, 64, masking="bias"),
    _square("float64-1k", 1, 8, 1024, 64, dtype="float64"),
)

DECODE = (
    Case("decode-mha", 1, 32, 32, 1, 4096, 128),
    Case("decode-gqa", 1, 32, 8, 1, 8192, 128),
    Case("decode-batch", 16, 12, 12, 1, 1024, 64),
)

OVERHEAD = (
    Case("one", 1, 1, 1, 1, 1, 16),
    _square("tiny", 1, 1, 16, 16),
)

SUITE = FORWARD + DECODE + OVERHEAD

# A function of seqlen alone, for the plots.
_SHORTER = tuple(_square(f"seqlen-{2**n}", 1, 8, 2**n, 64) for n in range(7, 12))

CASES = {case.name: case for case in (*SUITE, *_SHORTER)}
SWEEP = (*_SHORTER, CASES["dense-4k"], CASES["long-8k"])

GROUPS = {
    "suite": SUITE,
    "sweep": SWEEP,
    "quick": tuple(
        CASES[name]
        for name in ("tiny", "bert-128", "vit-197", "causal-1k", "seqlen-2048", "decode-gqa")
    ),
}


def select(wanted: str) -> list[Case]:
    """Cases by a comma-separated list of names, patterns and groups ("suite", "sweep", "quick").

    Raises ValueError for a word that matches nothing.
    """
    chosen: dict[str, Case] = {}
    for word in wanted.split(","):
        found = GROUPS.get(word) or [CASES[name] for name in fnmatch.filter(CASES, word)]
        if not found:
            known = f"groups {tuple(GROUPS)} or names or patterns of {tuple(CASES)}"
            raise ValueError(f"cases must be {known}, got {word!r}")
        chosen.update({case.name: case for case in found})
    return list(chosen.values())
