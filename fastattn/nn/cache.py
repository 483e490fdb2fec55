"""Keys and values of the tokens so far, kept for the queries to come."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..api import attention
from ..arguments import count
from ..arrays import FLOAT_RULE, float_name
from ..plan import SPLIT_N
from ..signatures import passing_keywords_to

# Arguments of attention() that count keys from the first one in the array, which a cache with
# `left` gives up.
COUNTED = ("align", "chunk", "q_len", "kv_len", "kv_start", "score_mod", "mask_mod", "block_mask")


class KVCache:
    """Keys and values of one attention layer, of all tokens so far or of the last ones.

    Memory is reserved ahead and grows by doubling, so that a token is copied a bounded number of
    times however many follow. With `left`, keys that no later query sees are given up, and memory
    stays below 4 * (left + 1024) tokens, but for one prompt longer than that.

    Parameters
    ----------
    heads_kv, head_dim : int. Keys are (*batch, heads_kv, tokens, head_dim).
    head_dim_v : int. Width of the values. Default head_dim.
    batch : tuple of int. Leading dimensions; all members have the same number of tokens.
    dtype : float16, bfloat16, float32 or float64
    reserve : int. Tokens for which there is memory from the start.
    capacity : int. The most tokens that may ever be appended. Default no limit.
    left : int. Queries see this many keys before their own, as window=(left, 0) of attention().
        Default all.

    Attributes
    ----------
    seqlen : int. Tokens appended so far: the position of the next one.
    start : int. Position of the first token that is still kept: 0 without `left`.

    Notes
    -----
    On backend "cpu", attend() gives each row the same bits for any division of a text into calls:
    all at once, in chunks or token by token, with `left` or with window=(left, 0) and all keys. For
    that, `start` is always a multiple of the keys after which the core starts a sum anew (1024). On
    backend "numpy" the BLAS library decides the order of additions, and results agree to rounding.
    Dropout counts the rows of a call, and with `left` the keys that are kept: it does not repeat.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        heads_kv: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        batch: tuple[int, ...] = (),
        dtype: DTypeLike = np.float32,
        reserve: int = 256,
        capacity: int | None = None,
        left: int | None = None,
    ) -> None:
        at_least_1 = {"heads_kv": heads_kv, "reserve": reserve, "capacity": capacity}
        at_least_0 = {"head_dim": head_dim, "head_dim_v": head_dim_v, "left": left}
        for low, sizes in enumerate((at_least_0, at_least_1)):
            for name, size in sizes.items():
                if size is not None:
                    count(name, size, low)
        if not float_name(np.dtype(dtype)):
            raise TypeError(f"dtype must be {FLOAT_RULE}, got {np.dtype(dtype)}")
        self.capacity, self.left = capacity, left
        self.seqlen = self.start = 0
        slots = reserve if capacity is None else min(reserve, capacity)
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        self._keys = np.empty((*batch, heads_kv, slots, head_dim), dtype)
        self._values = np.empty((*batch, heads_kv, slots, head_dim_v), dtype)

    def __repr__(self) -> str:
        return f"<KVCache of {self.seqlen} tokens from {self.start}: keys {self.keys.shape}>"

    @property
    def keys(self) -> np.ndarray:
        """(*batch, heads_kv, seqlen - start, head_dim): a view, valid until the next append()."""
        return self._keys[..., : self.seqlen - self.start, :]

    @property
    def values(self) -> np.ndarray:
        """(*batch, heads_kv, seqlen - start, head_dim_v): a view, valid until then."""
        return self._values[..., : self.seqlen - self.start, :]

    @property
    def slots(self) -> int:
        """Tokens for which there is memory now."""
        return self._keys.shape[-2]

    def append(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write the keys and values of the next tokens; return all that their queries may see.

        Parameters
        ----------
        k, v : (*batch, heads_kv, tokens, head_dim) and (*batch, heads_kv, tokens, head_dim_v), of
            the cache's dtype. Any strides.

        Returns
        -------
        keys, values : views of positions `start` to `seqlen`

        Raises
        ------
        ValueError  shapes that do not fit, or more tokens than capacity: nothing is written
        TypeError   another dtype
        """
        tokens = self._check(k, v)
        used = self.seqlen - self.start
        if used + tokens > self.slots:
            self._make_room(tokens)
            used = self.seqlen - self.start
        self._keys[..., used : used + tokens, :] = k
        self._values[..., used : used + tokens, :] = v
        self.seqlen += tokens
        return self.keys, self.values

    @passing_keywords_to(attention, "block_table")
    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Any:
        """Append k and v, and return attention() of q, the queries of the same tokens, to all keys.

        Parameters
        ----------
        q : (*batch, heads_q, tokens, head_dim)
        k, v : as in append()
        options : as in attention(), for the keys of positions 0 to seqlen. causal is True unless
            given. The last axis of mask and bias has all of these keys, also with `left`; then what
            else counts keys from the first one is refused.

        Returns
        -------
        As attention(). Whatever it raises, the cache is what it was.
        """
        options.setdefault("causal", True)
        before = self._keys, self._values, self.start, self.seqlen
        keys, values = self.append(k, v)
        try:
            if self.left is not None:
                self._limit(self.left, options)
            return attention(q, keys, values, **options)
        except BaseException:
            # Slots past seqlen hold nothing, and memory that was given up is as it was.
            self._keys, self._values, self.start, self.seqlen = before
            raise

    def truncate(self, seqlen: int) -> None:
        """Forget the tokens at positions `seqlen` and up, so that others may be appended.

        Raises
        ------
        ValueError  more tokens than there are; or, with `left`, so few that the next query would
                    see keys that were given up
        """
        if not 0 <= seqlen <= self.seqlen:
            raise ValueError(f"seqlen must lie from 0 to {self.seqlen}, got {seqlen}")
        if self._first_needed(seqlen) < self.start:
            raise ValueError(
                f"seqlen must be at least {self.start + (self.left or 0)}, as tokens before "
                f"{self.start} were given up, got {seqlen}"
            )
        self.seqlen = seqlen

    def _check(self, k: np.ndarray, v: np.ndarray) -> int:
        """Return the number of tokens of k and v, or raise."""
        for name, array, kept in (("k", k, self._keys), ("v", v, self._values)):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
            if array.dtype != kept.dtype:
                raise TypeError(
                    f"{name} must have the dtype of the cache, {kept.dtype}, got {array.dtype}"
                )
            sizes = array.shape[:-2] + array.shape[-1:]
            if array.ndim != kept.ndim or sizes != kept.shape[:-2] + kept.shape[-1:]:
                *lead, _, width = kept.shape
                wanted = ", ".join(map(str, [*lead, "tokens", width]))
                raise ValueError(f"{name} must have shape ({wanted}), got {array.shape}")
        if k.shape[-2] != v.shape[-2]:
            raise ValueError(
                f"k and v must have the same number of tokens, got {k.shape} and {v.shape}"
            )
        tokens = k.shape[-2]
        if self.capacity is not None and self.seqlen + tokens > self.capacity:
            raise ValueError(
                f"k must keep the cache within its capacity of {self.capacity} tokens, "
                f"got {tokens} after {self.seqlen}"
            )
        return tokens

    def _first_needed(self, position: int) -> int:
        """First key that queries at `position` and later see, rounded down to where a sum starts:
        what a row adds together, and in which order, is then the same as with all keys.
        """
        if self.left is None:
            return 0
        return max(position - self.left, 0) // SPLIT_N * SPLIT_N

    def _make_room(self, tokens: int) -> None:
        """Move what is needed to new memory, which views of the old one do not see."""
        first = self._first_needed(self.seqlen)
        needed = self.seqlen + tokens - first
        slots = 1 << (needed - 1).bit_length()
        if self.left is not None and needed > 2 * (self.left + SPLIT_N):
            slots = needed  # a long prompt, of which little is needed later
        if self.capacity is not None:
            slots = min(slots, self.capacity - first)
        kept = slice(first - self.start, self.seqlen - self.start)
        moved = []
        for old in (self._keys, self._values):
            new = np.empty((*old.shape[:-2], slots, old.shape[-1]), old.dtype)
            new[..., : kept.stop - kept.start, :] = old[..., kept, :]
            moved.append(new)
        self._keys, self._values = moved
        self.start = first

    def _limit(self, most: int, options: dict[str, Any]) -> None:
        """Make options for all keys those for the kept ones, of which rows see `most` back."""
        for name in COUNTED:
            if name in options:
                raise ValueError(
                    f"{name} must not be given to a cache with left={most}, which does not "
                    "keep the first keys. Call append() and attention(), and mind its start."
                )
        left, right = options.get("window", (None, None))
        left = most if left is None else left
        if left > most:
            raise ValueError(
                f"window must reach at most left={most} keys back, as the cache keeps no "
                f"more, got {left}"
            )
        options["window"] = left, right
        for name in ("mask", "bias"):
            array = options.get(name)
            if array is not None and np.shape(array)[-1:] == (self.seqlen,):
                options[name] = np.asarray(array)[..., self.start :]
