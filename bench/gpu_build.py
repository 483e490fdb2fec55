"""The PTX of all kernels that bench/gpu.py needs, into the cache: on any machine, without a GPU.

FASTATTN_CACHE=kernels python bench/gpu_build.py --capability 9.0

With that folder in place, the machine with the GPU translates nothing, and needs no NVVM.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor

import gpu_cases
import repository

from fastattn.check import check
from fastattn.commands import terminal
from fastattn.cuda import choice, compile, driver, maps
from fastattn.cuda.run import placement_of
from fastattn.machine import default_num_threads
from fastattn.problem import Operands, Problem
from fastattn.verifying.case import Case, laid_out
from fastattn.verifying.trial import Trial, inputs_of

SHARED_BYTES = {(7, 5): 64 << 10, (8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
OTHERS = 99 << 10  # (8, 6), (8, 9) and (12, x)
Key = tuple[Hashable, ...]


def calls() -> Iterator[tuple[Problem, Operands]]:
    """Every call of the steps, checked; of those whose time counts, one with fewer rows."""
    timed = (
        Trial(Case(c.name, min(c.seqlen_q, 1024), 1024, c.head_dim, dtype=c.dtype, causal=c.causal))
        for c in (*gpu_cases.FORWARD, *gpu_cases.DECODE)
    )
    for trial in (*gpu_cases.trials(), *timed):
        x = inputs_of(trial)
        x.flags.pop("members", None)
        yield check(*map(laid_out, x.arrays, trial.layouts), **x.flags)


def keys(device: driver.Device) -> set[Key]:
    """The kernels of all calls on a device."""
    found = set()
    for (problem, operands), wanted in itertools.product(calls(), (False, True)):
        with maps.wgmma(wanted):
            where = placement_of(operands)
        known = where.whole_rows, where.options, where.no_maps
        found.add(choice.choose(problem, device, *known).kernel.key)
        for name in ("combine", "missing"):
            found.add(choice.row_kernel(name, problem, 1).key)
    return found | gradient_keys(device)


def gradient_keys(device: driver.Device) -> set[Key]:
    """The same of gradients."""
    found = set()
    timed = (
        Trial(Case(c.name, 1024, 1024, c.head_dim, dtype=c.dtype, causal=c.causal))
        for c in gpu_cases.BACKWARD
    )
    for trial in (*gpu_cases.gradient_trials(), *timed):
        x = inputs_of(trial)
        x.flags.pop("members", None)
        problem, operands = check(*x.arrays, **x.flags, fold=False)
        where = placement_of(operands)
        chosen = choice.choose_gradients(problem, device, where.whole_rows, where.options)
        found |= {kernel.key for kernel, _ in chosen.kernels}
        dtype = problem.variant.dtype
        if "bias" in x.flags:
            found.add(choice.bias_kernel(problem, (1, 1), dtype)[0].key)
        found.update(
            choice.sums_kernel(problem, "d" + name, dtype)[0].key
            for name in ("sinks", "alibi")
            if name in x.flags
        )
    return found


def build(key: Key) -> int:
    """Translate a kernel, unless the cache has it; the length of its text."""
    return len(compile.code(key, choice.builder(key)).ptx)


def device_of(capability: tuple[int, int]) -> driver.Device:
    """What decides on kernels, of a device of this compute capability."""
    shared = SHARED_BYTES.get(capability, OTHERS)
    return driver.Device(0, "none", capability, 1, shared, 65536, 1 << 20)


@terminal.checked
def capability(text: str) -> tuple[int, int]:
    """A compute capability."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"must be a compute capability such as 9.0, got {text!r}")
    return int(major), int(minor)


def main() -> None:
    parser = repository.parser(__doc__)
    parser.add_argument("--capability", type=capability, default=(9, 0))
    options = parser.parse_args()
    wanted = sorted(keys(device_of(options.capability)), key=repr)
    with ProcessPoolExecutor(default_num_threads()) as pool:
        sizes = list(pool.map(build, wanted))
    print(f"{len(sizes)} kernels, {sum(sizes) >> 10} KiB")


if __name__ == "__main__":
    main()
