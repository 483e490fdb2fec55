"""Which functions modifiers may be, how often they are looked at, and every rule about them."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from cases import Case
from modifier_cases import F4, HEADS, modified

import fastattn
from fastattn import create_block_mask, mods

CPU_IS_SLOW = True  # see test_modifiers.py

# --- inspecting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, (16, 32)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("weights", 33, 70, **HEADS, causal=True),
        Case("weights", 33, 70, **HEADS, lengths="q_len kv_len kv_start", bias="hqk"),
        Case("weights", 33, 70, **HEADS, lengths="one kv_len kv_start", softcap=3.0),
    ],
    ids=str,
)
def test_weights_and_key_sums(case, block):
    q, k, _ = case.arrays()
    ours, truth = modified(case, "every-index", "every-index", block)
    unit = np.broadcast_to(np.eye(case.seqlen_k), (*k.shape[:-1], case.seqlen_k))
    exact, _ = oracle.attention(q, k, unit, **case.flags(), **truth)
    for rows in (slice(None), [30, 2, -1]):
        found = fastattn.attention_weights(q, k, rows=rows, **case.flags(), **ours)
        np.testing.assert_allclose(found, exact[..., rows, :], rtol=0, atol=2e-6)
        sums = fastattn.attention_key_sums(q, k, rows=rows, **case.flags(), **ours)
        np.testing.assert_allclose(sums, exact[..., rows, :].sum(axis=-2), rtol=0, atol=1e-5)


def test_explain_takes_modifiers():
    q = np.ones((1, 2, 5, 8), F4)
    plan = fastattn.explain(q, q, q, mask_mod=mods.causal, backend="numpy")
    assert plan.problem.variant.mask_mod is not None
    assert hash(plan) == hash(fastattn.explain(q, q, q, mask_mod=mods.causal, backend="numpy"))


def test_a_function_is_looked_at_once():
    calls = []

    def scaled(s, b, h, i, j, aux):
        calls.append(aux)
        return s * aux[0]

    q = np.ones((1, 2, 5, 8), F4)
    for aux in [(2,), (3,), (np.int64(5),)]:
        fastattn.explain(q, q, q, score_mod=scaled, aux=aux)
    assert len(calls) == 1
    fastattn.explain(q, q, q, score_mod=scaled, aux=(2.0,))
    assert len(calls) == 2


class Slope:
    """A modifier that has no hash."""

    __hash__ = None

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, s, b, h, i, j, aux):
        return s - self.slope * mods.abs(i - j)

    def method(self, s, b, h, i, j, aux):
        return self(s, b, h, i, j, aux)


def test_any_callable_is_a_function(backend, rng):
    q, k = (rng.standard_normal((1, 2, n, 8)) for n in (5, 9))
    expected = fastattn.attention(q, k, k, alibi=np.full(2, 0.5), align="top_left", backend=backend)
    for function in (Slope(0.5), Slope(0.5).method):
        found = fastattn.attention(q, k, k, score_mod=function, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


# --- errors -------------------------------------------------------------------------------------


def block_mask_of(*sizes, mask_mod=mods.causal):
    return create_block_mask(mask_mod, *sizes)


SHARED = np.zeros(2 * 4 * 7 * 6, F4)
SCORES_SHAPE = "block_mask must have shape (2, 4, 7, 5)"
RULES = [
    ({"mask_mod": 3}, TypeError, "mask_mod must be a function of (b, h, i, j, aux), got int"),
    (
        {"mask_mod": lambda b, h, i, j: True},
        TypeError,
        "mask_mod must be a function of (b, h, i, j, aux), got <lambda>(b, h, i, j)",
    ),
    (
        {"score_mod": mods.causal},
        TypeError,
        "score_mod must be a function of (score, b, h, i, j, aux), got causal(",
    ),
    ({"score_mod": lambda s, b, h, i, j, aux: np.sin(s)}, TypeError, "functions of fastattn.mods:"),
    ({"mask_mod": lambda b, h, i, j, aux: j}, TypeError, "mask_mod must return bool"),
    ({"mask_mod": lambda b, h, i, j, aux: aux[0][j]}, ValueError, "(aux has length 0)"),
    (
        {"mask_mod": mods.causal, "aux": np.ones(3)},
        TypeError,
        "aux must be a tuple of arrays and numbers, got ndarray",
    ),
    (
        {"score_mod": mods.softcap(1.0), "aux": ("text",)},
        TypeError,
        "aux[0] must be an array or a number, got str",
    ),
    (
        {"score_mod": mods.softcap(1.0), "aux": (np.ones(3, complex),)},
        TypeError,
        "aux[0] must be bool, an integer of at most 64 bits (signed) or a float",
    ),
    (
        {"block_mask": mods.causal},
        TypeError,
        "block_mask must be what create_block_mask() returns, got function",
    ),
    (
        {"block_mask": block_mask_of(None, None, 7, 5), "mask_mod": mods.causal},
        ValueError,
        "mask_mod must be None with block_mask, which has its own, got both",
    ),
    (
        {"block_mask": block_mask_of(None, None, 5, 7)},
        ValueError,
        f"{SCORES_SHAPE}, or 1 for batch or heads, got (1, 1, 5, 7)",
    ),
    (
        {"block_mask": block_mask_of(2, 2, 7, 5)},
        ValueError,
        f"{SCORES_SHAPE}, or 1 for batch or heads, got (2, 2, 7, 5)",
    ),
    (
        {"block_mask": block_mask_of(1, 4, 7, 5, mask_mod=lambda b, h, i, j, aux: j > b)},
        ValueError,
        f"{SCORES_SHAPE}, as its mask_mod uses b, got (1, 4, 7, 5)",
    ),
    (
        {"block_mask": block_mask_of(2, 1, 7, 5, mask_mod=lambda b, h, i, j, aux: j > h)},
        ValueError,
        f"{SCORES_SHAPE}, as its mask_mod uses h, got (2, 1, 7, 5)",
    ),
    (
        {
            "mask_mod": mods.causal,
            "aux": (1, SHARED[5:]),
            "out": SHARED.reshape(2, 4, 7, 6),
        },
        ValueError,
        "out must not overlap aux[1], got arrays that share memory",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), RULES)
def test_rules(change, error, message):
    out = np.full((2, 4, 7, 6), 9, F4)
    arguments = {"q": np.ones((2, 4, 7, 8), F4), "k": np.ones((2, 2, 5, 8), F4), "out": out}
    arguments |= {"v": np.ones((2, 2, 5, 6), F4)} | change
    with pytest.raises(error) as caught:
        fastattn.attention(**arguments)
    assert message in str(caught.value)
    assert (out == 9).all()
    with pytest.raises(error):
        fastattn.explain(**arguments)


def test_packed_block_mask_has_the_sizes_of_the_longest():
    q, k = np.ones((7, 4, 8), F4), np.ones((5, 2, 8), F4)
    block_mask = block_mask_of(None, None, 7, 5)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 4, 5\), or 1 for .*, got \(1, 1, 7, 5\)"):
        fastattn.attention_varlen(q, k, k, [0, 3, 7], [0, 5, 5], block_mask=block_mask)


def test_out_may_not_overlap_the_aux_of_a_block_mask():
    aux = np.zeros((1, 1, 7, 8), F4)
    block_mask = create_block_mask(
        lambda b, h, i, j, aux: aux[0][b, h, i, j] < 1, 1, 1, 7, 5, aux=(aux,)
    )
    q, k = np.ones((1, 1, 7, 8), F4), np.ones((1, 1, 5, 8), F4)
    with pytest.raises(ValueError, match=r"out must not overlap aux\[0\]"):
        fastattn.attention(q, k, k, block_mask=block_mask, out=aux)
