"""What a call has beside its arrays: one text, which XLA carries to the kernel as an attribute."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple


class Options(NamedTuple):
    """Of one call."""

    names: tuple[str, ...]  # of the operands that it has, in order
    scale: float
    left: int | None  # row i sees keys i - left <= j <= i + right; None for no limit
    right: int | None


@lru_cache(maxsize=1024)
def text_of(options: Options) -> str:
    """Return the text of which options_of() makes the same options, in any process."""
    return json.dumps(options)


@lru_cache(maxsize=1024)
def options_of(text: bytes | str) -> Options:
    names, *others = json.loads(text)
    return Options(tuple(names), *others)


def band_of(options: Options) -> dict[str, Any]:
    """Return what attention() calls the band: a window around a shifted position.

    A negative radius is one in JAX, too: with (-2, 5), rows see the keys 2 to 5 after them.
    """
    left, right = options.left, options.right
    if left is None:
        return {"align": right or 0, "window": (None, None if right is None else 0)}
    if right is None:
        return {"align": -left, "window": (0, None)}
    if left + right < 0:
        return {"kv_len": 0}
    return {"align": right, "window": (left + right, 0)}
