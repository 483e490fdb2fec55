"""The one struct that a kernel receives: addresses, strides, sizes. Plain Python, so that run.py
needs no Numba.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence

import numpy as np

# Each operand has an address (0 if absent), the address of `batch` int64 offsets for leading
# dimensions that no single stride describes (0 where one does), and strides in elements, 0 where an
# axis is broadcast.
OPERANDS = ("q", "k", "v", "out", "mask", "bias")
PARTS = ("", "_table", "_batch", "_head", "_row", "_col")
FIELDS = (
    "scale_log2",  # float64: |scale| / ln 2, as the kernel works in base 2; 1 if scale is 0
    "q_sign",  # float64: the sign of scale, -1, 0 or 1
    "softcap",  # float64: 0 if off
    "dropout_factor",  # float64: 1 / (1 - dropout_p), or 0
    "heads_kv",
    "group",
    "rows",  # group * seqlen_q: rows that share a key head, ordered (query, head in group)
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "offset",
    "left",
    "right",
    "chunk",
    "keys_before",  # what chunk and dropout add to a position and a key index
    "dropout_threshold",  # numbers below it, of 2**32, drop
    "block_m",
    "m_blocks",
    "block_n",
    "mc",
    "s_stride",  # row stride of the scores, elements
    "acc_stride",  # head_dim_v rounded up to whole registers
    "split_n",
    "num_splits",
    "num_threads",
    "num_items",
    "changes_scores",  # 1 if a bias, softcap or ALiBi is to be applied to scores, else 0
    "bias_kind",  # how the bias is stored: see BIAS_KINDS
    "counter",  # address of two int64: items that threads have drawn, items that are done
    "lse",  # address of (*lse.shape, 2): base-2 reference and sum of each row, or 0
    "lse_batch",  # its strides, in rows
    "lse_head",
    # address of (batch, heads_kv, rows, num_splits, acc_stride + 2): acc, reference, sum; or 0
    "partial",
    "alibi",  # address of (batch, heads_q) slopes
    "sinks",  # address of (heads_q,)
    "ranges",  # address of (batch, 4) int64: Operands.ranges, or 0
    "starts",  # address of (batch, 2) int64: Operands.starts, or 0
    "block_table",  # address of (batch, max_pages) int64: Operands.block_table
    "max_pages",
    "page_size",  # keys of a page
    "k_page",  # strides from page to page
    "v_page",
    "first_key",  # what modifiers add to a key index
    "score_aux",  # address of aux_table() of the score_mod
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
GRADIENT_OPERANDS = ("dout", "dq", "dk", "dv", "dbias")
# What follows in the struct of the kernel that computes gradients.
GRADIENT_FIELDS = (
    "scale",  # float64: |scale|
    "row_lse",  # address of (batch, heads_q, rows): lse as the caller gave it
    # address of the same shape: p = exp2(s - row_lse) * row_weight, row_lse in base 2; 0 if all are
    # 1 and it is not
    "row_weight",
    "dlse",  # address of the same shape, or 0
    "dalibi",  # address of (batch, heads_q, key blocks) float64, or 0
    "progress",  # address of (batch * heads_kv, key blocks) int64: see backward.py
    "n_blocks",  # key blocks
    "heads_per_item",  # key heads of a work item: 1, or all, where they share dbias
    "together",  # as many of these take turns; then come the next
    "q_stride",  # row strides of packed rows of q and k, and of dout
    "d_stride",
    *(operand + part for operand in GRADIENT_OPERANDS for part in PARTS),
)
FLOATS = ("scale_log2", "q_sign", "softcap", "dropout_factor", "scale")
LOG2_E = 1.4426950408889634  # 1 / ln 2: kernels work in base 2
LN_2 = 0.6931471805599453
LINE = 64  # bytes of a cache line
NO_MORE = 1 << 62  # a counter past every item
Counter = ctypes.c_int64 * 2  # how many items threads have drawn, and how many they have done
# What the body of a parallel region is given.
BODY_FIELDS = (
    "result",  # a word that it writes to
    "kernel",  # addresses
    "job",
    "scratch",
    "scratch_stride",  # bytes from the scratch of one thread to that of the next
    "quota",  # items that each thread may do
    "thread_number",  # address of the C function that tells a thread its number, from 0 on
    "status",  # of a kernel that failed
)
Body = ctypes.c_int64 * len(BODY_FIELDS)
DONE = 1 << 62  # progress of an item that has come to its end
MOST_ASKS = 3  # entries of a list of asks.py: queries, keys, values
# int64s at the start of a thread's scratch: the numbers of its work item, those of its next, asks
ITEM_SIZE = 48
# Registers of scratch for products.few_scores() and masking.mask_row()
SPARE_REGISTERS = 5
# Rows after a block of keys that pages.offsets() also finds: the kernels ask for them ahead.
ROWS_AFTER = 64
# How a bias is stored, by bias_kind; 0 is no bias.
BIAS_KINDS = ("", "float32", "float64", "float16", "bfloat16")
PLACE = {name: index for index, name in enumerate(FIELDS)}  # in the array that pack() returns
OFFSET = {name: 8 * index for index, name in enumerate((*FIELDS, *GRADIENT_FIELDS))}  # bytes


def _packer(fields: Sequence[str]) -> tuple[struct.Struct, type[ctypes.Array]]:
    packer = struct.Struct("=" + "".join("d" if name in FLOATS else "q" for name in fields))
    return packer, ctypes.c_int64 * len(fields)


_PACKER, Job = _packer(FIELDS)
_LONG_PACKER, _LongBuffer = _packer((*FIELDS, *GRADIENT_FIELDS))


def pack(values: Iterable[float]) -> ctypes.Array:
    """The struct, its values in the order of FIELDS. Keep it alive while a kernel runs;
    addressof() is its address.
    """
    job = Job()
    _PACKER.pack_into(job, 0, *values)
    return job


def pack_gradients(values: Iterable[float]) -> ctypes.Array:
    """The same with GRADIENT_FIELDS behind."""
    job = _LongBuffer()
    _LONG_PACKER.pack_into(job, 0, *values)
    return job


def aux_table(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """int64 table of the aux arrays of a modifier: of each the address, its sizes, and its strides
    in elements. Keep it, and the arrays, alive while a kernel runs.
    """
    return np.array(
        [
            number
            for array in arrays
            for number in (
                array.__array_interface__["data"][0],
                *array.shape,
                *(stride // array.itemsize for stride in array.strides),
            )
        ],
        np.int64,
    )
