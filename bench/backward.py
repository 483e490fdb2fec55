"""Gradients: backward alone against this machine's limit, and with forward against torch.

python bench/backward.py
python bench/backward.py --only 'causal*' --threads 1 --rounds 21 --json
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import repository
from rich.progress import track
from rich.table import Table

import fastattn
from fastattn.benchmark import limits, record, summary
from fastattn.benchmark.cases import Case
from fastattn.benchmark.contest import SETTLE_SECONDS, calls_per_sample, sample
from fastattn.commands import terminal
from fastattn.machine import default_num_threads

TOLERANCE = 1e-5  # of the largest element; for wrong answers, not for rounding
DENSE = Case("dense-4k", 1, 8, 8, 4096, 4096, 64)
CASES = (
    replace(DENSE, name="train-512", batch=4, heads_q=12, heads_kv=12, seqlen_q=512, seqlen_k=512),
    DENSE,
    replace(DENSE, name="causal-4k", causal=True),
    replace(DENSE, name="dense-2k-d128", seqlen_q=2048, seqlen_k=2048, head_dim=128),
    replace(DENSE, name="gqa-2k", heads_q=16, heads_kv=4, seqlen_q=2048, seqlen_k=2048),
    replace(DENSE, name="one-head-4k", heads_q=1, heads_kv=1),
)
Call = Callable[[], Any]
COLUMNS = ("backward", "GFLOP/s", "limit", "forward + backward", "torch")


def select(wanted: str) -> list[Case]:
    """Cases by a comma-separated list of names and patterns."""
    names = {case.name: case for case in CASES}
    chosen = {
        name: names[name] for word in wanted.split(",") for name in fnmatch.filter(names, word)
    }
    if not chosen:
        raise ValueError(f"cases must be names or patterns of {tuple(names)}, got {wanted!r}")
    return list(chosen.values())


def flop(case: Case) -> int:
    """Multiplies and adds of the five products over visible pairs; the forward pass has two."""
    return case.problem.flop * 5 // 2


def calls(case: Case, num_threads: int) -> dict[str, Call]:
    """Backward alone, forward and backward, and torch's, if it is there: all agree."""
    x = case.inputs()
    dout = np.random.default_rng(1).standard_normal(x.q.shape, dtype=np.float32)
    out, lse = fastattn.attention(x.q, x.k, x.v, causal=case.causal, return_lse=True)

    def backward() -> Any:
        return fastattn.attention_backward(dout, x.q, x.k, x.v, out, lse, causal=case.causal)

    def both() -> Any:
        out, lse = fastattn.attention(x.q, x.k, x.v, causal=case.causal, return_lse=True)
        return fastattn.attention_backward(dout, x.q, x.k, x.v, out, lse, causal=case.causal)

    found: dict[str, Call] = {"backward": backward, "both": both}
    try:
        found["torch"] = torch_both(case, x, dout, num_threads)
    except ImportError:
        return found
    for ours, theirs in zip(both(), found["torch"](), strict=True):
        error = np.abs(ours - theirs.numpy()).max() / np.abs(ours).max()
        if not error <= TOLERANCE:  # NaN fails too
            raise AssertionError(f"{case}: error must be at most {TOLERANCE:g}, got {error:.1e}")
    return found


def torch_both(case: Case, x: Any, dout: np.ndarray, num_threads: int) -> Call:
    """PyTorch's scaled_dot_product_attention and its gradients by autograd."""
    import torch

    torch.set_num_threads(num_threads)
    tensors = [torch.from_numpy(a).requires_grad_() for a in (x.q, x.k, x.v)]
    upstream = torch.from_numpy(dout)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> Any:
        out = attend(*tensors, is_causal=case.causal, enable_gqa=case.group > 1)
        return torch.autograd.grad(out, tensors, upstream)

    return run


def measure(case: Case, rounds: int, num_threads: int) -> dict[str, Any]:
    """{"flop", "least_seconds": [backward's, per round], "seconds": {call: [per round]}}."""
    runs = calls(case, num_threads)
    counts = {name: calls_per_sample(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    least = []
    for _ in range(rounds):
        peak = limits.multiply_add_peak(case.dtype, num_threads)
        least.append(flop(case) / peak / 1e9)
        for name, run in runs.items():
            time.sleep(SETTLE_SECONDS)
            run()
            seconds[name].append(sample(run, counts[name]))
    return {"flop": flop(case), "least_seconds": least, "seconds": seconds}


def table(results: dict[str, dict], num_threads: int) -> Table:
    """A line for each case."""
    shown = Table(
        title=f"gradients, float32, {num_threads} thread{'s'[: num_threads > 1]}",
        caption="limit: multiply-add peak of the same round. torch: its time of forward and "
        "backward over ours, median and quartiles of the rounds.",
    )
    for column in ("case", *COLUMNS):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for name, row in results.items():
        shown.add_row(name, *cells(row))
    return shown


def cells(row: dict[str, Any]) -> Iterator[str]:
    """What bench/report.py shows too."""
    seconds = {name: np.array(found) for name, found in row["seconds"].items()}
    alone = float(np.median(seconds["backward"]))
    yield summary.time_text(alone)
    yield f"{row['flop'] / alone / 1e9:.1f}"
    yield f"{100 * np.median(row['least_seconds'] / seconds['backward']):.0f} % compute"
    yield summary.time_text(float(np.median(seconds["both"])))
    if "torch" not in seconds:
        yield "–"
        return
    low, ratio, high = np.percentile(seconds["torch"] / seconds["both"], (25, 50, 75))
    yield f"{ratio:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument(
        "--only",
        type=terminal.checked(select),
        default=CASES,
        help="names or patterns, comma-separated",
    )
    parser.add_argument("--threads", type=terminal.count, default=default_num_threads())
    parser.add_argument("--rounds", type=terminal.count, default=9, help="of all calls in turn")
    options = parser.parse_args()
    console = terminal.console()
    fastattn.set_num_threads(options.threads)
    results = {
        case.name: measure(case, options.rounds, options.threads)
        for case in track(options.only, console=console, transient=True)
    }
    console.print(table(results, options.threads))
    if options.json:
        record.save(options.json, "backward", repository.setting(options.threads), results)


if __name__ == "__main__":
    main()
