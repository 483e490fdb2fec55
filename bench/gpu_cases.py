"""What bench/gpu.py tries: calls that must be right, and calls whose time counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastattn.verifying.case import Case
from fastattn.verifying.trial import Trial

# --- calls that must be right ---------------------------------------------------------------------

SMALL = Case("plain", 150, 220, 64, batch=2, heads_q=4, heads_kv=2)
# Every option of attention(), for every dtype. Sizes are no multiples of a block.
VARIANTS: dict[str, dict] = {
    "plain": {},
    "causal": {"causal": True},
    "more queries": {"seqlen_q": 220, "seqlen_k": 150, "causal": True},
    "top left": {"causal": True, "align": "top_left"},
    "window": {"window": (40, 7)},
    "chunk": {"chunk": 48, "causal": True},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.2},
    "mask": {"mask": "b1qk"},
    "bias": {"bias": "1hqk"},
    "alibi": {"alibi": "bh", "causal": True},
    "sinks": {"sinks": True},
    "lengths": {"lengths": "q_len kv_len kv_start align", "causal": True, "sinks": True},
    "dropout": {"dropout_p": 0.3},
    "score_mod": {"modifiers": "table"},
    "mask_mod": {"modifiers": "documents"},
    "block mask": {"modifiers": "gaps", "block": (64, 64)},
    "decode": {"seqlen_q": 1, "seqlen_k": 1500},
    "decode of groups": {"seqlen_q": 1, "seqlen_k": 700, "heads_q": 8, "heads_kv": 1},
    "decode of lengths": {"seqlen_q": 1, "seqlen_k": 1100, "lengths": "kv_len kv_start"},
    "one key": {"seqlen_q": 5, "seqlen_k": 1},
    "wide values": {"head_dim_v": 200},
    "odd head_dim": {"head_dim": 33},
    "head_dim 96": {"head_dim": 96, "causal": True},
    "head_dim 128": {"head_dim": 128, "causal": True},
    "head_dim 256": {"head_dim": 256, "causal": True},
}
# What the kernel for compute capability 9.0 is for: once without it, once with it.
LARGER = replace(SMALL, seqlen_q=300, seqlen_k=420)
OF_WARPGROUPS: dict[str, dict] = {
    "wgmma plain": {},
    "wgmma causal": {"causal": True},
    "wgmma more queries": {"seqlen_q": 420, "seqlen_k": 300, "causal": True},
    "wgmma window": {"window": (100, 7)},
    "wgmma sinks": {"sinks": True},
    "wgmma lengths": {"lengths": "q_len kv_len kv_start align", "causal": True},
    "wgmma odd head_dim": {"head_dim": 72},
    "wgmma wide values": {"head_dim_v": 200},
    **{f"wgmma head_dim {d}": {"head_dim": d, "causal": True} for d in (96, 128, 192, 256)},
}
DTYPES = ("bfloat16", "float32", "float16", "float64")
PRECISIONS = [(dtype, "") for dtype in DTYPES]
PRECISIONS.insert(2, ("float32", "tf32"))


def trials() -> Iterator[Trial]:
    """All of them, the dtypes of most use first."""
    strided = ("heads last", "strided", "transposed")
    for dtype, precision in PRECISIONS:
        of, start = {"dtype": dtype, "precision": precision}, f"{precision} ".lstrip()
        for name, changes in VARIANTS.items():
            yield Trial(replace(SMALL, name=start + name, **of, **changes))
        if dtype in ("bfloat16", "float16"):
            yield from _of_warpgroups(dtype)
        for poison in ("k", "v"):
            case = replace(SMALL, name=f"{start}nan in {poison}", **of, causal=True)
            yield Trial(case, poison=poison)
        yield Trial(replace(SMALL, name=f"{start}packed", **of, causal=True), kind="varlen")
        yield Trial(replace(SMALL, name=f"{start}strides", **of), layouts=strided)


# Of gradients, of those above: what one of their kernels does another way.
GRADIENTS = (
    *("plain", "causal", "more queries", "window", "chunk", "softcap", "negative scale", "mask"),
    *("bias", "alibi", "sinks", "lengths", "dropout", "one key", "odd head_dim", "wide values"),
    *("head_dim 128", "head_dim 256"),
)


def gradient_trials() -> Iterator[Trial]:
    """Calls of attention_backward(), likewise."""
    for dtype in DTYPES:
        for name in GRADIENTS:
            case = replace(SMALL, name=f"gradients, {name}", dtype=dtype, **VARIANTS[name])
            yield Trial(case, kind="backward")
        case = replace(SMALL, name="gradients, packed", dtype=dtype, causal=True, sinks=True)
        yield Trial(case, kind="varlen backward")


def _of_warpgroups(dtype: str) -> Iterator[Trial]:
    for name, changes in OF_WARPGROUPS.items():
        yield Trial(replace(LARGER, name=name, dtype=dtype, **changes))
    yield Trial(replace(LARGER, name="wgmma nan in v", dtype=dtype, causal=True), poison="v")
    yield Trial(replace(LARGER, name="wgmma packed", dtype=dtype, causal=True), kind="varlen")


# --- calls whose time counts ----------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A call of attention(); causal is what torch's is where seqlen_q = seqlen_k."""

    name: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    precision: str | None = None

    @property
    def flop(self) -> int:
        """Multiplies and adds of both products over visible pairs."""
        hidden = self.seqlen_q * (self.seqlen_q - 1) // 2 if self.causal else 0
        pairs = self.batch * self.heads_q * (self.seqlen_q * self.seqlen_k - hidden)
        return 4 * pairs * self.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of q, k, v and out."""
        rows = 2 * self.heads_q * self.seqlen_q + 2 * self.heads_kv * self.seqlen_k
        return self.batch * rows * self.head_dim * (4 if self.dtype == "float32" else 2)


LONG = Timed("dense-8k-d128", 2, 16, 16, 8192, 8192, 128)
FLOATS = replace(LONG, dtype="float32", seqlen_q=2048, seqlen_k=2048)
FORWARD = (
    LONG,
    replace(LONG, name="causal-8k-d128", causal=True),
    replace(LONG, name="dense-8k-d64", heads_q=32, heads_kv=32, head_dim=64),
    replace(LONG, name="causal-8k-d64", heads_q=32, heads_kv=32, head_dim=64, causal=True),
    replace(LONG, name="gqa-4k-d128", heads_q=32, heads_kv=8, seqlen_q=4096, seqlen_k=4096),
    replace(LONG, name="causal-1k-d128", batch=16, seqlen_q=1024, seqlen_k=1024, causal=True),
    replace(LONG, name="dense-4k-d256", heads_q=8, heads_kv=8, head_dim=256),
    replace(FLOATS, name="dense-2k-d128-f32"),
    replace(FLOATS, name="dense-2k-d128-tf32", precision="tf32"),
    replace(FLOATS, name="causal-2k-d64-tf32", precision="tf32", head_dim=64, causal=True),
)
BACKWARD = (
    replace(LONG, name="dense-8k-d128"),
    replace(LONG, name="causal-8k-d128", causal=True),
    replace(
        LONG, name="causal-2k-d64", batch=8, seqlen_q=2048, seqlen_k=2048, head_dim=64, causal=True
    ),
)
DECODE = (
    Timed("decode-mha-8k", 16, 32, 32, 1, 8192, 128),
    Timed("decode-gqa-8k", 32, 32, 8, 1, 8192, 128),
    Timed("decode-gqa-64k", 2, 32, 8, 1, 65536, 128),
)
