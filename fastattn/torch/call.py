"""The arguments of the operator, as a record."""

from __future__ import annotations

from typing import Any, NamedTuple


class Call(NamedTuple):
    """The arguments of the operator; the defaults are those of attention()."""

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    alibi: Any = None
    sinks: Any = None
    q_len: Any = None
    kv_len: Any = None
    kv_start: Any = None
    offset: Any = None  # an align of ints
    dropout_seed: Any = None
    scale: float | None = None
    causal: bool = False
    align: str = "bottom_right"  # unless there is an offset
    left: int | None = None
    right: int | None = None
    chunk: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0

    def has_no_other_tensors(self) -> bool:
        """Whether ARRAYS are all the tensors that there are."""
        return self[OTHERS:TENSORS] == NO_OTHERS

    def options(self) -> dict[str, Any]:
        """All but q, k and v, as attention() takes them."""
        options = self._asdict()
        for name in ("q", "k", "v"):
            del options[name]
        options["window"] = options.pop("left"), options.pop("right")
        offset, seed = options.pop("offset"), options["dropout_seed"]
        if offset is not None:
            options["align"] = offset
        options["dropout_seed"] = None if seed is None else int(seed)
        return options


ARRAYS = ("q", "k", "v", "mask", "bias")
OTHERS = Call._fields.index("alibi")  # tensors from here on are not of ARRAYS
TENSORS = Call._fields.index("scale")  # arguments before it
ON_DEMAND = ("bias", "sinks", "alibi")  # whose gradients attention_backward() returns, in its order
NO_OTHERS = (None,) * (TENSORS - OTHERS)
