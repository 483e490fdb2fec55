"""Relative encodings as they enter here, beside the same as a bias of all pairs, interleaved.

python bench/relative.py
python bench/relative.py --threads 1 --rounds 41
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import repository
from rich.table import Table

import fastattn
from fastattn import mods
from fastattn.benchmark import summary
from fastattn.benchmark.contest import paired
from fastattn.commands import terminal
from fastattn.machine import default_num_threads
from fastattn.nn import positions

HEADS, HEAD_DIM, RADIUS = 8, 64, 16
TOLERANCE = 1e-4  # of the largest output; for wrong answers, not for rounding

Call = Callable[[], Any]


def alibi(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[Call]:
    slopes = positions.alibi_slopes(HEADS)
    return [
        lambda: fastattn.attention(q, k, v, causal=True, alibi=slopes),
        lambda: fastattn.attention(
            q, k, v, causal=True, bias=-slopes[:, None, None] * np.abs(distances(q)).astype(q.dtype)
        ),
    ]


def t5(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[Call]:
    weight, seqlen = rng.standard_normal((32, HEADS), np.float32), q.shape[-2]

    def as_bias() -> np.ndarray:
        bias = weight.T[:, mods.t5_buckets(distances(q), len(weight))]
        return fastattn.attention(q, k, v, bias=bias)

    return [
        lambda: fastattn.attention(q, k, v, **positions.t5_arguments(weight, seqlen, seqlen)),
        as_bias,
    ]


def shaw(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[Call]:
    """The term of keys alone: that of values has no such form."""
    table = rng.standard_normal((2 * RADIUS + 1, HEAD_DIM), np.float32)

    def as_bias() -> np.ndarray:
        place = np.clip(distances(q), -RADIUS, RADIUS) + RADIUS
        terms = q @ table.T * q.dtype.type(HEAD_DIM**-0.5)
        bias = np.take_along_axis(terms, np.broadcast_to(place, (1, HEADS, *place.shape)), -1)
        return fastattn.attention(q, k, v, bias=bias)

    return [lambda: positions.shaw_attention(q, k, v, table), as_bias]


def transformer_xl(
    rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> list[Call]:
    seqlen = q.shape[-2]
    r = rng.standard_normal((HEADS, seqlen, HEAD_DIM), np.float32)
    u, w = rng.standard_normal((2, HEADS, HEAD_DIM), np.float32)

    def as_bias() -> np.ndarray:
        """The terms of all pairs, brought into place by the shift of the paper's appendix B."""
        terms = (q + w[:, None]) @ r[:, ::-1].swapaxes(-1, -2) * q.dtype.type(HEAD_DIM**-0.5)
        padded = np.zeros((1, HEADS, seqlen, seqlen + 1), q.dtype)
        padded[..., 1:] = terms
        bias = padded.reshape(1, HEADS, seqlen + 1, seqlen)[:, :, 1:]
        return fastattn.attention(q + u[:, None], k, v, causal=True, bias=bias)

    return [lambda: positions.transformer_xl_attention(q, k, v, r, u, w), as_bias]


def distances(q: np.ndarray) -> np.ndarray:
    """j - i of all pairs."""
    place = np.arange(q.shape[-2])
    return place - place[:, None]


SCHEMES = {"alibi": alibi, "t5": t5, "shaw": shaw, "transformer_xl": transformer_xl}


def measure(name: str, seqlen: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of (ours, as a bias of all pairs) in each round, once they agree."""
    rng = np.random.default_rng(0)
    shape = (1, HEADS, seqlen, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    ours, as_bias = SCHEMES[name](rng, q, k, v)
    exact = as_bias()
    error = np.abs(ours() - exact).max() / np.abs(exact).max()
    if not error <= TOLERANCE:  # NaN fails too
        raise AssertionError(f"{name}: error must be at most {TOLERANCE:g}, got {error:.1e}")
    return paired(ours, as_bias, rounds)


def main() -> None:
    parser = repository.parser(__doc__)
    parser.add_argument("--seqlen", type=terminal.count, default=1024)
    parser.add_argument("--threads", type=terminal.count, default=default_num_threads())
    parser.add_argument("--rounds", type=terminal.count, default=21, help="of each pair of calls")
    options = parser.parse_args()
    fastattn.set_num_threads(options.threads)
    shown = Table(title=f"{HEADS} heads × {options.seqlen} × {HEAD_DIM}")
    for column in ("encoding", "here", "as a bias of all pairs", "ratio"):
        shown.add_column(column, justify="left" if column == "encoding" else "right")
    for name in SCHEMES:
        ours, theirs = measure(name, options.seqlen, options.rounds)
        low, ratio, high = np.percentile(np.array(theirs) / np.array(ours), (25, 50, 75))
        times = (summary.time_text(float(np.median(seconds))) for seconds in (ours, theirs))
        shown.add_row(name, *times, f"{ratio:.2f} ({low:.2f}–{high:.2f})")
    terminal.console().print(shown)


if __name__ == "__main__":
    main()
