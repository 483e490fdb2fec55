"""What is copied and launched for gradients, as run.py does for attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cpu.layout import address
from ..problem import Gradients, Operands, Plan, Problem
from . import driver
from .choice import GradientChoice, Pieces, bias_kernel, sums_kernel
from .memory import NOWHERE, DeviceMemory, device_memory
from .packing import gradient_job_of
from .prepared import Prepared, launch_again, launches_of
from .run import Scratch, follow_others, inputs_there, launch, scratch

READ = ("dout", "dlse")
WRITTEN = ("dq", "dk", "dv")
SUMS = ("dbias", "dsinks", "dalibi")
ROWS = ("delta", "reference", "weight")  # of gradient_rows.py; the last where rows are weighed


def run(plan: Plan, problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """Write all of gradients that is written. Nothing waits but for arrays of NumPy, which are
    copied to the GPU and back.
    """
    memory = device_memory(operands.q)
    if memory is not None and _launch_again(plan, problem, operands, gradients, memory):
        return
    ordinal, stream = (memory.ordinal, memory.stream) if memory else (0, 0)
    with driver.using(ordinal), scratch(ordinal, stream) as space:
        arrays = (*operands[:10], *operands.score_aux, *operands.mask_aux, *gradients)
        follow_others(stream, *arrays)
        there = inputs_there(operands, space)
        results: dict[str, Any] = {n: space.moved(getattr(operands, n)) for n in ("out", "lse")}
        there = there._replace(**results)
        into: dict[str, Any] = {name: space.moved(getattr(gradients, name)) for name in READ}
        for name in (*WRITTEN, *SUMS):
            array = _once(getattr(gradients, name))
            if memory is None and array is not None:
                # dq, dk and dv are rounded by the kernels, as where the arrays are a GPU's.
                array = space.empty_like(array, operands.q.dtype if name in WRITTEN else None)
            into[name] = array
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        if operands.ranges is not None or not rows * problem.seqlen_k:
            _clear(into, stream)
        if rows:
            spread = gradients._replace(**_spread(into, problem, operands))
            _launch_all(plan.choice, problem, there, spread, space)
        if memory is None:
            for name in (*WRITTEN, *SUMS):
                space.fetch(_once(getattr(gradients, name)), into[name])


def _launch_again(
    plan: Plan, problem: Problem, operands: Operands, gradients: Gradients, memory: DeviceMemory
) -> bool:
    """launch_again() for a call whose arrays are those that each call has, and dlse."""
    q, k, v, mask, bias, out, lse, *others = operands
    special = (mask, bias, *(getattr(gradients, name) for name in SUMS))
    if any(a is not None for a in special) or any(isinstance(a, np.ndarray) or a for a in others):
        return False
    if not problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k:
        return False
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    given = {name: getattr(gradients, name) for name in (*READ, *WRITTEN)}
    arrays |= {name: array for name, array in given.items() if array is not None}

    def prepare() -> Prepared:
        rows = {name: n * _row_bytes(problem) for n, name in enumerate(_row_names(plan.choice))}
        there = {name: NOWHERE + first for name, first in rows.items()}
        job = gradient_job_of(problem, operands, gradients, Pieces(0), address, **there)
        jobs = ((k, job._replace(**pieces._asdict())) for k, pieces in plan.choice.kernels)
        nbytes = len(rows) * _row_bytes(problem)
        return Prepared(launches_of(jobs, memory.ordinal), nbytes, tuple(rows.items()))

    return launch_again(plan, arrays, memory, prepare)


def _row_names(choice: GradientChoice) -> tuple[str, ...]:
    """The numbers of each row that the kernels of q, k and v hand on to each other."""
    return ROWS if choice.weighs else ROWS[:2]


def _row_bytes(problem: Problem) -> int:
    """Memory of a number for each row, in the dtype that is computed in."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return rows * np.dtype(problem.variant.dtype).itemsize


def _once(array: np.ndarray | None) -> np.ndarray | None:
    """The elements behind one in which stride 0 stands for a sum, each of them once."""
    if array is None:
        return None
    pairs = zip(array.strides, array.shape, strict=True)
    return array[tuple(slice(min(size, 1) if step == 0 else size) for step, size in pairs)]


def _spread(into: dict[str, Any], problem: Problem, operands: Operands) -> dict[str, Any]:
    """The arrays of the device as kernels see them: stride 0 where they add up."""
    lead = operands.q.shape[:-3] if operands.starts is None else (problem.batch,)
    heads = (*lead, problem.heads_q)
    shapes = {"dsinks": heads, "dalibi": heads}
    if into["dbias"] is not None:
        shapes["dbias"] = operands.bias.shape  # type: ignore[union-attr]
    spread = dict(into)
    for name, shape in shapes.items():
        array = into[name]
        # dalibi in the memory of the CPU has one row for each batch entry already.
        if array is not None and array.shape != (problem.batch, problem.heads_q):
            spread[name] = np.broadcast_to(array, shape)
    return spread


def _clear(arrays: dict[str, Any], stream: int) -> None:
    """0 for rows and keys that no batch entry has."""
    for name in (*WRITTEN, *SUMS):
        array = arrays[name]
        if array is not None and array.size:
            driver.clear(address(array), array.size * array.itemsize, stream)


def _launch_all(
    choice: GradientChoice,
    problem: Problem,
    operands: Operands,
    gradients: Gradients,
    space: Scratch,
) -> None:
    """Put all kernels of a call into the stream."""
    wanted = set(_row_names(choice))
    kernels = list(choice.kernels if problem.seqlen_k else choice.kernels[:1])
    if gradients.dbias is not None and problem.seqlen_k:
        stored = gradients.dbias.dtype.name
        kernels.append(bias_kernel(problem, gradients.dbias.shape, stored))
    for name, rows in (("dsinks", "sink_rows"), ("dalibi", "alibi_rows")):
        array = getattr(gradients, name)
        # Without keys, nothing comes of slopes; of a sink, still what lse takes from it.
        if array is not None and (problem.seqlen_k or name == "dsinks"):
            wanted.add(rows)
            kernels.append(sums_kernel(problem, name, array.dtype.name))
    numbers = {name: space.allocate(_row_bytes(problem)) for name in sorted(wanted)}
    job = gradient_job_of(problem, operands, gradients, Pieces(0), space.address_of, **numbers)
    for kernel, pieces in kernels:
        launch(kernel, job._replace(**pieces._asdict()), space)
