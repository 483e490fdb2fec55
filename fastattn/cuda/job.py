"""The arguments of every CUDA kernel: addresses, strides, sizes. Plain Python, so that launching a
kernel whose code is known needs no Numba.

A kernel takes them as one named tuple, which Numba flattens to one parameter of 8 bytes for each
field: they arrive in the constant bank, where an instruction reads them at no cost, and a field
that a kernel does not use costs nothing.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from typing import NamedTuple

# Each operand has an address (0 if absent), the address of `batch` int64 offsets for leading
# dimensions that no single stride describes (0 where one does), and strides in elements, 0 where an
# axis is broadcast. All addresses are of device memory.
OPERANDS = ("q", "k", "v", "out", "lse", "mask", "bias")
PARTS = ("", "_table", "_batch", "_head", "_row", "_col")
FIELDS = (
    "scale",  # float64: multiplies q·k, with its sign
    "scale_log2",  # float64: |scale| / ln 2, as kernels work in base 2; 1 if scale is 0
    "q_sign",  # float64: the sign of scale, -1, 0 or 1
    "softcap",  # float64: in natural units, 0 if off
    "dropout_factor",  # float64: 1 / (1 - dropout_p), or 0
    "batch",
    "heads_q",
    "heads_kv",
    "group",  # heads_q // heads_kv
    "seqlen_q",  # with ranges: the longest
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "offset",
    "left",  # UNLIMITED where there is no window on that side
    "right",
    "chunk",  # 0 = off
    "keys_before",  # what chunk and dropout add to a position and a key index
    "dropout_threshold",  # numbers below it, of 2**32, drop
    "m_blocks",  # blocks of query rows of one head: the grid has m_blocks * heads * batch * splits
    "num_splits",  # 1, or as many parts of the keys, for few queries against many keys
    "split_n",  # keys of one part: a multiple of the kernel's block_n
    "changes_scores",  # 1 if softcap, bias, ALiBi or a score_mod applies
    "bias_kind",  # how the bias is stored: its place in BIAS_KINDS
    # address of (batch, heads_q, seqlen_q, num_splits, head_dim_v) float32, then of
    # (batch, heads_q, seqlen_q, num_splits, 2): base-2 reference and sum; both 0 without splits
    "partial",
    "partial_state",
    "alibi",  # address of (batch, heads_q) slopes, or 0
    "alibi_batch",  # its stride from entry to entry; heads are contiguous
    "sinks",  # address of (heads_q,), or 0
    "ranges",  # address of (batch, 4) int64: Operands.ranges, or 0
    "starts",  # address of (batch, 2) int64: Operands.starts, or 0
    "block_table",  # address of (batch, max_pages) int64: Operands.block_table, or 0
    "max_pages",
    "page_size",  # keys of a page; k_batch and v_batch are then the strides from page to page
    "first_key",  # what modifiers add to a key index
    "score_aux",  # address of the table of aux arrays of the score_mod
    "mask_aux",  # and of the mask_mod
    "block_mask",  # address of Operands.block_mask, or 0
    "block_mask_batch",  # its strides
    "block_mask_head",
    "block_mask_row",
    "block_mask_col",
    "block_mask_m",  # queries and keys of one of its blocks
    "block_mask_n",
    "dropout_keys",  # address of Operands.dropout_keys, or 0
    *(operand + part for operand in OPERANDS for part in PARTS),
)
# What the kernels of gradients get besides: lse and out are inputs to them.
GRADIENT_OPERANDS = ("dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks", "dalibi")
GRADIENT_FIELDS = (
    *FIELDS,
    # Addresses of (batch, heads_q, seqlen_q) numbers of Variant.dtype, of which gradient_rows.py
    # says what they are
    "delta",
    "reference",
    "weight",  # 0: all are 1
    "sink_rows",  # 0: not wanted
    "alibi_rows",  # 0: not wanted. Each row's part of dalibi
    *(operand + part for operand in GRADIENT_OPERANDS for part in PARTS),
)
# What kernels that copy whole tiles get besides: a TensorMap of each, which the driver makes a
# parameter of MAP_BYTES of.
MAPS = ("q_map", "k_map", "v_map")
MAP_BYTES = 128
MAPPED_FIELDS = (*FIELDS, *MAPS)
FLOATS = ("scale", "scale_log2", "q_sign", "softcap", "dropout_factor")
UNLIMITED = 1 << 40  # a window side of None: past any key
BIAS_KINDS = ("", "float32", "float64", "float16", "bfloat16")
Job = namedtuple("Job", FIELDS, defaults=(0,) * len(FIELDS))  # type: ignore[misc]
_ZEROS = (0,) * len(GRADIENT_FIELDS)
GradientJob = namedtuple("GradientJob", GRADIENT_FIELDS, defaults=_ZEROS)  # type: ignore[misc]
MappedJob = namedtuple("MappedJob", MAPPED_FIELDS)  # type: ignore[misc]
PLACE = {name: number for number, name in enumerate(GRADIENT_FIELDS)}  # in both
PACKERS = {
    kind: struct.Struct("=" + "".join("d" if name in FLOATS else "q" for name in fields))
    for kind, fields in ((Job, FIELDS), (GradientJob, GRADIENT_FIELDS))
}


class TensorMap(NamedTuple):
    """An array as copies of whole tiles see it: they read boxes of 64 columns x `rows`, and 0 where
    nothing is.
    """

    address: int
    storage: str  # "float16" or "bfloat16"
    sizes: tuple[int, int, int, int]  # columns, rows, heads, batch entries; 1 where it repeats
    strides: tuple[int, int, int]  # bytes, from row to row and so on
    rows: int
