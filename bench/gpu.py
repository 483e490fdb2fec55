"""On a machine with an NVIDIA GPU: are the kernels right, and how fast beside torch's?

python bench/gpu.py                                 all steps, the most valuable first
python bench/gpu.py --steps correct,forward --json  some of them, kept in bench/results/
python bench/gpu.py --device cpu --quick            tries the script itself, without figures

bench/gpu_build.py translates the kernels beforehand. Steps have limits, less than 5 minutes in all.

correct    every kernel and option against the definition in float64
limits     what this GPU's matrix product and copy reach, for the other steps to be held against
forward    long sequences beside torch's backends
backward   their gradients
decode     one query against many keys, as a share of the copy's bandwidth
overhead   what a call costs the CPU
sanitizer  the correct step under compute-sanitizer (memcheck, racecheck), where it is installed

Times are of the GPU, between two events around several calls, whose inputs rotate through more
memory than the level-2 cache holds; contenders take turns, and medians of the rounds are printed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cases
import repository
import torch
from gpu_cases import Timed

import fastattn
from fastattn.cuda import maps
from fastattn.verifying.trial import error_ratio, inputs_of, results

CACHE_BYTES = 200 << 20  # inputs of a contender span at least this much: four times an H200's L2
SAMPLE_SECONDS = 0.02
ROUNDS = 7
# Limits of steps, so that all of them take less than 5 minutes, and `make gpu` less than 6.
CORRECT_SECONDS, CASES_SECONDS, SANITIZER_SECONDS = 90, 40, 35
Call = Callable[[int], Any]  # with the number of a set of inputs
Callers = dict[str, Callable[[list], Call]]


# --- correct --------------------------------------------------------------------------------------


def correct(options: argparse.Namespace) -> dict[str, Any]:
    """{call: its error over what is allowed, the kernel} and what went wrong."""
    found: dict[str, Any] = {}
    trials = [*gpu_cases.trials(), *gpu_cases.gradient_trials()]
    trials.sort(key=lambda trial: gpu_cases.DTYPES.index(trial.case.dtype))  # of most use first
    trials = trials[:: 9 if options.quick else 1]
    start = time.perf_counter()
    for trial in trials:
        if time.perf_counter() - start > CORRECT_SECONDS:
            break
        x = inputs_of(trial)
        name = f"{trial.case.name} {trial.case.dtype}"
        try:
            with maps.wgmma(trial.case.name.startswith("wgmma")):
                answer = results(trial, x, options.backend)
                ratio = error_ratio(trial, x, answer, options.backend == "cuda")
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        else:
            found[name] = {"error": ratio} if ratio <= 1 else {"failed": f"error {ratio:.2f}"}
    failed = {name: row["failed"] for name, row in found.items() if "failed" in row}
    print(f"{len(found) - len(failed)} of {len(found)} calls are right")
    if len(found) < len(trials):
        print(f"{len(trials) - len(found)} were not tried for want of time")
    for name, what in failed.items():
        print(f"  {name}: {what}")
    return found


# --- times ----------------------------------------------------------------------------------------


class Clock:
    """Seconds of the device for a number of calls."""

    def __init__(self, device: str):
        self.device = device

    def seconds(self, run: Call, count: int) -> float:
        """Seconds a call, of `count` one after another."""
        if self.device == "cpu":
            start = time.perf_counter()
            for n in range(count):
                run(n)
            return (time.perf_counter() - start) / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for n in range(count):
            run(n)
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e-3 / count

    def compare(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        """Samples of each, taken in turn."""
        counts = {}
        for name, run in calls.items():
            self.seconds(run, 2)  # compiles, and warms up
            counts[name] = max(1, min(200, int(SAMPLE_SECONDS / self.seconds(run, 2))))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _, (name, run) in itertools.product(range(rounds), calls.items()):
            samples[name].append(self.seconds(run, counts[name]))
        return samples


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """FLOP/s of a large matrix product, bytes/s of a large copy."""
    size = 256 if options.quick else 8192
    a, b = (torch.randn(size, size, device=options.device).bfloat16() for _ in range(2))
    source = torch.empty(size * size * 8, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    calls: dict[str, Call] = {
        "matmul": lambda n: torch.mm(a, b),
        "copy": lambda n: target.copy_(source),
    }
    samples = Clock(options.device).compare(calls, options.rounds)
    found = {
        "flop_s": 2 * size**3 / median(samples["matmul"]),
        "bytes_s": 2 * source.numel() / median(samples["copy"]),
    }
    matrix, copy = found["flop_s"] / 1e12, found["bytes_s"] / 1e9
    _show(options, f"matrix product {matrix:.0f} TFLOP/s, copy {copy:.0f} GB/s")
    return found | {"seconds": samples}


def _show(options: argparse.Namespace, figures: str) -> None:
    print("no figures without a GPU" if options.device == "cpu" else figures)


def forward(options: argparse.Namespace) -> dict[str, Any]:
    """Samples of every contender on long sequences."""
    return dict(_measured(gpu_cases.FORWARD, options, _flop_text))


def backward(options: argparse.Namespace) -> dict[str, Any]:
    """Samples of every contender on gradients: 2.5 times the work of forward, by custom."""
    return dict(
        _measured(gpu_cases.BACKWARD, options, _flop_text_of_gradients, _gradients_in_turns)
    )


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Samples of every contender on one query."""
    return dict(_measured(gpu_cases.DECODE, options, _bytes_text))


