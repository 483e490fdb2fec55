"""A few modifiers for drawn problems, each with what it means for whole arrays.

Few, as each is a kernel of its own for every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import mods
from ..block_mask import create_block_mask
from .case import Case

NAMES = ("table", "documents", "gaps")
NEAR = 7  # distances that have a number of their own in table()


def table(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    """Score modifier: bent, plus a number that heads have for each distance."""
    return 2 * mods.tanh(s / 2) + aux[0][h, mods.minimum(abs(i - j), NEAR)]


def gaps(s: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    """Score modifier: half of it, and a third of the pairs hidden."""
    return mods.where((i + 2 * j + h) % 3 == 0, -np.inf, s * 0.5)


def scattered(b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
    """Mask modifier: pairs here and there."""
    return (i * 3 + j * (h + 1) + b) % 5 != 0


same_document = mods.document_mask(query=0, key=1)


@dataclass(frozen=True)
class Modified:
    """What modifiers are to a call, and to the oracle."""

    arguments: dict[str, Any]  # of the call
    visible: Any = True  # bool that broadcasts to the scores
    change: Callable[[Any], Any] | None = None  # of all scores at once
    slope: Callable[[Any], Any] | None = None  # its derivative


def modified(case: Case, sizes: tuple[int, int], rng: np.random.Generator) -> Modified:
    """The modifiers of a case; `sizes` are the rows and keys that a block mask is made for."""
    grid = np.ogrid[tuple(slice(size) for size in case.shape("bhqk"))]
    b, h, i, j = grid
    match case.modifiers:
        case "table":
            numbers = rng.standard_normal((case.heads_q, NEAR + 1)).astype(np.float32)
            added = numbers[h, np.minimum(abs(i - j), NEAR)]
            return Modified(
                {"score_mod": table, "aux": (numbers,)},
                change=lambda s: 2 * np.tanh(s / 2) + added.astype(s.dtype),
                slope=lambda s: 1 - np.tanh(s / 2) ** 2,
            )
        case "documents":
            query, key = (
                np.sort(rng.integers(0, 4, (case.batch, n)), axis=1)
                for n in (case.seqlen_q, case.seqlen_k)
            )
            arguments = {"mask_mod": same_document, "aux": (query, key)}
            return Modified(_blocks(case, sizes, arguments), query[b, i] == key[b, j])
        case "gaps":
            hidden = (i + 2 * j + h) % 3 == 0
            return Modified(
                {"score_mod": gaps, **_blocks(case, sizes, {"mask_mod": scattered})},
                (i * 3 + j * (h + 1) + b) % 5 != 0,
                change=lambda s: np.where(hidden, -np.inf, s * s.dtype.type(0.5)),
                slope=lambda s: s.dtype.type(0.5),
            )
    return Modified({})


def _blocks(case: Case, sizes: tuple[int, int], arguments: dict[str, Any]) -> dict[str, Any]:
    """The same with a block mask in place of its mask_mod, where the case has blocks."""
    if not case.block:
        return arguments
    made = create_block_mask(
        arguments["mask_mod"],
        case.batch,
        case.heads_q,
        *sizes,
        aux=arguments.get("aux", ()),
        block=case.block,
    )
    return {"block_mask": made}
