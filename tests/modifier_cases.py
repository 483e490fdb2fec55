"""Modifiers, each with what it means for arrays, and calls that have one."""

from __future__ import annotations

import numpy as np
import oracle

import fastattn
from fastattn import create_block_mask, mods

F4 = np.float32
HEADS = {"batch": 3, "heads_q": 4, "heads_kv": 2}


def ids_of(case, rng):
    """Return documents of each batch entry, for queries and for keys."""
    sizes = case.seqlen_q, case.seqlen_k
    return tuple(np.sort(rng.integers(0, 4, (case.batch, size)), axis=1) for size in sizes)


def slopes_of(case, rng):
    return (rng.random((case.batch, case.heads_q)),)


def t5_of(case, rng):
    weight = rng.standard_normal((32, case.heads_q))
    return mods.t5_table(weight, case.seqlen_q, case.seqlen_k)


def nothing(case, rng):
    return ()


def ratio(x, y, dtype):
    return x.astype(dtype) / y.astype(dtype)


def lower_half(b, h, i, j, aux):
    return (j + h) % 2 < aux[0][b]


def every_index(b, h, i, j, aux):
    return (i * 3 + j * (h + 1) + b) % 5 != 0


# name: (mask_mod, aux, what it means for arrays b, h, i, j that broadcast)
MASKS = {
    "causal": (mods.causal, nothing, lambda b, h, i, j, aux: i >= j),
    "window": (
        mods.sliding_window(9, 4),
        nothing,
        lambda b, h, i, j, aux: np.isin(j - i, range(-9, 5)),
    ),
    "dilated": (
        mods.dilated_window(3, 2, 4),
        nothing,
        lambda b, h, i, j, aux: np.isin(j - i, range(-12, 9, 4)),
    ),
    "prefix": (mods.prefix_lm(20), nothing, lambda b, h, i, j, aux: (j < 20) | (i >= j)),
    "prefix-batch": (
        mods.prefix_lm(),
        lambda case, rng: (rng.integers(0, case.seqlen_k, case.batch),),
        lambda b, h, i, j, aux: (j < aux[0][b]) | (i >= j),
    ),
    "document": (
        mods.document_mask(query=0, key=1),
        ids_of,
        lambda b, h, i, j, aux: np.equal(aux[0][b, i], aux[1][b, j]),
    ),
    "and": (
        mods.and_masks(mods.document_mask(query=0, key=1), mods.causal),
        ids_of,
        lambda b, h, i, j, aux: np.where(i >= j, aux[0][b, i] == aux[1][b, j], False),
    ),
    "or": (
        mods.or_masks(mods.document_mask(query=0, key=1), mods.causal),
        ids_of,
        lambda b, h, i, j, aux: np.where(i >= j, True, aux[0][b, i] == aux[1][b, j]),
    ),
    "everything": (mods.and_masks(), nothing, lambda b, h, i, j, aux: True),
    "no-key": (mods.or_masks(), nothing, lambda b, h, i, j, aux: False),
    "constant": (lambda b, h, i, j, aux: True, nothing, lambda b, h, i, j, aux: True),
    "heads": (
        lower_half,
        lambda case, rng: (np.arange(case.batch) % 3,),
        lambda b, h, i, j, aux: np.mod(j + h, 2) < aux[0][b],
    ),
    "every-index": (
        every_index,
        nothing,
        lambda b, h, i, j, aux: np.mod(3 * i + j + j * h + b, 5) > 0,
    ),
}
# name: (score_mod, aux, what it means for arrays)
SCORES = {
    "softcap": (mods.softcap(3.0), nothing, lambda s, b, h, i, j, aux: 3 * np.tanh(s / 3)),
    "alibi": (
        mods.alibi(),
        slopes_of,
        lambda s, b, h, i, j, aux: s - aux[0][b, h].astype(s.dtype) * np.abs(i - j),
    ),
    "alibi-heads": (
        mods.alibi(slot=1),
        lambda case, rng: (7, rng.random(case.heads_q)),
        lambda s, b, h, i, j, aux: s - aux[1][h].astype(s.dtype) * np.abs(i - j),
    ),
    "t5": (
        mods.t5_bias(),
        t5_of,
        lambda s, b, h, i, j, aux: s + aux[0][h, j - i + aux[1]].astype(s.dtype),
    ),
    "hides": (
        lambda s, b, h, i, j, aux: mods.where((i + j + h) % 3 == 0, -np.inf, s),
        nothing,
        lambda s, b, h, i, j, aux: np.where((i + j + h) % 3 == 0, -np.inf, s),
    ),
    "constant": (
        lambda s, b, h, i, j, aux: 1.0,
        nothing,
        lambda s, b, h, i, j, aux: np.ones_like(s),
    ),
    "same": (lambda s, b, h, i, j, aux: s, nothing, lambda s, b, h, i, j, aux: s),
    "every-index": (
        lambda s, b, h, i, j, aux: s * aux[0][b, j] + (h + 1.0) / (i + 1),
        lambda case, rng: (rng.standard_normal((case.batch, case.seqlen_k)),),
        lambda s, b, h, i, j, aux: s * aux[0][b, j].astype(s.dtype) + ratio(h + 1, i + 1, s.dtype),
    ),
}


def modified(case, score="", mask="", block=None, seed=0):
    """Return (keyword arguments, what the oracle takes in their place)."""
    rng = np.random.default_rng((seed, 2))
    grid = np.ogrid[tuple(slice(size) for size in case.shape("bhqk"))]
    ours, truth, aux = {}, {}, ()
    if mask:
        function, make_aux, dense = MASKS[mask]
        mask_aux = aux = make_aux(case, rng)
        truth["mask"] = np.broadcast_to(dense(*grid, mask_aux), case.shape("bhqk"))
        ours["mask_mod"] = function
    if block:
        sizes = case.shape("bhqk")
        function = ours.pop("mask_mod")
        ours["block_mask"] = create_block_mask(function, *sizes, aux=mask_aux, block=block)
        aux = ()
    if score:
        function, make_aux, change = SCORES[score]
        score_aux = make_aux(case, rng)
        # Both share aux: those of the mask come first, so a score_mod beside one is moved past it.
        ours["score_mod"] = moved(function, len(aux)) if aux else function
        aux = (*aux, *score_aux)
        truth["change"] = lambda s: change(s, *grid, score_aux)
    return ours | ({"aux": aux} if aux else {}), truth


def moved(function, first):
    return lambda s, b, h, i, j, aux: function(s, b, h, i, j, aux[first:])


def assert_agrees_with_the_oracle(backend, case, ours, truth, seed=0):
    (q, k, v), flags = case.arrays(seed), case.flags(seed)
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    _, lse = fastattn.attention(q, k, v, **flags, **ours, return_lse=True, out=out, backend=backend)
    if flags.pop("dropout_seed", None) is not None:
        flags["keep"] = fastattn.dropout_mask(
            case.shape("bhqk"), dropout_p=case.dropout_p, dropout_seed=seed + 3
        )
    if "mask" in truth:
        flags["mask"] = truth["mask"] & flags.get("mask", True)
    exact, formula = oracle.judge(q, k, v, **flags, change=truth.get("change"))
    oracle.assert_within_budget(out, exact[0], formula[0], floor=case.floor())
    oracle.assert_within_budget(lse, exact[1], formula[1], floor=case.floor())
