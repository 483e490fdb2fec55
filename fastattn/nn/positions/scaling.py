"""The angular frequencies of RoPE, and how they are stretched for texts longer than in training.

Each class is one kind of scaling, with the parameters that model files give it. All have

    frequencies(rotary_dim, base, seqlen) -> (rotary_dim / 2,) float64   radians a position
    attention_factor                                                     multiplies cos and sin

so that logits are multiplied by the square of the attention factor. seqlen is the number of tokens
of the whole text; only DynamicScaling and LongRopeScaling depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Scaling(Protocol):
    """What Rope needs of a kind of scaling."""

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        ...

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """(rotary_dim / 2,) float64, radians a position."""
        ...


def plain_frequencies(rotary_dim: int, base: float) -> np.ndarray:
    """base ** (-2t / rotary_dim) for t = 0 ... rotary_dim / 2 - 1.

    Source: Su et al. 2021, RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    return float(base) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


@dataclass(frozen=True, slots=True)
class NoScaling:
    """RoPE as it was published."""

    attention_factor: float = 1.0

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """The plain ones."""
        return plain_frequencies(rotary_dim, base)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by factor: positions are interpolated.

    Source: Chen et al. 2023, Position Interpolation, arXiv:2306.15595, equation 4.
    """

    factor: float
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """plain / factor."""
        return plain_frequencies(rotary_dim, base) / self.factor


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first pairs turn, a share of all, with the frequencies of the whole width.

    Unlike a smaller rotary_dim, which has as many pairs but other frequencies and other partners.

    Source: rope_type "proportional" of Hugging Face's transformers.
    """

    share: float
    factor: float = 1.0
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie from 0 to 1, got {self.share}")

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """plain / factor for the first share of the pairs, 0 for the others."""
        frequencies = plain_frequencies(rotary_dim, base) / self.factor
        frequencies[int(self.share * rotary_dim // 2) :] = 0
        return frequencies


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the text, once it is longer than max_positions ("dynamic NTK").

    base' = base (factor n / max_positions - (factor - 1)) ** (rotary_dim / (rotary_dim - 2)) with
    n = max(seqlen, max_positions).

    Source: Peng et al. 2023, YaRN, arXiv:2309.00071, sections 3.1 (NTK-aware) and 3.3 (dynamic).
    """

    factor: float
    max_positions: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        check_positive("max_positions", self.max_positions)

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """The plain ones of the grown base."""
        if rotary_dim < 4:
            raise ValueError(f"rotary_dim must be at least 4 to be scaled, got {rotary_dim}")
        n = max(seqlen, self.max_positions)
        grown = self.factor * n / self.max_positions - (self.factor - 1)
        return plain_frequencies(rotary_dim, base * grown ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies are divided by factor, high ones stay, those between are blended ("YaRN").

    original_positions : tokens of the texts that the model was first trained on
    beta_fast, beta_slow : frequencies that turn more often than beta_fast in original_positions
        stay; those that turn less often than beta_slow are divided
    truncate : the range of features between the two is widened to whole ones
    mscale, mscale_all_dim : if both are given and not 0, the attention factor is
        (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1), else 0.1 ln factor + 1
    factor_of_attention : the attention factor itself, in place of that formula

    Source: Peng et al. 2023, YaRN, arXiv:2309.00071, section 3.2 and equation 22.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    factor_of_attention: float | None = None

    def __post_init__(self) -> None:
        for name in ("factor", "original_positions", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        if self.factor_of_attention is not None:
            return float(self.factor_of_attention)
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """plain · (share / factor + 1 - share), share rising from 0 to 1 over the range."""
        plain = plain_frequencies(rotary_dim, base)
        low = self._pair_that_turns(self.beta_fast, rotary_dim, base)
        high = self._pair_that_turns(self.beta_slow, rotary_dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # a step, as the published code has it
        share = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)
        return plain * (share / self.factor + 1 - share)

    def _pair_that_turns(self, times: float, rotary_dim: int, base: float) -> float:
        """Index of the pair that turns so many times in original_positions: not a whole number."""
        wavelength = self.original_positions / times
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves are divided by factor, short ones stay, those between are blended.

    A wave is long above original_positions / low_freq_factor positions and short below
    original_positions / high_freq_factor.

    Source: Meta 2024, Llama 3.1's published model code; The Llama 3 Herd of Models,
    arXiv:2407.21783, section 3.4.2.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "original_positions"):
            check_positive(name, getattr(self, name))
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be more than low_freq_factor, {self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """plain · ((1 - smooth) / factor + smooth), smooth falling from 1 to 0 with the wave."""
        plain = plain_frequencies(rotary_dim, base)
        waves = self.original_positions * plain / (2 * math.pi)  # in original_positions
        smooth = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0, 1)
        return plain * ((1 - smooth) / self.factor + smooth)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency has a divisor of its own: one list for short texts, one for long ones.

    short_factor, long_factor : rotary_dim / 2 divisors; the long ones for seqlen above
        original_positions
    factor : how much longer texts may be than original_positions; for the attention factor,
        sqrt(1 + ln factor / ln original_positions)
    factor_of_attention : the attention factor itself, in place of that formula

    Source: Ding et al. 2024, LongRoPE, arXiv:2402.13753, equation 2; Abdin et al. 2024, Phi-3,
    arXiv:2404.14219, whose published code has the attention factor.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_positions: int
    factor: float
    factor_of_attention: float | None = None

    def __post_init__(self) -> None:
        check_positive("original_positions", self.original_positions)
        check_positive("factor", self.factor)
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(float(f) for f in getattr(self, name)))
            for divisor in getattr(self, name):
                check_positive(name, divisor)

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin."""
        if self.factor_of_attention is not None:
            return float(self.factor_of_attention)
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_positions))

    def frequencies(self, rotary_dim: int, base: float, seqlen: int) -> np.ndarray:
        """plain / divisors."""
        name = "long_factor" if seqlen > self.original_positions else "short_factor"
        divisors = np.array(getattr(self, name))
        if divisors.shape != (rotary_dim // 2,):
            raise ValueError(
                f"{name} must have rotary_dim / 2 = {rotary_dim // 2} elements, got {divisors.size}"
            )
        return plain_frequencies(rotary_dim, base) / divisors


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless value is finite and above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")
