"""What nodes send each other, and how long they take: a tree of partial results against a ring. A
simulation, not a measurement.

python bench/communicate.py
python bench/communicate.py --nodes 8 32 --tokens 1048576

The tasks are those of fastattn.dask: its pairs of chunks under a causal mask. Chunks are dealt out
to the nodes in turn. In a ring, pairs run where their queries are, and all keys go round, while
those before are worked on. In a tree, pairs run where their keys are: queries go there, and what a
node finds out merges with what others do, two by two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import repository
from rich.table import Table

from fastattn.commands import terminal
from fastattn.dask.grid import longest_run, visible_chunks
from fastattn.problem import Problem, Variant

HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128  # bfloat16; partial results are float32
CHUNKS_PER_NODE = 4
# What is assumed of a node and of what joins them.
FLOP_S = 5e12
BYTES_S = 12.5e9  # each way
LATENCY = 50e-6
TASKS_S = 1000  # that dask's scheduler hands out, all nodes together

QUERY_BYTES = HEADS_Q * HEAD_DIM * 2
KEY_BYTES = HEADS_KV * HEAD_DIM * 2 * 2
PARTIAL_BYTES = HEADS_Q * (HEAD_DIM + 1) * 4


class Run(NamedTuple):
    nbytes: float  # that the busiest node sends or receives
    seconds: float


class Work(NamedTuple):
    """Seconds of each pair of chunks, (chunks of queries, chunks of keys); 0 where none is seen."""

    seconds: np.ndarray
    rows: int  # of a chunk
    keys: int
    nodes: int

    @property
    def pairs(self) -> int:
        return int((self.seconds > 0).sum())

    @property
    def tasks(self) -> int:
        """As many as dask has, where tasks read their keys."""
        of_keys = HEADS_KV * self.keys * 2 * HEAD_DIM
        longest = longest_run(len(self.seconds), HEADS_Q * self.rows * HEAD_DIM, of_keys)
        return sum(-(-int(count) // longest) for count in (self.seconds > 0).sum(1))


def work_of(queries: int, tokens: int, nodes: int) -> Work:
    """The last `queries` of so many tokens against all of them."""
    count = nodes * CHUNKS_PER_NODE
    edges = tuple(np.linspace(0, tokens, count + 1).astype(int).tolist())
    chunks = min(count, -(-queries // 128))
    row_edges = np.linspace(0, queries, chunks + 1).astype(int)
    sizes = (1, HEADS_Q, HEADS_KV, queries, tokens, HEAD_DIM, HEAD_DIM)
    problem = Problem(Variant("float32", "bfloat16"), *sizes, 1.0, tokens - queries, None, 0)
    ranges = np.array([[queries, 0, tokens, tokens - queries]])
    seconds = np.zeros((chunks, count))
    for m in range(chunks):
        rows = int(row_edges[m]), int(row_edges[m + 1])
        first, last = (tokens - queries + row for row in (rows[0], rows[1] - 1))
        for n in visible_chunks(problem, ranges, rows, edges):
            seen = [min(max(p + 1 - edges[n], 0), edges[n + 1] - edges[n]) for p in (first, last)]
            pairs = (rows[1] - rows[0]) * (seen[0] + seen[1]) / 2
            seconds[m, n] = pairs * HEADS_Q * 4 * HEAD_DIM / FLOP_S
    return Work(seconds, int(row_edges[1]), edges[1], nodes)


def ring(work: Work) -> Run:
    """Keys go round: each node passes on what it has got while it works on it."""
    nodes = work.nodes
    home_m, home_n = (np.arange(size) % nodes for size in work.seconds.shape)
    block = work.keys * CHUNKS_PER_NODE * KEY_BYTES
    step = block / BYTES_S + LATENCY
    arrived, done = np.zeros(nodes), np.zeros(nodes)
    for turn in range(nodes):
        for p in range(nodes):
            keys = home_n == (p - turn) % nodes
            own = work.seconds[home_m == p][:, keys].sum()
            done[p] = max(done[p], arrived[p]) + own
        arrived = np.maximum(np.roll(arrived, 1), arrived) + step
    return Run(block * (nodes - 1), float(done.max()))


def tree(work: Work) -> Run:
    """Queries go to the keys; what comes of them merges on the way back."""
    nodes = work.nodes
    home_m, home_n = (np.arange(size) % nodes for size in work.seconds.shape)
    sent, got, out_free, in_free, busy = (np.zeros(nodes) for _ in range(5))
    end = 0.0

    def transfer(source: int, target: int, nbytes: float, ready: float) -> float:
        """When it has arrived: lines are taken one message after another, each way."""
        start = max(ready, out_free[source], in_free[target])
        out_free[source] = in_free[target] = start + nbytes / BYTES_S
        sent[source] += nbytes
        got[target] += nbytes
        return start + nbytes / BYTES_S + LATENCY

    for m, home in enumerate(home_m):
        ready: dict[int, float] = {}
        for shift in range(nodes):
            node = (int(home) + shift) % nodes
            own = work.seconds[m, home_n == node].sum()
            if own:
                there = transfer(home, node, work.rows * QUERY_BYTES, 0.0) if shift else 0.0
                busy[node] = max(busy[node], there) + own
                ready[shift] = busy[node]
        stride = 1
        while stride < nodes:
            for shift in [s for s in sorted(ready) if s % (2 * stride) == stride]:
                when, to = ready.pop(shift), shift - stride
                path = (int(home) + shift) % nodes, (int(home) + to) % nodes
                merged = transfer(*path, work.rows * PARTIAL_BYTES, when)
                ready[to] = max(ready.get(to, 0.0), merged)
            stride *= 2
        end = max(end, *ready.values())
    return Run(float(max(sent.max(), got.max())), end)


def main() -> None:
    parser = repository.parser(__doc__)
    counts = {"type": terminal.count, "nargs": "+"}
    parser.add_argument("--tokens", **counts, default=[1 << 20, 1 << 24])
    parser.add_argument("--nodes", **counts, default=[8, 64])
    options = parser.parse_args()
    table = Table(title=f"{HEADS_Q}/{HEADS_KV} heads x {HEAD_DIM}, bfloat16, causal")
    for heading in (
        "tokens",
        "queries",
        "nodes",
        "pairs",
        "work",
        "ring",
        "",
        "tree",
        "",
        "tasks",
        "dask",
    ):
        table.add_column(heading, justify="right")
    for tokens in options.tokens:
        for queries in (tokens, 65536, 1):
            for nodes in options.nodes:
                work = work_of(queries, tokens, nodes)
                cells = [f"{tokens >> 20} M", str(queries), str(nodes), str(work.pairs)]
                cells.append(f"{work.seconds.sum() / nodes:.3g} s")
                for run in (ring(work), tree(work)):
                    cells += [f"{run.nbytes / 1e9:.3g} GB", f"{run.seconds:.3g} s"]
                table.add_row(*cells, str(work.tasks), f"{work.tasks / TASKS_S:.2g} s")
    terminal.console().print(table)


if __name__ == "__main__":
    main()
