"""Where arrays are, what is copied, which kernels are launched: the only caller of the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from ..cpu.layout import address
from ..problem import Operands, Placement, Plan, Problem
from . import driver
from .choice import Choice, Kernel, row_kernel
from .job import PLACE, GradientJob, Job, MappedJob
from .maps import maps_of, why_none
from .memory import NOWHERE, DeviceMemory, device_memory, view_of
from .packing import job_of
from .prepared import Prepared, function_of, launch_again, launches_of

ALIGNMENT = 16  # bytes of one load of a tensor-core kernel
ARRAYS = ("q", "k", "v", "mask", "bias", "alibi", "block_mask")  # those with strides


def placement_of(operands: Operands) -> Placement:
    """Where the arrays of a call are. For gradients, out is to be dout."""
    memory = device_memory(operands.q)
    rows = (operands.q, operands.k, operands.v, operands.out)
    whole = all(_has_whole_rows(a) for a in rows) if memory else _fits(rows)
    options = any(a is not None for a in (operands.mask, operands.bias, operands.alibi))
    no_maps = why_none(rows[:3], copied=memory is None)
    ordinal = memory.ordinal if memory else 0
    return Placement(ordinal, memory is not None, whole, options, no_maps)


def _has_whole_rows(array: np.ndarray) -> bool:
    """Whether rows begin at multiples of 16 bytes and are contiguous."""
    *steps, column = array.strides
    return column == array.itemsize and reduce(or_, steps, address(array)) % ALIGNMENT == 0


def _fits(arrays: tuple[np.ndarray, ...]) -> bool:
    """The same of copies in C order."""
    return all(a.shape[-1] * a.itemsize % ALIGNMENT == 0 for a in arrays)


def run(plan: Plan, problem: Problem, operands: Operands) -> None:
    """Write operands.out and operands.lse: every element. Nothing waits but for arrays of NumPy,
    which are copied to the GPU and back.
    """
    memory = device_memory(operands.q)
    ordinal = memory.ordinal if memory else 0
    stream = memory.stream if memory else 0
    if not problem.batch * problem.heads_q * problem.seqlen_q:
        return
    if memory is not None and _launch_again(plan, problem, operands, memory):
        return
    with driver.using(ordinal), scratch(ordinal, stream) as space:
        follow_others(stream, *operands[:10], *operands.score_aux, *operands.mask_aux)
        results = (operands.out, operands.lse)
        there = inputs_there(operands, space)
        if memory is None:
            there = there._replace(out=space.empty_like(operands.out))
            if operands.lse is not None:
                there = there._replace(lse=space.empty_like(operands.lse))
        _launch_all(plan.choice, problem, there, space)
        if memory is None:
            for array, copy in zip(results, (there.out, there.lse), strict=True):
                space.fetch(array, copy)


def _launch_again(plan: Plan, problem: Problem, operands: Operands, memory: DeviceMemory) -> bool:
    """launch_again() for a call whose arrays are q, k, v, out and lse alone. False for others: what
    they hold goes into their jobs, or is copied.
    """
    q, k, v, mask, bias, out, lse, *others = operands
    if plan.choice.mapped is not None:  # its maps hold addresses
        return False
    if mask is not None or bias is not None or any(isinstance(a, np.ndarray) or a for a in others):
        return False
    arrays = {"q": q, "k": k, "v": v, "out": out}
    if lse is not None:
        arrays["lse"] = lse

    def prepare() -> Prepared:
        choice: Choice = plan.choice
        kernels, nbytes = _kernels(choice, problem, operands), _partial_bytes(choice, problem)
        job = job_of(problem, operands, choice.pieces, address, NOWHERE if nbytes else 0)
        launches = launches_of(((kernel, job) for kernel in kernels), memory.ordinal)
        parts = ("partial", 0), ("partial_state", job[PLACE["partial_state"]] - NOWHERE)
        return Prepared(launches, nbytes, parts if nbytes else ())

    return launch_again(plan, arrays, memory, prepare)


def inputs_there(operands: Operands, space: Scratch) -> Operands:
    """The inputs in the memory of the device."""
    moved: dict[str, Any] = {name: space.moved(getattr(operands, name)) for name in ARRAYS}
    for name in ("score_aux", "mask_aux"):
        moved[name] = tuple(map(space.moved, getattr(operands, name)))
    return operands._replace(**moved)


def follow_others(stream: int, *arrays: np.ndarray | None) -> None:
    """Arrays of other streams are ready, on the device, before ours goes on."""
    found = (device_memory(a) for a in arrays)
    for other in {m.stream for m in found if m is not None} - {stream}:
        driver.follow(stream, other)


def _launch_all(choice: Choice, problem: Problem, operands: Operands, space: Scratch) -> None:
    """Put all kernels of a call into the stream."""
    nbytes = _partial_bytes(choice, problem)
    partial = space.allocate(nbytes) if nbytes else 0
    job = job_of(problem, operands, choice.pieces, space.address_of, partial)
    for kernel in _kernels(choice, problem, operands):
        if kernel is choice.kernel and choice.mapped is not None:
            launch(kernel, MappedJob._make((*job, *maps_of(operands, choice.mapped))), space)
        else:
            launch(kernel, job, space)


def _partial_bytes(choice: Choice, problem: Problem) -> int:
    """Memory for the results of parts of the keys; 0 where they are not split."""
    if choice.num_splits == 1:
        return 0
    rows = problem.batch * problem.heads_q * problem.seqlen_q * choice.num_splits
    return rows * (problem.head_dim_v + 2) * np.dtype(problem.variant.dtype).itemsize


def _kernels(choice: Choice, problem: Problem, operands: Operands) -> list[Kernel]:
    """Those of a call, one after another."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    found = [choice.kernel] if problem.seqlen_k else []
    if choice.num_splits > 1:
        found.append(row_kernel("combine", problem, rows))
    if not problem.seqlen_k or _has_missing_rows(operands):
        found.append(row_kernel("missing", problem, rows))
    return found


