"""The frozen records that pass between check, plan and run. No arrays, no logic: hashable,
printable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Variant:
    """What a compiled kernel is specialised for. Every field is a constant to it and part of its
    cache key.
    """

    dtype: str  # of q, k, v and out: "float32" or "float64"; sums are in the same type
    has_mask: bool = False
    bias_dtype: str = (
        ""  # storage type of the bias: "float16", "float32", "float64"; "" without a bias
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """One call of the core, made canonical: defaults filled in, causal folded into the window."""

    variant: Variant
    batch: int  # product of the broadcast leading dimensions
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float  # finite; multiplies q·k before the maximum is taken
    offset: int  # query row i stands at key position i + offset
    left: int | None  # row i sees keys j >= i + offset - left; None = unlimited
    right: int | None  # row i sees keys j <= i + offset + right; causal is 0; None = unlimited

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 0

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the window allows, mask and bias aside."""
        i = np.arange(self.seqlen_q, dtype=np.int64) + self.offset
        start = 0 if self.left is None else np.clip(i - self.left, 0, self.seqlen_k)
        stop = (
            self.seqlen_k if self.right is None else np.clip(i + self.right + 1, 0, self.seqlen_k)
        )
        return int(np.sum(np.broadcast_to(np.maximum(stop - start, 0), i.shape)))

    @property
    def flop(self) -> int:
        """Multiplies and adds of the two products, over visible pairs."""
        pairs = self.batch * self.heads_q * self.visible_pairs
        return 2 * pairs * (self.head_dim + self.head_dim_v)


class Operands(NamedTuple):
    """The arrays of one call as check() hands them to a backend: canonical views, nothing expanded.

    All share the leading dimensions (stride 0 where broadcast), are native-endian and aligned, and
    have strides that are multiples of their itemsize (of any sign, 0 included). Inputs may be read-
    only.
    """

    q: np.ndarray  # (*lead, heads_q, seqlen_q, head_dim)
    k: np.ndarray  # (*lead, heads_kv, seqlen_k, head_dim)
    v: np.ndarray  # (*lead, heads_kv, seqlen_k, head_dim_v)
    mask: np.ndarray | None  # (*lead, heads_q, seqlen_q, seqlen_k) bool, True = may attend
    bias: np.ndarray | None  # (*lead, heads_q, seqlen_q, seqlen_k) float, added after scale
    out: np.ndarray  # (*lead, heads_q, seqlen_q, head_dim_v); written, every element
    lse: (
        np.ndarray | None
    )  # (*lead, heads_q, seqlen_q) dtype of out, natural log; written if not None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a Problem will be run, and why. `print(plan)` is what users read."""

    backend: str  # "cpu" or "numpy"
    problem: Problem
    reason: str  # why this backend
    rejected: tuple[tuple[str, str], ...]  # (backend, why not) for each of the others
    block_m: int  # query rows of one work item (cpu: of all heads that share a key head)
    block_n: int  # keys of one online-softmax step
    num_threads: int
    mc: int = 0  # rows of a work item whose scores are held at once (cpu)
    split_n: int = 0  # the running softmax starts anew at multiples of this many keys (cpu)
    num_splits: int = 1  # work items along the keys, for few queries against many keys
    work_items: int = 1

    def __str__(self) -> str:
        problem = self.problem
        sizes = (
            f"{problem.batch} x {problem.heads_q} heads over {problem.heads_kv}, "
            f"{problem.seqlen_q} queries x {problem.seqlen_k} keys, "
            f"head_dim {problem.head_dim}/{problem.head_dim_v}, {problem.variant.dtype}"
        )
        pairs = f"{problem.flop / 1e9:.3g} Gflop over {problem.visible_pairs} visible pairs a head"
        blocks = f"block_m {self.block_m}, block_n {self.block_n}"
        if self.backend == "cpu":
            blocks += f", mc {self.mc}, split_n {self.split_n}"
        items = f"{self.num_threads} for {self.work_items} work items"
        if self.num_splits > 1:
            items += f", {self.num_splits} along the keys"
        rows = [
            ("backend", f"{self.backend}: {self.reason}"),
            *((f"not {name}", why) for name, why in self.rejected),
            ("problem", sizes),
            ("work", pairs),
            ("blocks", blocks),
            ("threads", items),
        ]
        return "\n".join(f"{name:<11} {text}" for name, text in rows)
