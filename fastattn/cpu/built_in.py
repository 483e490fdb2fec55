"""Every kernel that calls may need, those with modifiers of the user's own aside."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ..machine import VectorUnit
from ..problem import Variant
from . import elementwise, run, run_backward, share
from .elementwise_job import OPERANDS


def kernels() -> dict[Hashable, Callable[[VectorUnit], Callable]]:
    """What compile.store() wants of each: {key: build}."""
    forward = run.built_in_kernels()
    variants = dict.fromkeys(variant for _, variant in forward)
    both = [(function, dtype) for function in OPERANDS for dtype in ("float32", "float64")]
    return {
        **{key: run.builder(*key) for key in forward},
        **{("backward", variant): run_backward.builder(variant) for variant in variants},
        share.BODY: share.body_builder,
        share.AWAKE: share.awake_builder,
        **{("elementwise", *names): elementwise.builder(*names) for names in both},
    }


def words(key: Hashable) -> str:
    """A key in a few words."""
    parts = key if isinstance(key, tuple) else (key,)
    return " ".join(map(_word, parts))


def _word(part: object) -> str:
    if isinstance(part, Variant):
        return part.storage + " on pages" * part.paged
    return str(part)
