"""The frozen records that pass between check, plan and run. No arrays, no logic: hashable,
printable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .modifier import Modifier


@dataclass(frozen=True, slots=True)
class Variant:
    """What a compiled kernel is specialised for. Every field is a constant to it and part of its
    cache key.

    All else (mask, bias, softcap, lengths, ...) reaches it as arguments: a branch on them costs
    nothing there, and one kernel is compiled for each dtype, not one for each combination.
    """

    dtype: str  # of scores, sums and lse: "float32" or "float64"
    storage: str  # of q, k, v and out in memory: dtype, or "float16", "bfloat16" for float32
    paged: bool = False  # keys lie on pages: Operands.block_table
    score_mod: Modifier | None = None  # applied to scores after softcap, before bias and ALiBi
    mask_mod: Modifier | None = None  # hides keys
    score_mod_grad: Modifier | None = None  # d score_mod / d score; None where it is 1


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
    # Query row i stands at key position i + offset. With ranges, this, seqlen_q and seqlen_k are
    # those of a batch entry of full length, for estimates only.
    offset: int
    left: int | None  # row i sees keys j >= i + offset - left; None = unlimited
    right: int | None  # row i sees keys j <= i + offset + right; causal is 0; None = unlimited
    chunk: int = 0  # rows see keys whose j // chunk is (i + offset) // chunk; 0 = all
    # Where this call is a part of a larger one: keys of that before key 0 of this, from which chunk
    # and dropout count.
    keys_before: int = 0
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0 = off
    dropout_p: float = 0.0  # the share of probabilities that dropout takes; 0 = off
    dropout_seed: int = 0  # from 0 to 2**63 - 1
    # The factors of both products may be rounded to tf32, where a backend has tensor cores for it.
    # Only if Variant.storage is "float32", and never those of gradients.
    tf32: bool = False
    # Modifiers and block masks are given key j as j + first_key, its place in the caller's array.
    # With ranges, it is kv_start of each batch entry instead.
    first_key: int = 0
    block_mask_m: int = 0  # query rows of a block of Operands.block_mask; 0 without one
    block_mask_n: int = 0  # keys of one
    # (query, key) pairs of a head in blocks that are not skipped, on average: for estimates
    block_mask_pairs: int = 0

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 0

    def key_range(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys (start, stop) that window and chunk let query rows i see; none if start >= stop."""
        position = i + self.offset
        start, stop = np.zeros_like(position), np.full_like(position, self.seqlen_k)
        if self.left is not None:
            start = np.maximum(start, position - self.left)
        if self.right is not None:
            stop = np.minimum(stop, position + self.right + 1)
        if self.chunk:
            before = self.keys_before
            # Rounded down, also below 0.
            first = (position + before) // self.chunk * self.chunk - before
            start, stop = np.maximum(start, first), np.minimum(stop, first + self.chunk)
        return start, stop

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that window and chunk allow, and no more than a block mask
        has in blocks that it does not skip. Mask, bias and mask_mod aside.
        """
        start, stop = self.key_range(np.arange(self.seqlen_q, dtype=np.int64))
        pairs = int(np.maximum(stop - start, 0).sum())
        return min(pairs, self.block_mask_pairs) if self.block_mask_m else pairs

    def modifiers(self) -> list[tuple[str, str]]:
        """Rows of text about modifiers and block mask, where there are any."""
        given = (self.variant.score_mod, self.variant.mask_mod)
        steps = [f"{m.argument}: {len(m.steps)} operations" for m in given if m is not None]
        rows = [("modifiers", ", ".join(steps))] if steps else []
        if self.block_mask_m:
            share = self.block_mask_pairs / max(1, self.seqlen_q * self.seqlen_k)
            skipped = f"{100 * (1 - share):.1f} % of the pairs skipped"
            rows.append(("block mask", f"{self.block_mask_m} x {self.block_mask_n}, {skipped}"))
        return rows

    @property
    def flop(self) -> int:
        """Multiplies and adds of the two products, over visible pairs."""
        pairs = self.batch * self.heads_q * self.visible_pairs
        return 2 * pairs * (self.head_dim + self.head_dim_v)


class Operands(NamedTuple):
    """The arrays of one call as check() hands them to a backend: canonical views, nothing expanded.

    q, k, v, mask, bias, out and lse share the leading dimensions (stride 0 where broadcast). All
    are native-endian and aligned, and have strides that are multiples of their itemsize (of any
    sign, 0 included). Inputs may be read-only.

    Packed calls have `starts`, and the leading dimensions of q, k, v, out and lse are then (1,):
    row i of batch entry b is row starts[b, 0] + i of q, out and lse, key j is row starts[b, 1] + j
    of k and v. Rows at and past its q_len belong to others, and are not to be written.

    Paged calls have `block_table`, `ranges`, and k and v of (num_pages, heads_kv, page_size, dim):
    key j of batch entry b is row j % page_size of page block_table[b, j // page_size], whatever the
    leading dimensions. Entries of the table that hold no key of `ranges` may be anything.
    """

    q: np.ndarray  # (*lead, heads_q, seqlen_q, head_dim)
    k: np.ndarray  # (*lead, heads_kv, seqlen_k, head_dim)
    v: np.ndarray  # (*lead, heads_kv, seqlen_k, head_dim_v)
    mask: np.ndarray | None  # (*lead, heads_q, seqlen_q, seqlen_k) bool, True = may attend
    bias: np.ndarray | None  # (*lead, heads_q, seqlen_q, seqlen_k) float, added after softcap
    out: np.ndarray  # (*lead, heads_q, seqlen_q, head_dim_v); written, every element
    # (*lead, heads_q, seqlen_q) Variant.dtype, natural log; written if not None
    lse: np.ndarray | None
    # (*lead, heads_q) Variant.dtype: slope * |i + offset - j| is taken from the scores
    alibi: np.ndarray | None = None
    sinks: np.ndarray | None = None  # (heads_q,) Variant.dtype: one more score that has no value
    # (batch, 4) int64, C-contiguous: q_len, kv_start, kv_stop, offset of each batch entry. It has
    # rows i < q_len, keys kv_start to kv_stop, which window, chunk, alibi and dropout count from
    # kv_start, mask and bias from 0. api writes the rows past q_len.
    ranges: np.ndarray | None = None
    starts: np.ndarray | None = None  # (batch, 2) int64, C-contiguous: first rows in q and in k
    # What Variant.score_mod and mask_mod index, as aux_arrays() returns it: read-only. They get b,
    # the place in the batch in C order, the query head h, and i and j as mask and bias count them.
    score_aux: tuple[np.ndarray, ...] = ()
    mask_aux: tuple[np.ndarray, ...] = ()
    # (batch, heads_q, query blocks, key blocks) uint8, stride 0 where broadcast: BlockMask.kinds.
    # Variant.mask_mod needs to be run in partial blocks only.
    block_mask: np.ndarray | None = None
    block_table: np.ndarray | None = None  # (batch, max_pages) int64, C-contiguous: pages of k, v
    # (batch, heads_q) uint64, C-contiguous: dropout.head_keys(); None without dropout.
    dropout_keys: np.ndarray | None = None


class Others(NamedTuple):
    """Those of Operands that a call like one before is given anew: C-contiguous."""

    ranges: np.ndarray | None = None
    block_table: np.ndarray | None = None
    alibi: np.ndarray | None = None
    sinks: np.ndarray | None = None


class Gradients(NamedTuple):
    """The arrays of attention_backward() beside Operands, of which it reads out and lse.

    Those with two and more axes share the leading dimensions of Operands: also (1,) where packed.
    What is written is 0 before, writeable, and of Variant.dtype; stride 0 means a sum.
    """

    dout: np.ndarray  # (*lead, heads_q, seqlen_q, head_dim_v), dtype of q
    dlse: np.ndarray | None  # (*lead, heads_q, seqlen_q) Variant.dtype
    dq: np.ndarray  # written, as all that follow: (*lead, heads_q, seqlen_q, head_dim)
    dk: np.ndarray  # (*lead, heads_kv, seqlen_k, head_dim)
    dv: np.ndarray  # (*lead, heads_kv, seqlen_k, head_dim_v)
    dbias: np.ndarray | None  # (*lead, heads_q, seqlen_q, seqlen_k), with the strides of one bias
    dalibi: np.ndarray | None  # (batch, heads_q)
    dsinks: np.ndarray | None  # (heads_q,)
    # (*lead, heads_q, seqlen_q): the share of the sink, where rows are large and dsinks is asked
    # for; not a sum: it comes as exp(sink - lse), and large rows get their own.
    sink_weights: np.ndarray | None = None


class Placement(NamedTuple):
    """Where the arrays of a call for a GPU are."""

    ordinal: int  # of the device
    on_device: bool  # in its memory already; else in the CPU's
    whole_rows: bool  # rows of q, k, v and out are contiguous and begin at multiples of 16 bytes
    options: bool  # a mask, a bias or ALiBi slopes are among them
    no_maps: str = ""  # why copies of whole tiles cannot read q, k and v; "" if they can


@dataclass(frozen=True, slots=True)
class Plan:
    """How a Problem will be run, and why. `print(plan)` is what users read."""

    backend: str  # "cpu", "numpy" or "cuda"
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
    notes: tuple[str, ...] = ()  # what else a user may want to know
    choice: Any = None  # cuda: the cuda.choice.Choice of a kernel

    def __str__(self) -> str:
        problem = self.problem
        sizes = (
            f"{problem.batch} x {problem.heads_q} heads over {problem.heads_kv}, "
            f"{problem.seqlen_q} queries x {problem.seqlen_k} keys, "
            f"head_dim {problem.head_dim}/{problem.head_dim_v}, {problem.variant.storage}"
            f"{', tf32 allowed' if problem.tf32 else ''}"
        )
        pairs = f"{flop_text(problem.flop)} over {problem.visible_pairs} visible pairs a head"
        blocks = f"block_m {self.block_m}, block_n {self.block_n}"
        if self.backend == "cpu":
            blocks += f", mc {self.mc}, split_n {self.split_n}"
        plural = "s" if self.work_items != 1 else ""
        items = f"{self.num_threads} for {self.work_items} work item{plural}"
        if self.num_splits > 1:
            items += f", {self.num_splits} along the keys"
        if self.backend == "numpy":
            items = "as NumPy's BLAS library decides"
        rows = [
            ("backend", f"{self.backend}: {self.reason}"),
            *((f"not {name}", why) for name, why in self.rejected),
            ("problem", sizes),
            *problem.modifiers(),
            ("work", pairs),
            ("blocks", blocks),
            *([("threads", items)] if self.choice is None else self.choice.rows()),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{name:<11} {text}" for name, text in rows)


def flop_text(flop: int) -> str:
    """Three digits and a unit."""
    for limit, unit in ((1e9, "Gflop"), (1e6, "Mflop"), (1e3, "kflop")):
        if flop >= limit:
            return f"{flop / limit:.3g} {unit}"
    return f"{flop} flop"
