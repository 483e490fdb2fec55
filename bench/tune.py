"""Try other block sizes than those of fastattn/plan.py, one at a time, interleaved with the choice.

python bench/tune.py
python bench/tune.py --knobs MC,BLOCK_N --head-dims 64 --seqlens 512,2048 --threads 1 --json

Below 1 the other size is faster; it is marked where even its upper quartile is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np
import repository
from rich.progress import track
from rich.table import Table

import fastattn
from fastattn import plan as planning
from fastattn.benchmark import record
from fastattn.benchmark.cases import Case
from fastattn.benchmark.contest import paired
from fastattn.check import check
from fastattn.commands import terminal
from fastattn.cpu.run import run
from fastattn.machine import default_num_threads
from fastattn.problem import Plan

# What may be tried. BLOCK_N is a multiple of the widest tile (2 registers), SPLIT_N of BLOCK_N.
VALUES = {
    "BLOCK_N": (64, 128, 256, 512),
    "BLOCK_M": (96, 192, 384, 1536),
    "MC": (24, 36, 48, 60, 72, 96),
    "SPLIT_N": (512, 1024, 2048, 4096),
}
SIZES = ("block_m", "block_n", "mc", "split_n", "num_splits", "work_items", "num_threads")
HEADS = 8
TOLERANCE = 1e-5  # for wrong answers, not for rounding


def workloads(head_dims: list[int], seqlens: list[int]) -> Iterator[Case]:
    """Prefill of each size, and one query against many keys."""
    for head_dim in head_dims:
        for seqlen in seqlens:
            shape = (1, HEADS, HEADS, seqlen, seqlen, head_dim)
            yield Case(f"{seqlen} × {head_dim}", *shape)
            yield Case(f"{seqlen} × {head_dim} causal", *shape, causal=True)
        yield Case(f"1 of 8192 × {head_dim}", 1, HEADS, 2, 1, 8192, head_dim)


def present(knob: str) -> Any:
    """The choice of plan.py."""
    value = getattr(planning, knob)
    return value["float32"] if isinstance(value, dict) else value


def plan_with(problem: Any, **values: int) -> Plan:
    """The plan that plan.py would make with other constants."""
    constants: dict[str, Any] = dict(values)
    if "BLOCK_N" in values:
        constants["BLOCK_N"] = {**planning.BLOCK_N, "float32": values["BLOCK_N"]}
        # Runs of keys stay whole blocks.
        constants["SPLIT_N"] = max(planning.SPLIT_N, values["BLOCK_N"])
    planning._plan.cache_clear()
    with mock.patch.dict(vars(planning), constants):
        chosen = planning.plan(problem, "cpu")
    planning._plan.cache_clear()
    return chosen


def trials(case: Case, knobs: list[str]) -> Iterator[tuple[str, Plan, Callable, Callable]]:
    """(what is tried, its plan, the present call, the call tried) where the plans differ."""
    x = case.inputs()
    problem, operands = check(x.q, x.k, x.v, causal=case.causal)

    def calling(plan: Plan) -> Callable[[], np.ndarray]:
        own = operands._replace(out=np.empty_like(operands.out))

        def call() -> np.ndarray:
            run(plan, problem, own)
            return own.out

        return call

    chosen = plan_with(problem)
    base = calling(chosen)
    for knob in knobs:
        for value in VALUES[knob]:
            plan = plan_with(problem, **{knob: value})
            if plan == chosen:
                continue
            other = calling(plan)
            error = np.abs(other() - base()).max()
            if not error <= TOLERANCE:
                raise AssertionError(f"{case}, {knob} {value}: wrong by {error:.1e}")
            yield f"{knob} {value}", plan, base, other


def measure(case: Case, knobs: list[str], rounds: int) -> dict[str, dict]:
    """{what was tried: {"sizes", "present" and "seconds": [per round]}}."""
    results = {}
    for tried, plan, base, other in trials(case, knobs):
        seconds = dict(zip(("present", "seconds"), paired(base, other, rounds), strict=True))
        sizes = {name: value for name, value in asdict(plan).items() if name in SIZES}
        results[tried] = {"sizes": sizes, **seconds}
    return results


def tables(results: dict[str, dict[str, dict]], num_threads: int) -> Iterator[Table]:
    """One for each knob: a line for each workload, a column for each value tried."""
    for knob in VALUES:
        tried = [
            name
            for name in (f"{knob} {value}" for value in VALUES[knob])
            if any(name in found for found in results.values())
        ]
        if not tried:
            continue
        shown = Table(
            title=f"time over that of {knob} {present(knob)}, {num_threads} threads",
            caption="empty: the same plan; all: the geometric mean",
        )
        shown.add_column("workload")
        for name in tried:
            shown.add_column(name, justify="right")
        for workload, found in results.items():
            shown.add_row(workload, *(cell(ratio_of(found, name)) for name in tried))
        shown.add_section()
        shown.add_row("all", *(mean_of(results, name) for name in tried))
        yield shown


def ratio_of(found: dict[str, dict], tried: str) -> np.ndarray | None:
    """Time over that of the present choice, per round; None if the plan is the same."""
    result = found.get(tried)
    return None if result is None else np.divide(result["seconds"], result["present"])


def mean_of(results: dict[str, dict[str, dict]], tried: str) -> str:
    """The geometric mean of the medians of all workloads."""
    ratios = (ratio_of(found, tried) for found in results.values())
    medians = [float(np.median(ratio)) for ratio in ratios if ratio is not None]
    return f"{math.exp(np.mean(np.log(medians))):.3f}"


def cell(ratio: np.ndarray | None) -> str:
    """The median; marked if the upper quartile is below 1."""
    if ratio is None:
        return ""
    median, high = np.percentile(ratio, (50, 75))
    return f"[green]{median:.2f} *[/green]" if high < 1 else f"{median:.2f}"


def knobs_of(text: str) -> list[str]:
    """Constants of plan.py by a comma-separated list."""
    for word in text.split(","):
        if word not in VALUES:
            raise ValueError(f"knobs must be among {tuple(VALUES)}, got {word!r}")
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Ints by a comma-separated list."""
    return [terminal.count(word) for word in text.split(",")]


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument(
        "--knobs", type=terminal.checked(knobs_of), default=",".join(VALUES), help="comma-separated"
    )
    parser.add_argument("--head-dims", type=numbers, default="32,64,128", help="comma-separated")
    parser.add_argument("--seqlens", type=numbers, default="128,512,2048", help="comma-separated")
    number = default_num_threads()
    parser.add_argument("--threads", type=terminal.count, default=number, help=f"default {number}")
    parser.add_argument("--rounds", type=terminal.count, default=9, help="of each pair of calls")
    options = parser.parse_args()
    fastattn.set_num_threads(options.threads)
    console = terminal.console()
    chosen = list(workloads(options.head_dims, options.seqlens))
    results = {
        case.name: measure(case, options.knobs, options.rounds)
        for case in track(chosen, "workloads", console=console, transient=True)
    }
    for shown in tables(results, options.threads):
        console.print(shown)
    if options.json:
        setting = repository.setting(options.threads)
        named = {
            f"{name}, {tried}, {options.threads} threads": row
            for name, found in results.items()
            for tried, row in found.items()
        }
        record.save(options.json, "tune", setting, named)


if __name__ == "__main__":
    main()
