"""A call that is a part of a larger one: some of its batch entries, heads, query rows and keys.

Window, lengths and ALiBi need no more than an `align` and lengths of the part's own. This is for
all that depends on the place of a row or key itself: chunk, dropout, score_mod and mask_mod.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import dropout
from .backward import finished
from .backward import run as run_backward
from .check import check
from .check_backward import check_backward
from .launch import run as run_forward
from .modifier import Modifier
from .problem import Operands, Problem
from .trace import Traced, TracedArray, recorded

FIRST = {"h": 0, "i": 1, "j": 2}  # where Part.places() has them
BATCH = 3  # and where it has the places of the batch entries


class Part(NamedTuple):
    """Where the arrays of a call lie in those of a larger one."""

    b: np.ndarray  # int64: the place in the larger batch, in C order, of each batch entry
    h: int  # the first query head
    i: int  # the first row
    j: int  # the first key
    keys_before: int  # keys of the larger call before the part's first, both without kv_start
    whole: tuple[int, int]  # (batch, heads_q) of the larger call

    def places(self) -> np.ndarray:
        """What a placed() modifier wants as its last aux array."""
        return np.array([self.h, self.i, self.j, *self.b.ravel()], np.int64)


@lru_cache(maxsize=256)
def placed(modifier: Modifier) -> Modifier:
    """Return the modifier that does for a part what `modifier` does for the larger call.

    Its aux has one array more. That says where the part lies, so that all parts share a kernel.
    """
    aux = (*modifier.aux, ("int64", 1))

    def build(recorder: Any) -> Traced:
        places = TracedArray(recorder, len(modifier.aux), 1)
        values: list[Any] = []
        for step in modifier.steps:
            value: Any = recorder.replay(step, values)
            if step[0] in FIRST:
                value = value + places[FIRST[step[0]]]
            elif step[0] == "b":
                value = places[value + BATCH]
            values.append(value)
        return values[-1]

    return recorded(modifier.argument, aux, build)


def attend(
    part: Part, q: np.ndarray, k: np.ndarray, v: np.ndarray, backend: str, arguments: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of attention() for a part.

    `arguments` are those of attention() for the part's arrays, score_mod and mask_mod placed().
    """
    problem, operands = _within(part, *check(q, k, v, **arguments, return_lse=True))
    run_forward(problem, operands, backend)
    return operands.out, operands.lse  # type: ignore[return-value]


def differentiate(
    part: Part,
    arrays: tuple[np.ndarray, ...],
    dlse: np.ndarray | None,
    backend: str,
    wanted: tuple[str, ...],
    arguments: dict[str, Any],
) -> tuple[np.ndarray, ...]:
    """Return what attention_backward() does for a part; `arrays` are dout, q, k, v, out and lse.

    out and lse are those of the larger call. `wanted` are those of check_backward.RETURNS.
    """
    problem, operands, gradients = check_backward(*arrays, dlse=dlse, wanted=wanted, **arguments)
    problem, operands = _within(part, problem, operands)
    run_backward(problem, operands, gradients, backend)
    arguments = {name: value for name, value in arguments.items() if name != "score_mod_grad"}
    return finished(gradients, operands, arrays[1:4], wanted, arguments)


def _within(part: Part, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Tell chunk and dropout where the part lies."""
    if problem.dropout_p:
        keys = dropout.head_keys(problem.dropout_seed, *part.whole)
        heads = slice(part.h, part.h + problem.heads_q)
        keys = dropout.moved(keys[part.b.ravel(), heads], part.i)
        operands = operands._replace(dropout_keys=np.ascontiguousarray(keys))
        problem = replace(problem, keys_before=part.keys_before)
    elif problem.chunk and part.keys_before % problem.chunk:
        problem = replace(problem, keys_before=part.keys_before % problem.chunk)
    return problem, operands
