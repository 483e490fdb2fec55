"""A problem that fails, made as small and as plain as it can be and still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .case import Case
from .trial import Trial

SIZES = ("batch", "heads_q", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
PLAINER = {
    "merge": "forward",
    "backward": "forward",
    "varlen": "forward",
    "varlen backward": "varlen",
}


def shrink(trial: Trial, fails: Callable[[Trial], bool]) -> Trial:
    """The smallest trial found; `fails` says of one whether it is still wrong.

    Each step drops an option or makes a size smaller, until no single step is left that fails.
    """
    found = True
    while found:
        found = False
        for smaller in _smaller(trial):
            if fails(smaller):
                trial, found = smaller, True
                break
    return trial


def _smaller(trial: Trial) -> Iterator[Trial]:
    """What is one step simpler than a trial."""
    case = trial.case
    if trial.kind in PLAINER:
        yield replace(trial, kind=PLAINER[trial.kind])
    for name in ("layouts", "poison", "num_threads", "page_size"):
        default = getattr(Trial(case), name)
        if getattr(trial, name) != default:
            yield replace(trial, **{name: default})
    for field in fields(Case):
        plain: Any = field.default
        if field.name in (*SIZES, "name", "heads_kv") or getattr(case, field.name) == plain:
            continue
        yield replace(trial, case=replace(case, **{field.name: plain}))
    for smaller in _smaller_sizes(case):
        yield replace(trial, case=smaller)


def _smaller_sizes(case: Case) -> Iterator[Case]:
    group = case.heads_q // (case.heads_kv or case.heads_q)
    for heads_q, heads_kv in ((1, 1), (group, 1)):
        if (heads_q, heads_kv) != (case.heads_q, case.heads_kv) and case.heads_q > 1:
            yield replace(case, heads_q=heads_q, heads_kv=heads_kv)
    for name in SIZES:
        size = getattr(case, name)
        if name == "heads_q" or size is None:
            continue
        for less in sorted({1, size // 2, size - 1} - {0, size}):
            yield replace(case, **{name: less})
