"""Which probabilities dropout keeps: a hash of (seed, b, h, i, j), so that no tiling changes it.

A row's key is 64 bits: SplitMix64's finaliser, chained over seed, b, h and i. Each key index j then
takes three multiplications of 32 bits, which SIMD lanes can do: triple32 on the low half of the key
plus j, with the high half added in between. A row's numbers repeat after 2**32 keys, and two rows
share theirs only if they share both halves. b counts the leading dimensions in C order, j from
kv_start. (lowbias32, one multiplication less, fails a test of serial pairs on 8 million numbers.)

Sources: Steele, Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators, with the constants
of Stafford's Mix13; Wellons 2018, Prospecting for Hash Functions (triple32).
"""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd


def mix64(z: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every bit of the result depends on every bit of z."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def chained(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the uint64 keys that follow from `keys` for an index (b, h or i); they broadcast."""
    return mix64(keys + np.uint64(GOLDEN) * (index.astype(np.uint64) + np.uint64(1)))


def head_keys(seed: int, batch: int, heads: int) -> np.ndarray:
    """Return (batch, heads) uint64; chained() with i gives the keys of the rows."""
    root = chained(np.zeros(1, np.uint64), np.array([seed]))
    return chained(chained(root, np.arange(batch))[:, None], np.arange(heads))


def moved(keys: np.ndarray, first: int) -> np.ndarray:
    """Return keys of which chained() makes for n what it makes of `keys` for first + n."""
    return keys + np.uint64(GOLDEN * first % 2**64)


def kept(row_keys: np.ndarray, j: np.ndarray, dropout_p: float) -> np.ndarray:
    """Return (*row_keys.shape, len(j)) bool: True where the probability of key j is kept."""
    low, high = row_keys.astype(np.uint32), (row_keys >> np.uint64(32)).astype(np.uint32)
    x = j.astype(np.uint32) + low[..., None]
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x += high[..., None]
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return x >= np.uint32(threshold(dropout_p))


def threshold(dropout_p: float) -> int:
    """Numbers below this, of 2**32, drop. All of them for p = 1 but one, which factor() undoes."""
    return min(round(dropout_p * 2**32), 2**32 - 1)


def factor(dropout_p: float) -> float:
    """What the result is multiplied by: 1 / (1 - p), and 0 for p = 1."""
    return 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)
