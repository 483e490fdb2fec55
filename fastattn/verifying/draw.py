"""Random problems over all parameters: number n of a seed is the same on every machine."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from .case import LAYOUTS, Case
from .modifiers import NAMES
from .trial import Trial

KINDS = (*("forward",) * 5, "merge", *("varlen",) * 2, *("backward",) * 2, "varlen backward")
PAGED = ("forward", "varlen")
MODIFIED = ("float32", "bfloat16")  # a kernel for each and every modifier: seconds to compile
DTYPES = ("float32",) * 3 + ("float64", "float16", "bfloat16")
AXES = ("k", "q1", "qk", "h1k", "hqk", "b11k", "bhqk")
LENGTHS = ("q_len", "kv_len", "kv_start", "align")
HEAD_DIMS = (24, 31, 32, 33, 64, 65, 80, 128, 130)
MOST_SCORES = 1 << 17  # of one problem: the oracle stores them all
MOST_PRODUCTS = {"float64": 1 << 21}  # long double, which has no BLAS, is slow


def draw(seed: int, number: int) -> Trial:
    """Problem `number` of `seed`."""
    random = Random(f"{seed} {number}")
    kind = random.choice(KINDS)
    case = _case(random, kind)
    page_size = _size(random, 64) if kind in PAGED and random.random() < 0.15 else 0
    if page_size:  # all pages are full, but for what lengths say; modifiers would compile once more
        seqlen_k = max(1, case.seqlen_k // page_size) * page_size
        case = replace(case, seqlen_k=seqlen_k, modifiers="")
    layouts = (_sometimes(random, 0.3, LAYOUTS), _sometimes(random, 0.3, LAYOUTS), "plain")
    trial = Trial(
        case,
        kind,
        (*layouts[:2], _sometimes(random, 0.3, LAYOUTS)),
        # Dropped or not, 0 times NaN is NaN: what the oracle says of such pairs is no promise.
        poison=random.choice("qkv") if kind == "forward" and random.random() < 0.05 else "",
        num_threads=random.randint(1, 4),
        page_size=page_size,
        seed=random.getrandbits(32),
    )
    if case.dtype == "float32" and "backward" not in kind and random.random() < 0.25:
        trial = replace(trial, case=replace(case, precision="tf32"))
    return trial


def _sometimes(random: Random, share: float, values: tuple[str, ...]) -> str:
    """One of the values, else the first."""
    return random.choice(values) if random.random() < share else values[0]


def _size(random: Random, most: int) -> int:
    """From 1 to `most`: small ones far more often."""
    return min(most, int(most ** random.random()) + random.choice((0, 0, 1)))


def _case(random: Random, kind: str) -> Case:
    dtype = random.choice(DTYPES)
    heads_kv = _size(random, 4)
    heads_q, batch = heads_kv * _size(random, 6), _size(random, 4)
    head_dim, head_dim_v = (
        random.choice(HEAD_DIMS) if random.random() < 0.3 else _size(random, 40) for _ in range(2)
    )
    seqlen_q, seqlen_k = _size(random, 600), _size(random, 600)
    if random.random() < 0.05:  # decoding, with keys split over work items
        seqlen_q, seqlen_k = _size(random, 4), _size(random, 6000)
    scores = MOST_SCORES // 4 if "backward" in kind else MOST_SCORES
    while (
        batch * heads_q * seqlen_q * seqlen_k > scores
        or batch * heads_q * seqlen_q * seqlen_k * (head_dim + head_dim_v)
        > MOST_PRODUCTS.get(dtype, 1 << 62)
    ):
        batch, heads_q = 1, heads_kv
        seqlen_q, seqlen_k = max(1, seqlen_q // 2), max(1, seqlen_k * 3 // 4)
    case = Case(
        "drawn",
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        dtype=dtype,
    )
    return Case(**{**vars(case), **_options(random, case, kind)})


def _options(random: Random, case: Case, kind: str) -> dict[str, Any]:
    """Options that are not the default, each with a chance of its own."""
    packed = kind.startswith("varlen")
    options = {
        "scale": lambda: random.choice((0.0, -0.25, 1.0, 3.0)),
        "causal": lambda: True,
        "align": lambda: random.choice(
            ("top_left", random.randint(-case.seqlen_q - 3, case.seqlen_k + 3))
        ),
        "window": lambda: tuple(
            random.choice((None, _size(random, 2 * case.seqlen_k) - 1)) for _ in range(2)
        ),
        "chunk": lambda: _size(random, 2 * case.seqlen_k),
        "softcap": lambda: random.choice((0.0, 0.5, 3.0, 40.0)),
        "mask": lambda: "" if packed else random.choice(AXES),
        "bias": lambda: "" if packed else random.choice(AXES),
        "bias_dtype": lambda: random.choice(DTYPES),
        "alibi": lambda: random.choice(("h", "bh")),
        "sinks": lambda: True,
        "lengths": lambda: _lengths(random, packed),
        "modifiers": lambda: random.choice(NAMES) if case.dtype in MODIFIED else "",
        "block": lambda: (_size(random, 100), _size(random, 200)),
        "dropout_p": lambda: random.choice((0.1, 0.5, 1.0)),
        "spread": lambda: random.choice((0.0, 4.0, 30.0)),
    }
    # A third are plain calls, a third have a few options, a third have many.
    share = random.choice((0.04, 0.2, 0.5))
    return {name: make() for name, make in options.items() if random.random() < share}


def _lengths(random: Random, packed: bool) -> str:
    """What Case.lengths says. Packed members have lengths of their own."""
    names = [name for name in LENGTHS if random.random() < 0.6]
    if packed:
        return " ".join(name for name in names if name != "q_len")
    return " ".join(["one", *names] if random.random() < 0.3 and names else names)
