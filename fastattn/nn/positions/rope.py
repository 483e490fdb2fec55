"""Rotary position embedding of a model: its frequencies, and the angles of given positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import count
from .integers import positions_of
from .rotary import Rotation
from .scaling import NoScaling, Scaling, check_positive


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoPE): token p turns pair t by p · frequency_t.

    rotary_dim : features of a head that are turned, the first ones; even
    base : frequency_t = base ** (-2t / rotary_dim), unless scaled
    interleaved : pairs are (2t, 2t + 1), not (t, t + rotary_dim / 2): see apply_rotary()
    scaling : one of fastattn.nn.positions' scalings, for texts longer than in training
    """

    rotary_dim: int
    base: float = 10000.0
    interleaved: bool = False
    scaling: Scaling = field(default_factory=NoScaling)

    def __post_init__(self) -> None:
        if count("rotary_dim", self.rotary_dim, 2) % 2:
            raise ValueError(f"rotary_dim must be even, got {self.rotary_dim}")
        check_positive("base", self.base)

    def frequencies(self, seqlen: int = 0) -> np.ndarray:
        """(rotary_dim / 2,) float64, radians a position, for a text of seqlen tokens."""
        return self.scaling.frequencies(self.rotary_dim, self.base, seqlen)

    def rotation(
        self, positions: ArrayLike, *, seqlen: int | None = None, dtype: Any = np.float32
    ) -> Rotation:
        """Return the cos and sin that apply_rotary() needs for tokens at these positions.

        Parameters
        ----------
        positions : (..., tokens) ints, 0 and up
            Make it once for all layers: np.arange(start, start + tokens).
        seqlen : int. Tokens of the whole text; only dynamic and LongRoPE scaling ask for it.
            Default: the largest position + 1, as in Hugging Face's models. Keys in a cache were
            turned with the seqlen of their own call: where it changes the frequencies, a text
            processed in parts gives what one call gives only if all parts are given its length.
        dtype : float32 or float64. Angles are computed in float64 and rounded once.

        Returns
        -------
        Rotation of (..., tokens, rotary_dim / 2)
        """
        where = positions_of("positions", positions)
        if seqlen is None:
            seqlen = int(where.max(initial=-1)) + 1
        angles = where[..., None] * self.frequencies(seqlen)
        factor = self.scaling.attention_factor
        cos, sin = np.cos(angles), np.sin(angles)
        if factor != 1:
            cos *= factor
            sin *= factor
        return Rotation(cos.astype(dtype), sin.astype(dtype), self.interleaved)
