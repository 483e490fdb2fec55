"""What follows the checks: plan a problem and run it, in less memory if need be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from . import guards
from .kinds import is_device_view
from .plan import plan, smaller
from .problem import Operands, Placement, Plan, Problem


def run(problem: Problem, operands: Operands, backend: str) -> Plan | None:
    """Plan and run; rows that exist for no backend and calls without scores are answered here.

    Returns the plan, if it was needed.
    """
    placement = placement_of(operands, backend)
    chosen = plan(problem, backend, placement)
    if placement is not None:
        _launcher("cuda")(chosen, problem, operands)
        return chosen
    if not problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k:
        _write_empty(operands)
        return None
    if guards.ON:
        with guards.watched(operands, guards.INPUTS, ("out", "lse")) as operands:
            return _run_in_memory(chosen, problem, operands)
    return _run_in_memory(chosen, problem, operands)


def _run_in_memory(chosen: Plan, problem: Problem, operands: Operands) -> Plan:
    """Run a plan, or a smaller one if there is too little memory; return the one that ran."""
    if operands.ranges is not None and operands.starts is None:
        _write_missing_rows(operands, operands.ranges)
    while True:
        try:
            _launcher(chosen.backend)(chosen, problem, operands)
            return chosen
        except MemoryError:
            less = smaller(chosen)
            if less is None:
                raise
            chosen = less


def _write_empty(operands: Operands, at: tuple[Any, ...] = (), rows: slice = slice(None)) -> None:
    """Write what a row that sees no key gets, to `rows` of the batch entry `at`, or to all."""
    operands.out[at][..., rows, :] = 0
    if operands.lse is not None:
        sinks = operands.sinks
        operands.lse[at][..., rows] = -np.inf if sinks is None else sinks[:, None]


def _write_missing_rows(operands: Operands, ranges: np.ndarray) -> None:
    lead, seqlen_q = operands.q.shape[:-3], operands.q.shape[-2]
    for b in np.flatnonzero(ranges[:, 0] < seqlen_q):
        at = np.unravel_index(b, lead)
        _write_empty(operands, at, slice(int(ranges[b, 0]), None))


def placement_of(operands: Operands, backend: str) -> Placement | None:
    """Where the arrays are; None where no GPU has to do with the call."""
    if backend != "cuda" and not is_device_view(operands.q):
        return None
    from .cuda.run import placement_of

    return placement_of(operands)


@cache
def _launcher(backend: str) -> Callable[[Plan, Problem, Operands], None]:
    """Import and return one backend's run(); only the chosen one is ever imported."""
    if backend == "cpu":
        from .cpu.run import run
    elif backend == "cuda":
        from .cuda.run import run
    else:
        from .reference import run
    return run