def _has_missing_rows(operands: Operands) -> bool:
    """Whether batch entries have rows past q_len that are theirs."""
    if operands.ranges is None or operands.starts is not None:
        return False
    return bool((operands.ranges[:, 0] < operands.q.shape[-2]).any())


def launch(kernel: Kernel, job: Job | GradientJob | MappedJob, space: Scratch) -> None:
    """Put a kernel into the stream."""
    shape = kernel.grid, kernel.threads, kernel.shared_bytes
    driver.launch(function_of(kernel, space.ordinal), *shape, space.stream, job)


class Scratch:
    """Memory of the device that a call needs, in the order of its stream."""

    def __init__(self, ordinal: int, stream: int):
        self.ordinal, self.stream = ordinal, stream
        self.addresses: list[int] = []

    def allocate(self, nbytes: int) -> int:
        """The address of new memory."""
        self.addresses.append(driver.allocate(nbytes, self.stream))
        return self.addresses[-1]

    def address_of(self, array: np.ndarray) -> int:
        """Where a view lies, or a new copy of an array in the memory of the CPU, in C order."""
        if device_memory(array) is None:
            array = self._copied(array)
        return address(array)

    def moved(self, array: np.ndarray | None) -> np.ndarray | None:
        """A view of the device's memory: the array itself, or of a copy that repeats as it does."""
        if array is None or device_memory(array) is not None:
            return array
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)
        return np.broadcast_to(self._copied(array[once]), array.shape)

    def empty_like(self, array: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        """A view of new memory, in C order."""
        memory, dtype = DeviceMemory(None, self.ordinal, self.stream), dtype or array.dtype
        place = self.allocate(array.size * dtype.itemsize)
        return view_of(memory, place, array.shape, dtype)

    def _copied(self, array: np.ndarray) -> np.ndarray:
        copy = self.empty_like(array)
        driver.to_device(address(copy), np.ascontiguousarray(array), self.stream)
        return copy

    def fetch(self, array: np.ndarray | None, copy: np.ndarray | None) -> None:
        """Fill an array in the memory of the CPU from a view of empty_like(), and wait."""
        if array is None or copy is None:
            return
        fits = array.flags.c_contiguous and array.dtype == copy.dtype
        target = array if fits else np.empty(array.shape, copy.dtype)
        driver.to_host(target, address(copy), self.stream)
        if target is not array:
            array[...] = target


@contextmanager
def scratch(ordinal: int, stream: int) -> Iterator[Scratch]:
    """Scratch that is given back, when the stream has come so far."""
    space = Scratch(ordinal, stream)
    try:
        yield space
    finally:
        for place in space.addresses:
            driver.free(place, stream)
