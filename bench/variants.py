"""What each variant costs, in times of plain attention of the same shape, interleaved with it.

python bench/variants.py
python bench/variants.py --only 'softcap,*_mod' --threads 1 --rounds 41 --json
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import repository
from rich.progress import track
from rich.table import Table

import fastattn
from fastattn import mods
from fastattn.benchmark import record, summary
from fastattn.benchmark.contest import paired
from fastattn.commands import terminal
from fastattn.machine import default_num_threads

HEADS, HEAD_DIM = 8, 64
# Of the largest output; for wrong answers, not for rounding.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class VariantCase:
    """One variant, and what it may cost: times plain float32 attention, for each visible pair."""

    name: str
    arguments: Callable[[np.random.Generator, int, int], dict[str, Any]]  # of (rng, heads, seqlen)
    target: float | None = None
    seqlen: int = 1024
    heads: int = HEADS
    dtype: str = "float32"
    share: float = 1.0  # visible pairs over all pairs


def constant(**arguments: Any) -> Callable[..., dict[str, Any]]:
    """Arguments that need no arrays."""
    return lambda rng, heads, seqlen: arguments


def a_mask(rng, heads, seqlen):
    return {"mask": rng.random((1, 1, seqlen, seqlen)) < 0.5}


def a_padding(rng, heads, seqlen):
    return {"mask": np.arange(seqlen) < seqlen - 24}


def a_bias(rng, heads, seqlen):
    return {"bias": rng.standard_normal((1, heads, seqlen, seqlen), dtype=np.float32)}


def slopes(rng, heads, seqlen):
    return {"alibi": 2.0 ** -np.arange(1, heads + 1, dtype=np.float32)}


def sinks(rng, heads, seqlen):
    return {"sinks": rng.standard_normal(heads, dtype=np.float32)}


def distance_penalty(score, b, h, i, j, aux):
    """ALiBi, written by a user."""
    return score - aux[0][h] * mods.abs(i - j)


def a_score_mod(rng, heads, seqlen):
    return {"score_mod": distance_penalty, "aux": tuple(slopes(rng, heads, seqlen).values())}


def same_document(b, h, i, j, aux):
    return aux[0][i] == aux[0][j]


def a_mask_mod(rng, heads, seqlen):
    return {"mask_mod": same_document, "aux": (np.arange(seqlen) % 3 // 2,)}


def a_block_mask(rng, heads, seqlen):
    halves = (np.arange(seqlen) * 2 // seqlen,)
    blocks = fastattn.create_block_mask(same_document, None, None, seqlen, seqlen, aux=halves)
    return {"block_mask": blocks, "aux": ()}


def pairs_of(window: int, seqlen: int) -> float:
    """Share of pairs that a causal window of `window` keys lets see."""
    return float(np.minimum(np.arange(seqlen) + 1, window).sum()) / seqlen**2


VARIANTS = (
    VariantCase("plain", constant()),
    VariantCase("causal", constant(causal=True), share=pairs_of(1024, 1024)),
    VariantCase("kv_len half", constant(kv_len=512), share=0.5),
    VariantCase("block_mask half", a_block_mask, share=0.5),
    VariantCase("softcap", constant(softcap=30.0), 1.25),
    VariantCase("alibi", slopes, 1.10),
    VariantCase("mask of pairs", a_mask, 1.15),
    VariantCase("mask of keys", a_padding, 1.15),
    VariantCase("bias", a_bias),
    VariantCase("score_mod alibi", a_score_mod, 1.25),
    VariantCase("score_mod softcap", constant(score_mod=mods.softcap(30.0)), 1.25),
    VariantCase("mask_mod documents", a_mask_mod, 1.25),
    VariantCase("mask_mod causal", constant(mask_mod=mods.causal), 1.25),
    VariantCase("sinks", sinks),
    VariantCase("dropout", constant(dropout_p=0.1, dropout_seed=1)),
    VariantCase("float16", constant(), 1.15, dtype="float16"),
    VariantCase("bfloat16", constant(), 1.15, dtype="bfloat16"),
    VariantCase(
        "window 256",
        constant(window=(255, 0)),
        1.5,
        seqlen=16384,
        heads=1,
        share=pairs_of(256, 16384),
    ),
)


def select(wanted: str) -> list[VariantCase]:
    """Variants by a comma-separated list of names and patterns."""
    by_name = {variant.name: variant for variant in VARIANTS}
    chosen = {}
    for word in wanted.split(","):
        found = fnmatch.filter(by_name, word)
        if not found:
            text = f"variants must be names or patterns of {tuple(by_name)}, got {word!r}"
            raise ValueError(text)
        chosen.update((name, by_name[name]) for name in found)
    return list(chosen.values())


def calls(variant: VariantCase) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(plain call, call of the variant); the variant agrees with the NumPy backend."""
    rng = np.random.default_rng(0)
    shape = (1, variant.heads, variant.seqlen, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    arguments = variant.arguments(rng, variant.heads, variant.seqlen)
    stored = [array.astype(as_dtype(variant.dtype)) for array in (q, k, v)]

    def run(backend: str = "cpu"):
        return fastattn.attention(*stored, **arguments, backend=backend)

    exact = run("numpy").astype(np.float32)
    error = np.abs(run().astype(np.float32) - exact).max() / np.abs(exact).max()
    limit = TOLERANCE[variant.dtype]
    if not error <= limit:  # NaN fails too
        raise AssertionError(f"{variant.name}: error must be at most {limit:g}, got {error:.1e}")
    return lambda: fastattn.attention(q, k, v, backend="cpu"), run


def as_dtype(name: str) -> np.dtype:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def measure(variant: VariantCase, rounds: int) -> dict[str, Any]:
    """{"share", "target", "plain" and "seconds": [per round]}."""
    plain, seconds = paired(*calls(variant), rounds)
    kept = {"share": variant.share, "target": variant.target}
    return {**kept, "plain": plain, "seconds": seconds}


def table(results: dict[int, dict[str, dict]]) -> Table:
    """A line for each variant, columns for each number of threads."""
    shown = Table(
        title=f"{HEADS} heads × 1024 × {HEAD_DIM} (window 256: 1 × 16384 × {HEAD_DIM})",
        caption="cost: time over that of plain float32 attention and over the share of visible "
        "pairs, median and quartiles of the rounds.",
    )
    shown.add_column("variant")
    for num_threads in results:
        shown.add_column(f"{num_threads} thread{'s'[: num_threads > 1]}", justify="right")
        shown.add_column("cost", justify="right")
    shown.add_column("target", justify="right")
    for name in next(iter(results.values())):
        cells, target = [], None
        for found in results.values():
            row, target = found[name], found[name]["target"]
            cells += cells_of(row)
        shown.add_row(name, *cells, "" if target is None else f"≤ {target:.2f}")
    return shown


def cells_of(row: dict[str, Any]) -> list[str]:
    """Its time and its cost; a cost past the target is red."""
    seconds = np.array(row["seconds"])
    costs = seconds / np.array(row["plain"]) / row["share"]
    low, cost, high = np.percentile(costs, (25, 50, 75))
    text = f"{cost:.2f} ({low:.2f}–{high:.2f})"
    if row["target"] is not None and cost > row["target"]:
        text = f"[red]{text}[/red]"
    return [summary.time_text(float(np.median(seconds))), text]


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    counts = sorted({1, default_num_threads()})
    parser.add_argument(
        "--only",
        type=terminal.checked(select),
        default=VARIANTS,
        help="names or patterns, comma-separated",
    )
    parser.add_argument(
        "--threads", type=terminal.count, nargs="+", default=counts, help="numbers of threads"
    )
    parser.add_argument("--rounds", type=terminal.count, default=21, help="of each pair of calls")
    options = parser.parse_args()
    console = terminal.console()
    results: dict[int, dict[str, dict]] = {}
    for num_threads in options.threads:
        fastattn.set_num_threads(num_threads)
        shown = track(options.only, f"threads: {num_threads}", console=console, transient=True)
        results[num_threads] = {variant.name: measure(variant, options.rounds) for variant in shown}
    console.print(table(results))
    if options.json:
        for num_threads, found in results.items():
            named = {f"{name}, {num_threads} threads": row for name, row in found.items()}
            record.save(options.json, "variants", repository.setting(num_threads), named)


if __name__ == "__main__":
    main()
