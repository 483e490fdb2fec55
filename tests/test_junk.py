"""Whatever is given for an argument, the call works or says which argument it refuses."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import fastattn
from fastattn import mods

F4 = np.float32
NUMBERS = [None, True, 0, 1, -1, 2.5, np.nan, np.inf, 10**30, -(10**30), 1j, np.bool_(1)]
TEXTS = ["x", "", b"x", "cpu", "top_left", np.array(["a"]), memoryview(b"abc")]
SEQUENCES = [[], [1], [1, 2], [[1], [1, 2]], (), (1, 2), {}, {1}, range(2), slice(None), ...]
ARRAYS = [
    *(np.array(values) for values in (1, [], [1, 2], [1.0, 2.0], [None], 1j)),
    *(np.ones((2, 2, 3, 3), dtype) for dtype in (F4, bool, int)),
    *(np.float32(1), np.int64(1), np.datetime64("2020"), np.timedelta64(1, "s"), np.ma.ones(3)),
    np.zeros(2, "i4,f8"),
]
FUNCTIONS = [lambda *args: 1, lambda: 1, type, object()]
JUNK = [*NUMBERS, *TEXTS, *SEQUENCES, *ARRAYS, *FUNCTIONS]

Q, TOKENS = np.ones((2, 2, 3, 4), F4), np.ones((5, 2, 4), F4)
HALF = {"out_a": Q, "lse_a": Q[..., 0], "out_b": Q, "lse_b": Q[..., 0]}
CALLS = {
    fastattn.attention: dict.fromkeys("qkv", Q),
    fastattn.attention_varlen: dict.fromkeys("qkv", TOKENS)
    | {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 5]},
    fastattn.attention_weights: {"q": Q, "k": Q},
    fastattn.dropout_mask: {"shape": (2, 3, 4), "dropout_p": 0.5},
    fastattn.merge: HALF,
    fastattn.create_block_mask: {"mask_mod": mods.causal}
    | {"batch": None, "heads": None, "seqlen_q": 8, "seqlen_k": 8},
}


def arguments():
    for function in CALLS:
        for name in inspect.signature(function).parameters:
            yield pytest.param(function, name, id=f"{function.__name__}-{name}")


@pytest.mark.parametrize(("function", "name"), list(arguments()))
def test_what_is_refused_is_named(function, name):
    backend = {"backend": "numpy"} if "backend" in inspect.signature(function).parameters else {}
    unnamed = {}
    for value in JUNK:
        try:
            function(**(CALLS[function] | backend | {name: value}))
        except (TypeError, ValueError, ImportError) as error:  # ImportError: no compiler for "cpu"
            if name not in str(error):
                unnamed[repr(value)] = error
    assert not unnamed