def _flop_text(case: Timed, seconds: float) -> str:
    return f"{case.flop / seconds / 1e12:.0f} TFLOP/s"


def _flop_text_of_gradients(case: Timed, seconds: float) -> str:
    return _flop_text(case, seconds / 2.5)


def _bytes_text(case: Timed, seconds: float) -> str:
    return f"{case.nbytes / seconds / 1e9:.0f} GB/s"


def _measured(
    cases: tuple[Timed, ...],
    options: argparse.Namespace,
    text: Callable[[Timed, float], str],
    callers: Callable[[Timed, argparse.Namespace], Callers] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    start = time.perf_counter()
    for case in cases[:1] if options.quick else cases:
        if time.perf_counter() - start > CASES_SECONDS:
            print(f"{case.name} was not tried for want of time")
            continue
        torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
        inputs = list(_inputs(case, options))
        calls, refused = {}, {}
        for name, prepare in (callers or _in_turns)(case, options).items():
            try:
                calls[name] = prepare(inputs)
            except (RuntimeError, TypeError, ValueError) as error:
                refused[name] = str(error).splitlines()[0]
        samples = Clock(options.device).compare(calls, options.rounds)
        shown = (f"{name} {text(case, median(found))}" for name, found in samples.items())
        _show(options, f"{case.name:<18} {', '.join(shown)}")
        row = {"flop": case.flop, "nbytes": case.nbytes, "seconds": samples, "refused": refused}
        yield case.name, row


def _inputs(case: Timed, options: argparse.Namespace) -> Iterator[tuple[Any, Any, Any]]:
    """Sets of q, k and v, together larger than the level-2 cache."""
    seqlen = 64 if options.quick else case.seqlen_k
    dtype = getattr(torch, case.dtype)
    sets = 2 if options.quick else max(1, -(-CACHE_BYTES // case.nbytes))
    for _ in range(sets):
        shapes = (case.heads_q, min(case.seqlen_q, seqlen)), *[(case.heads_kv, seqlen)] * 2
        yield tuple(
            torch.randn(case.batch, *shape, case.head_dim, device=options.device).to(dtype)
            for shape in shapes
        )


def _contenders(case: Timed, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """attend(q, k, v) of fastattn and of torch's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal = case.causal and case.seqlen_q > 1

    how = {"causal": causal, "precision": case.precision, "backend": options.backend}

    def ours(wgmma):
        def attend(q, k, v):
            with maps.wgmma(wgmma):
                return fastattn.attention(q, k, v, **how)

        return attend

    def theirs(backend):
        def attend(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=case.heads_q != case.heads_kv
                )

        return attend

    names = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if case.dtype == "float32":
        names = {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    own = {"fastattn": ours(False)}
    if case.seqlen_q > 1 and case.dtype != "float32" and options.capability == (9, 0):
        own["fastattn wgmma"] = ours(True)
    return own | {f"torch {name}": theirs(one) for name, one in names.items()}


def _in_turns(case: Timed, options: argparse.Namespace) -> Callers:
    """Of each contender, what makes a call of the inputs in turn."""
    return {
        name: functools.partial(_in_turn, attend, options=options)
        for name, attend in _contenders(case, options).items()
    }


def _gradients_in_turns(case: Timed, options: argparse.Namespace) -> Callers:
    """The same of their gradients, each of results that are computed beforehand."""
    how = {"causal": case.causal, "backend": options.backend}

    def ours(inputs: list) -> Call:
        kept = []
        for q, k, v in inputs:
            results = fastattn.attention(q, k, v, return_lse=True, **how)
            kept.append((torch.randn_like(q), q, k, v, *results))
        return lambda n: fastattn.attention_backward(*kept[n % len(kept)], **how)

    def theirs(attend: Callable[..., Any], inputs: list) -> Call:
        kept = []
        for one in inputs:
            leaves = [a.clone().requires_grad_() for a in one]
            kept.append((attend(*leaves), leaves, torch.randn_like(one[0])))
        return lambda n: torch.autograd.grad(*kept[n % len(kept)], retain_graph=True)

    found = _contenders(case, options)
    others = {n: functools.partial(theirs, f) for n, f in found.items() if n.startswith("torch")}
    return {"fastattn": ours} | others


def _in_turn(attend: Callable[..., Any], inputs: list, options: argparse.Namespace) -> Call:
    """A call of the inputs in turn, as CUDA graphs where that can be: without gaps between small
    kernels. Raises where the contender refuses the case.
    """
    for one in inputs[:2]:
        attend(*one)
    if options.device == "cpu":
        return lambda n: attend(*inputs[n % len(inputs)])
    torch.cuda.synchronize()
    graphs = []
    for one in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(*one)
        graphs.append(graph)
    return lambda n: graphs[n % len(graphs)].replay()


# --- what a call costs the CPU, and the sanitizer -------------------------------------------------


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the CPU for a small call, the GPU aside."""
    q = torch.randn(1, 8, 16, 64, device=options.device).half()
    calls: dict[str, Callable[[], Any]] = {
        "fastattn": lambda: fastattn.attention(q, q, q, backend=options.backend),
        "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    count = 10 if options.quick else 300  # fewer than a stream takes before it lets callers wait
    for _, (name, run) in itertools.product(range(options.rounds), calls.items()):
        run()
        _synchronize(options)
        start = time.perf_counter()
        for _ in range(count):
            run()
        found[name].append((time.perf_counter() - start) / count)
        _synchronize(options)
    times = (f"{name} {median(x) * 1e6:.1f} us a call" for name, x in found.items())
    _show(options, ", ".join(times))
    return found


def _synchronize(options: argparse.Namespace) -> None:
    if options.device != "cpu":
        torch.cuda.synchronize()


def sanitizer(options: argparse.Namespace) -> dict[str, Any]:
    """What compute-sanitizer says of some calls."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or options.device == "cpu":
        print("compute-sanitizer is not installed" if tool is None else "needs a GPU")
        return {"skipped": True}
    found = {}
    again = [sys.executable, __file__, "--steps", "correct", "--quick"]
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", *again]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SANITIZER_SECONDS, check=False
            )
            found[check] = {"status": done.returncode, "end": done.stdout[-2000:]}
        except subprocess.TimeoutExpired:
            found[check] = {"status": "out of time"}
        print(f"{check}: {found[check]['status']}")
    return found


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    step.__name__: step
    for step in (correct, limits, forward, backward, decode, overhead, sanitizer)
}


def chosen_steps(text: str) -> list[str]:
    """Names of steps, comma-separated."""
    names = text.split(",")
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be some of {', '.join(STEPS)}, got {unknown[0]!r}")
    return names


def setting(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    found = repository.setting(0) | {"torch_cuda": torch.version.cuda}
    if options.device != "cpu":
        facts = torch.cuda.get_device_properties(0)
        found |= {"gpu": facts.name, "multiprocessors": facts.multi_processor_count}
    return found


def main() -> None:
    parser = repository.parser(__doc__)
    parser.add_argument("--steps", type=chosen_steps, default=list(STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few calls and small inputs")
    parser.add_argument("--json", type=Path, nargs="?", const=Path(), metavar="PATH")
    options = parser.parse_args()
    options.backend = "cuda" if options.device == "cuda" else "auto"
    options.capability = torch.cuda.get_device_capability() if options.device == "cuda" else (0, 0)
    options.rounds = 2 if options.quick else ROUNDS
    report: dict[str, Any] = {"setting": setting(options)}
    path = options.json
    if path == Path():
        name = report["setting"].get("gpu", "none").lower().replace(" ", "-")
        path = repository.RESULTS.with_name(f"gpu-{name}.json")
    for name in options.steps:
        print(f"--- {name}", flush=True)
        start = time.perf_counter()
        report[name] = STEPS[name](options)
        print(f"    {time.perf_counter() - start:.0f} s", flush=True)
        if path:  # after each step: what is measured is kept, whatever comes next
            path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
