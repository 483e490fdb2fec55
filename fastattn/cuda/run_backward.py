"""What is copied and launched for gradients, as run.py does for attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cpu.layout import address
from ..problem import Gradients, Operands, Plan, Problem
from . import driver
from .choice import GradientChoice, Pieces
from .memory import device_memory
from .packing import gradient_job_of
from .run import Scratch, follow_others, inputs_there, launch, scratch

READ = ("dout", "dlse")
WRITTEN = ("dq", "dk", "dv")


def run(plan: Plan, problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """Write all of gradients that is written. Nothing waits but for arrays of NumPy, which are
    copied to the GPU and back.
    """
    if any(a is not None for a in (gradients.dbias, gradients.dsinks, gradients.dalibi)):
        raise NotImplementedError("backend='cuda' returns dq, dk and dv. Use backend='cpu'.")
    memory = device_memory(operands.q)
    ordinal, stream = (memory.ordinal, memory.stream) if memory else (0, 0)
    with driver.using(ordinal), scratch(ordinal, stream) as space:
        arrays = (*operands[:10], *operands.score_aux, *operands.mask_aux, *gradients)
        follow_others(stream, *arrays)
        there = inputs_there(operands, space)
        results: dict[str, Any] = {n: space.moved(getattr(operands, n)) for n in ("out", "lse")}
        there = there._replace(**results)
        read: dict[str, Any] = {name: space.moved(getattr(gradients, name)) for name in READ}
        into = gradients._replace(**read)
        if memory is None:
            # Rounded to the dtype of q by the kernels, as where the arrays are a GPU's.
            own = {n: space.empty_like(getattr(gradients, n), operands.q.dtype) for n in WRITTEN}
            into = into._replace(**own)
        pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
        if operands.ranges is not None or not pairs:
            _clear(into, stream)
        if pairs:
            _launch_all(plan.choice, problem, there, into, space)
        if memory is None:
            for name in WRITTEN:
                space.fetch(getattr(gradients, name), getattr(into, name))


def _clear(gradients: Gradients, stream: int) -> None:
    """0 for rows and keys that no batch entry has."""
    for name in WRITTEN:
        array = getattr(gradients, name)
        if array.size:
            driver.clear(address(array), array.size * array.itemsize, stream)


def _launch_all(
    choice: GradientChoice,
    problem: Problem,
    operands: Operands,
    gradients: Gradients,
    space: Scratch,
) -> None:
    """Put all kernels of a call into the stream."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    nbytes = rows * np.dtype(problem.variant.dtype).itemsize
    numbers = {name: space.allocate(nbytes) for name in ("delta", "reference")}
    job = gradient_job_of(problem, operands, gradients, Pieces(0), space.address_of, **numbers)
    for kernel, pieces in choice.kernels:
        launch(kernel, job._replace(**pieces._asdict()), space)
