"""Plain softmax and masks for the tests of relative encodings."""

from __future__ import annotations

import tracemalloc

import numpy as np


def softmax(scores):
    """Over the last axis; rows without a finite score are 0."""
    top = np.where(np.isfinite(scores.max(axis=-1)), scores.max(axis=-1), 0)[..., None]
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def visible_pairs(tokens, tokens_k, offset, causal, left=None):
    distance = np.arange(tokens)[:, None] + offset - np.arange(tokens_k)
    visible = np.ones(distance.shape, bool)
    if causal:
        visible &= distance >= 0
    if left is not None:
        visible &= distance <= left
    return visible


def check_close(ours, exact, slack=40):
    assert ours.shape == exact.shape
    floor = slack * np.finfo(ours.dtype).eps * max(np.abs(exact).max(initial=0), 1)
    assert np.abs(ours - exact).max(initial=0) <= floor


def peak_bytes(call):
    """Of what NumPy allocates meanwhile."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
