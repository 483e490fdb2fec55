"""What flash_attn's functions mean, one query row at a time, in float64. Imports no fastattn."""

from __future__ import annotations

import numpy as np


def attend(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    slopes=None,
    sink=None,
):
    """Return (out, lse) of one sequence: q (L, H, D), k (S, G, D), v (S, G, E), slopes (H,).

    A negative side of the window is no limit. lse is -inf where nothing is seen, (H, L).
    """
    q, k, v = (np.asarray(a).astype(np.float64) for a in (q, k, v))
    rows, heads, dim = q.shape
    keys, groups = k.shape[:2]
    scale = dim**-0.5 if scale is None else scale
    left, right = window
    right = 0 if causal else right
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((heads, rows), -np.inf)
    for i in range(rows):
        place = i + keys - rows
        first = max(0, place - left) if left >= 0 else 0
        last = min(keys, place + right + 1) if right >= 0 else keys
        for h in range(heads):
            g = h * groups // heads
            seen = k[first : max(first, last), g]
            s = scale * (seen @ q[i, h])
            if softcap > 0:
                s = softcap * np.tanh(s / softcap)
            if slopes is not None:
                s = s - slopes[h] * np.abs(place - np.arange(first, first + len(seen)))
            terms = s if sink is None else np.append(s, float(sink[h]))
            if len(terms) and terms.max() > -np.inf:
                top = terms.max()
                total = np.exp(terms - top).sum()
                lse[h, i] = top + np.log(total)
                weights = np.exp(s - top) / total
                out[i, h] = weights @ v[first : first + len(seen), g]
    return out, lse


def batched(q, k, v, **flags):
    """Return (out, lse) of a list or batch of sequences, as lists; slopes may be (batch, heads)."""
    found = []
    for b in range(len(q)):
        own = dict(flags)
        if np.ndim(own.get("slopes")) == 2:
            own["slopes"] = own["slopes"][b]
        found.append(attend(q[b], k[b], v[b], **own))
    return [out for out, _ in found], [lse for _, lse in found]


def rotate(x, cos, sin, position, interleaved):
    """Return one head (D,) in float64, its first features turned by the angles of a position."""
    x = np.asarray(x).astype(np.float64)
    pairs = cos.shape[1]
    for t in range(pairs):
        one, two = (2 * t, 2 * t + 1) if interleaved else (t, t + pairs)
        c, s = float(cos[position, t]), float(sin[position, t])
        x[one], x[two] = x[one] * c - x[two] * s, x[one] * s + x[two] * c
    return x


def rotate_rows(x, cos, sin, positions, interleaved):
    """Return rows (L, H, D), row i turned to positions[i]."""
    rows = [
        [rotate(head, cos, sin, at, interleaved) for head in row]
        for row, at in zip(x, positions, strict=True)
    ]
    return np.array(rows).reshape(np.shape(x))
