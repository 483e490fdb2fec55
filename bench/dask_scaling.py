"""fastattn.dask on clusters of this machine: scaling, overhead and peak memory. Linux only.

python bench/dask_scaling.py
python bench/dask_scaling.py --rounds 1 --only "1 worker" "2 workers" --json

Every worker is a process with one thread. All arrays lie in files. The contenders take turns: one
call of fastattn.attention() on one thread; two processes without dask, each calling it with half of
the heads, which is what the machine gives at most; one worker; two workers.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import repository
from dask.distributed import Client, LocalCluster, get_task_stream, wait
from rich.table import Table

import fastattn
import fastattn.dask
from fastattn.benchmark import record
from fastattn.commands import terminal

MIB = 1 << 20
HEADS, HEAD_DIM = 8, 64
CONTENDERS = ("one call", "2 processes", "1 worker", "2 workers")
HALF: list[np.ndarray] = []  # of a process without dask: its q, k and v


class Sample(NamedTuple):
    seconds: float
    idle: float = 0.0  # share of the workers' time in which they compute no task


def write_arrays(folder: Path, seqlen: int) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [folder / f"{name}.npy" for name in "qkv"]
    for path in paths:
        np.save(path, rng.standard_normal((HEADS, seqlen, HEAD_DIM), np.float32))
    return paths


def memory(field: str) -> int:
    """Bytes of this process, as Linux counts them."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) << 10


def forget_peak() -> int:
    """Let the peak begin here; return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def one_call(paths: list[Path]) -> Callable[[], Sample]:
    q, k, v = map(np.load, paths)
    fastattn.attention(*(a[:, :256] for a in (q, k, v)), causal=True)

    def run() -> Sample:
        with fastattn.num_threads(1):
            start = time.perf_counter()
            fastattn.attention(q, k, v, causal=True)
            return Sample(time.perf_counter() - start)

    return run


def load_half(paths: list[Path], first: int) -> None:
    """Load half of the heads into this process."""
    arrays = (np.load(path, mmap_mode="r") for path in paths)
    HALF[:] = [np.array(a[first : first + HEADS // 2]) for a in arrays]


def attend_half(rows: int | None = None) -> None:
    with fastattn.num_threads(1):
        fastattn.attention(*(a[:, :rows] for a in HALF), causal=True)


def two_processes(paths: list[Path]) -> Callable[[], Sample]:
    context = multiprocessing.get_context("spawn")
    setups = ((paths, first) for first in (0, HEADS // 2))
    pools = [ProcessPoolExecutor(1, context, load_half, setup) for setup in setups]
    for pool in pools:
        pool.submit(attend_half, 256).result()

    def run() -> Sample:
        start = time.perf_counter()
        for future in [pool.submit(attend_half) for pool in pools]:
            future.result()
        return Sample(time.perf_counter() - start)

    return run


def warm(paths: list[Path]) -> None:
    """Let this process import what it needs, and load the kernel."""
    lazily(paths, 512).compute(scheduler="synchronous")


def lazily(paths: list[Path], chunk: int) -> Any:
    chunks = (HEADS, chunk, HEAD_DIM)
    maps = (np.load(path, mmap_mode="r") for path in paths)
    q, k, v = (fastattn.dask.from_memmap(a, chunks=chunks) for a in maps)
    return fastattn.dask.attention(q, k, v, causal=True)


def on_cluster(client: Client, paths: list[Path], chunk: int) -> Callable[[], Sample]:
    workers = len(client.scheduler_info()["workers"])

    def run() -> Sample:
        with get_task_stream(client) as stream:
            start = time.perf_counter()
            result = client.persist(lazily(paths, chunk))
            wait(result)
            seconds = time.perf_counter() - start
        steps = (step for task in stream.data for step in task["startstops"])
        busy = sum(step["stop"] - step["start"] for step in steps if step["action"] == "compute")
        return Sample(seconds, 1 - busy / (workers * seconds))

    return run


def peaks(client: Client, paths: list[Path], chunk: int) -> list[int]:
    """Bytes that each worker needs beyond what it had before, where no result is kept."""
    while any(client.run(lambda dask_worker: len(dask_worker.data)).values()):
        time.sleep(0.1)  # results of the last round are still being forgotten
    before = client.run(forget_peak)
    wait(client.persist(lazily(paths, chunk).sum()))
    return [peak - before[worker] for worker, peak in client.run(memory, "VmHWM").items()]


def measure(paths: list[Path], chunk: int, rounds: int, only: list[str]) -> dict[str, Any]:
    shape = {"threads_per_worker": 1, "dashboard_address": ":0", "processes": True}
    small = write_arrays(Path(tempfile.mkdtemp(dir=paths[0].parent)), 2048)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        contenders: dict[str, Callable[[], Sample]] = {}
        if "one call" in only:
            contenders["one call"] = one_call(paths)
        if "2 processes" in only:
            contenders["2 processes"] = two_processes(paths)
        clients = {}
        for workers in (1, 2):
            name = f"{workers} worker{'s' if workers > 1 else ''}"
            if name in only:
                cluster = stack.enter_context(LocalCluster(n_workers=workers, **shape))
                clients[name] = stack.enter_context(Client(cluster))
                clients[name].run(warm, small)
                contenders[name] = on_cluster(clients[name], paths, chunk)
        samples = [{name: run() for name, run in contenders.items()} for _ in range(rounds)]
        for name in contenders:
            seconds, idle = zip(*(turn[name] for turn in samples), strict=True)
            found[name] = {"seconds": seconds, "idle": idle}
        for name, client in clients.items():
            found[name]["peak"] = peaks(client, paths, chunk)
    return found


def ratio(found: dict[str, Any], name: str, to: str) -> float:
    """Median over the rounds of the time of one contender over that of another."""
    pairs = zip(found[name]["seconds"], found[to]["seconds"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def print_table(found: dict[str, Any], seqlen: int, chunk: int) -> None:
    shape = f"{HEADS} heads x {seqlen} x {HEAD_DIM}, causal, float32, chunks of {chunk}"
    block = HEADS * chunk * HEAD_DIM * 4
    limit = (3 * 2 * block + block) / MIB
    caption = f"3 chunks of k and v and one of out are {limit:.0f} MiB"
    table = Table(title=shape, caption=caption)
    bases = [name for name in ("one call", "1 worker") if name in found]
    for heading in ("", "seconds", *(f"of {name}" for name in bases), "no task", "peaks, MiB"):
        table.add_column(heading, justify="right")
    for name, values in found.items():
        times = (f"{ratio(found, base, name):.2f}" for base in bases)
        idle = statistics.median(values["idle"])
        peak = " ".join(f"{nbytes / MIB:.0f}" for nbytes in values.get("peak", []))
        cells = *times, f"{100 * idle:.1f} %" if idle else "", peak
        table.add_row(name, f"{statistics.median(values['seconds']):.2f}", *cells)
    terminal.console().print(table)


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--rounds", type=terminal.count, default=2)
    parser.add_argument("--seqlen", type=terminal.count, default=32768)
    parser.add_argument("--chunk", type=terminal.count, default=4096)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_arrays(Path(folder), options.seqlen)
        found = measure(paths, options.chunk, options.rounds, options.only)
    print_table(found, options.seqlen, options.chunk)
    if options.json:
        record.save(options.json, "dask", repository.setting(1), found)


if __name__ == "__main__":
    main()
