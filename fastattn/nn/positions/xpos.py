"""xPos: RoPE whose scores fall off with distance, faster for the pairs that turn faster."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .integers import positions_of
from .rope import Rope
from .rotary import Rotation
from .scaling import check_positive

GAMMA = 0.4  # how far the slowest decay is from the fastest; the paper's choice


def xpos_rotations(
    rope: Rope,
    positions: ArrayLike,
    *,
    scale_base: float = 512.0,
    center: float = 0.0,
    dtype: Any = np.float32,
) -> tuple[Rotation, Rotation]:
    """Return the rotations of queries and of keys: `rotary` of multihead_attention().

    The pairs t of a query at position p are multiplied by zeta_t ** ((p - center) / scale_base),
    those of a key are divided by it, zeta_t = (2 t / rotary_dim + 0.4) / 1.4, so that a score has
    zeta_t ** (distance / scale_base).

    Parameters
    ----------
    rope : Rope
    positions : (..., tokens) ints, 0 and up
    scale_base : float. Positions in which a pair decays by zeta_t.
    center : float
        Has no part in the scores, but one in overflow: float32 has room for |p - center| up to
        69 * scale_base. All keys and queries that meet need the same one.
    dtype : float32 or float64

    Returns
    -------
    Two Rotations of (..., tokens, rotary_dim / 2)

    Raises
    ------
    ValueError  positions so far from center that the scale is no number of the dtype

    References
    ----------
    Sun et al. 2022, A Length-Extrapolatable Transformer, arXiv:2212.10554, section 2.2 and
    algorithm 1.
    """
    check_positive("scale_base", scale_base)
    where = positions_of("positions", positions)
    plain = rope.rotation(where, dtype=np.float64)
    zeta = (np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim + GAMMA) / (1 + GAMMA)
    power = (where[..., None] - center) / scale_base
    most, limits = np.abs(power).max(initial=0), np.finfo(dtype)
    if zeta[0] ** most < limits.tiny:
        reach = int(scale_base * np.log(limits.tiny) / np.log(zeta[0]))
        raise ValueError(
            f"positions must lie within {reach} of center = {center}, "
            f"got one {most * scale_base:.0f} away"
        )
    scale = zeta**power
    pairs = ((plain.cos * factor, plain.sin * factor) for factor in (scale, 1 / scale))
    of_q, of_k = (
        Rotation(cos.astype(dtype), sin.astype(dtype), rope.interleaved) for cos, sin in pairs
    )
    return of_q, of_k
