"""How the work list of real plans would run on 64 and 128 cores: a simulation, not a measurement.

python bench/simulate.py
python bench/simulate.py --cores 32 --json

Items, their order and their rows and keys are those of fastattn/plan.py and cpu/forward.py. What a
pair of query and key, a packed element and the start of a thread cost is measured here, on one
thread. Whether that is a fair model shows the column "here": the simulated time for one thread of
this machine over the measured one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pieces
import repository
from rich.table import Table

import fastattn
from fastattn.benchmark import record, summary, work
from fastattn.benchmark.cases import CASES, Case
from fastattn.benchmark.contest import calls_per_sample, sample
from fastattn.commands import terminal
from fastattn.cpu import compile, threads
from fastattn.plan import plan
from fastattn.problem import Plan

LANES = 16  # keys are computed by the register
STRIP = 28  # rows are computed together, as far as the last one sees (where all see alike, 48)
# What is assumed of a machine for each of its cores: the figures of large servers of 2023.
READ_GB_S = 5.5  # of memory
LEVEL_3 = 4 << 20  # bytes

WORKLOADS = (
    *("bert-128", "minilm-256", "causal-1k", "llama-2k-gqa", "dense-4k", "long-8k"),
    *("decode-gqa", "decode-batch"),
)
SERVING = (
    Case("llama-8k-gqa", 1, 32, 8, 8192, 8192, 128, causal=True),
    Case("bert-512 × 64", 64, 12, 12, 512, 512, 64),
    Case("decode 32k", 1, 32, 8, 1, 32768, 128),
    Case("decode × 64", 64, 32, 8, 1, 4096, 128),
)


class Costs(NamedTuple):
    """Seconds, on one thread of this machine."""

    pair: float  # of a query and a key: both products and the softmax
    key: float  # packing a key and its value
    start: float  # from one thread's start to the next one's


class Items(NamedTuple):
    """The work items of a plan, in the order in which they are drawn."""

    seconds: np.ndarray
    nbytes: np.ndarray  # keys and values that an item reads


class Run(NamedTuple):
    """What the simulation says of one plan on one machine."""

    seconds: float
    ideal: float  # the same work perfectly shared out, or the time that memory needs for it
    idle: float  # share of the threads' time that is spent waiting for the last one
    starting: float  # share of it that passes before a thread has begun
    gb_s: float  # that would be read from memory
    bound: bool  # whether memory sets the time


def measured_costs(head_dim: int) -> Costs:
    """From the pieces alone, and from what handing out a share costs the caller and the pool."""
    found = pieces.measure(["scores", "output", "softmax", "pack *, float32"], "float32", head_dim)
    pair = sum(found[name]["ns"] for name in ("scores", "output", "softmax"))
    key = head_dim * (found["pack keys, float32"]["ns"] + found["pack values, float32"]["ns"])
    return Costs(pair * 1e-9, key * 1e-9, seconds_to_start())


def seconds_to_start() -> float:
    """Python's part of starting one more thread, which the interpreter does one after another:
    the caller hands out a share, a thread of the pool takes it up and calls a kernel.
    """

    def nothing(unit):
        def kernel(job, scratch, quota):
            return 0

        return kernel

    kernel, count = compile.kernel("bench.simulate.nothing", nothing), 64
    handed_out = best_of(lambda: threads.run_on_threads(int, count)) / (count - 1)
    return handed_out + best_of(lambda: threads._Share(lambda: kernel(0, 0, 1)).run())


def best_of(call: Callable[[], Any]) -> float:
    """The least seconds of one call, of many."""
    call()
    return min(sample(call, 20) for _ in range(50))


def items_of(plan: Plan, costs: Costs) -> Items:
    """Cost of each item, as cpu/forward.py's describe_item() numbers them."""
    problem = plan.problem
    heads, rows = problem.batch * problem.heads_kv, problem.group * problem.seqlen_q
    m_blocks = -(-rows // plan.block_m)
    row_bytes = 4 * (problem.head_dim + problem.head_dim_v)
    seconds, nbytes = [], []
    for number in range(m_blocks * plan.num_splits):
        # The last rows come first, then the splits; each for all heads, which are alike.
        block, split = m_blocks - 1 - number // plan.num_splits, number % plan.num_splits
        pairs, keys = block_work(plan, block * plan.block_m, split)
        seconds.append(pairs * costs.pair + keys * costs.key)
        nbytes.append(keys * row_bytes)
    return Items(np.repeat(seconds, heads), np.repeat(nbytes, heads))


def block_work(plan: Plan, first: int, split: int) -> tuple[int, int]:
    """(pairs computed, keys read) of the item whose rows start at `first`."""
    problem = plan.problem
    count = min(plan.block_m, problem.group * problem.seqlen_q - first)
    strips = range(first, first + count, STRIP)
    low, high = split * plan.split_n, (split + 1) * plan.split_n
    if plan.num_splits == 1:
        low, high = 0, problem.seqlen_k
    pairs, reach = 0, [problem.seqlen_k, 0]
    for row in strips:
        here = min(STRIP, first + count - row)
        queries = np.array([row, row + here - 1]) // problem.group
        starts, stops = problem.key_range(queries)
        start, stop = max(int(starts[0]), low), min(int(stops[1]), high)
        if start < stop:
            pairs += here * -(-(stop - start) // LANES) * LANES
            reach = [min(reach[0], start), max(reach[1], stop)]
    return pairs, max(reach[1] - reach[0], 0)


def simulate(plan: Plan, costs: Costs, cores: int) -> Run:
    """Threads draw items from one counter, as soon as each has started."""
    items = items_of(plan, costs)
    starts = np.arange(plan.num_threads) * costs.start
    free, busy = list(starts), 0.0
    for seconds in items.seconds:
        heapq.heapreplace(free, free[0] + seconds)
        busy += seconds
    end = max(free)
    nbytes = memory_bytes(plan, items, cores)
    least = nbytes / (READ_GB_S * cores * 1e9)
    total, ideal = max(end, least), max(busy / cores, least)
    waiting = plan.num_threads * end - busy - starts.sum()
    return Run(
        total,
        ideal,
        waiting / (plan.num_threads * end),
        float(starts.sum()) / (plan.num_threads * end),
        nbytes / total / 1e9,
        least > end,
    )


def memory_bytes(plan: Plan, items: Items, cores: int) -> float:
    """Keys and values come from memory once a head if those in use fit into level 3, else once an
    item; queries and the output once.
    """
    problem = plan.problem
    heads = problem.batch * problem.heads_kv
    head = 4 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    fits = min(heads, plan.num_threads) * head <= LEVEL_3 * cores
    rows = 4 * problem.batch * problem.heads_q * problem.seqlen_q
    keys = min(heads * head, items.nbytes.sum()) if fits else items.nbytes.sum()
    return float(keys + rows * (problem.head_dim + problem.head_dim_v))


def plan_for(case: Case, cores: int) -> Plan:
    """The plan that this machine would make with so many threads."""
    with fastattn.num_threads(cores):
        return plan(case.problem, "cpu")


def here(case: Case, costs: Costs) -> float:
    """Simulated over measured time of one thread; memory is not looked at."""
    chosen = plan_for(case, 1)
    x = case.inputs()

    def call() -> np.ndarray:
        return fastattn.attention(x.q, x.k, x.v, causal=case.causal, backend="cpu")

    with fastattn.num_threads(1):
        calls = calls_per_sample(call)
        measured = min(sample(call, calls) for _ in range(3))
    return float(items_of(chosen, costs).seconds.sum()) / measured


def table(results: dict[str, dict[int, Run]], plans: dict, model: dict[str, float]) -> Table:
    """A line for each workload and number of cores."""
    shown = Table(
        title="simulated",
        caption="of ideal: the same work perfectly shared out (decoding: the time that memory "
        "needs) over the time simulated.\n"
        "idle: time that threads wait for the last one; starting: for Python to start them.\n"
        f"memory: assumed to give {READ_GB_S} GB/s for each core; * it sets the time.",
    )
    shown.add_column("workload")
    for heading in ("here", "cores", "items", "time", "of ideal", "idle", "starting", "memory"):
        shown.add_column(heading, justify="right")
    for name, runs in results.items():
        first = [name, f"{model[name]:.2f}" if name in model else ""]
        for cores, run in runs.items():
            cells = [str(cores), str(plans[name, cores].work_items), summary.time_text(run.seconds)]
            cells += [f"{100 * part:.0f} %" for part in (run.ideal / run.seconds, run.idle)]
            cells += [f"{100 * run.starting:.0f} %", f"{run.gb_s:.0f} GB/s{' *'[: 2 * run.bound]}"]
            shown.add_row(*first, *cells)
            first = ["", ""]
        shown.add_section()
    return shown


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument(
        "--cores", type=terminal.count, nargs="+", default=[64, 128], help="default 64 128"
    )
    options = parser.parse_args()
    chosen = [*(CASES[name] for name in WORKLOADS), *SERVING]
    costs = {head_dim: measured_costs(head_dim) for head_dim in {case.head_dim for case in chosen}}
    results: dict[str, dict[int, Run]] = {}
    plans, model = {}, {}
    for case in chosen:
        results[case.name] = {}
        if case.seqlen_q > 1 and work.flop(case) < 4e10:  # decoding is a matter of memory
            model[case.name] = here(case, costs[case.head_dim])
        for cores in options.cores:
            plans[case.name, cores] = plan_for(case, cores)
            run = simulate(plans[case.name, cores], costs[case.head_dim], cores)
            results[case.name][cores] = run
    for head_dim, cost in sorted(costs.items()):
        print(
            f"head_dim {head_dim}: {cost.pair * 1e9:.2f} ns a pair, {cost.key * 1e9:.1f} ns a key "
            f"packed, {cost.start * 1e6:.1f} µs to start a thread"
        )
    terminal.console().print(table(results, plans, model))
    if options.json:
        named = {
            f"{name}, {cores} cores": run._asdict()
            for name, runs in results.items()
            for cores, run in runs.items()
        }
        record.save(options.json, "simulated", repository.setting(1), named)


if __name__ == "__main__":
    main()
