"""The parameters of multi-head attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..arguments import count
from .linear import LinearWeights, Record, check_float_array


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MultiHeadWeights(Record):
    """Parameters of multihead_attention().

    qkv : weight ((num_heads + 2 * num_heads_kv) * head_dim, model_dim): the rows of q, then of k,
        then of v, each head after head, so that one matrix product makes all three. Or the three
        maps by themselves, where keys or values have features or a head_dim_v of their own.
    out : weight (model_dim, num_heads * head_dim_v)
    num_heads : int. Heads of the queries.
    num_heads_kv : int. Heads of keys and values, each for num_heads // num_heads_kv consecutive
        heads of queries. Default num_heads.
    sinks : (num_heads,) float: a score without a value beside those of the keys; sinks of
        fastattn.attention. Zeros are torch's add_zero_attn.
    extra : (num_heads_kv, head_dim) and (num_heads_kv, head_dim_v): one more key and value that
        every query sees, whatever is masked; torch's add_bias_kv. Its score is scaled, but takes
        part in no bias, softcap or modifier.

    q, k and v are the three maps, kv is that of keys and values at once: views, None if apart.
    """

    qkv: LinearWeights | tuple[LinearWeights, LinearWeights, LinearWeights]
    out: LinearWeights
    num_heads: int
    num_heads_kv: int | None = None
    sinks: np.ndarray | None = None
    extra: tuple[np.ndarray, np.ndarray] | None = None
    q: LinearWeights = field(init=False)
    k: LinearWeights = field(init=False)
    v: LinearWeights = field(init=False)
    kv: LinearWeights | None = field(init=False)

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_heads_kv"):
            heads = getattr(self, name)
            if heads is not None:
                count(name, heads, 1)
        if self.num_heads % self.heads_kv:
            rule = "num_heads must be a multiple of num_heads_kv"
            raise ValueError(f"{rule}, got {self.num_heads} and {self.heads_kv}")
        fused = isinstance(self.qkv, LinearWeights)
        parts = self._cut(self.qkv) if isinstance(self.qkv, LinearWeights) else (*self.qkv, None)
        for name, part in zip(("q", "k", "v", "kv"), parts, strict=True):
            object.__setattr__(self, name, part)
        if not fused:
            self._check_separate()
        self._check_out()
        self._check_additions()

    @property
    def heads_kv(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_heads_kv is None else self.num_heads_kv

    @property
    def model_dim(self) -> int:
        """Features of a token."""
        return self.q.weight.shape[1]

    @property
    def head_dim(self) -> int:
        """Features of one head of queries and keys."""
        return self.q.weight.shape[0] // self.num_heads

    @property
    def head_dim_v(self) -> int:
        """Features of one head of values."""
        return self.v.weight.shape[0] // self.heads_kv

    def _cut(self, qkv: LinearWeights) -> tuple[LinearWeights, ...]:
        """q, k, v and kv: views of the rows of qkv."""
        rows, heads = qkv.weight.shape[0], self.num_heads + 2 * self.heads_kv
        if rows % heads:
            raise ValueError(
                f"qkv weight must have a multiple of num_heads + 2 * num_heads_kv = {heads} rows, "
                f"got shape {qkv.weight.shape}"
            )
        q_stop = rows // heads * self.num_heads
        v_start = q_stop + rows // heads * self.heads_kv
        cuts = (slice(q_stop), slice(q_stop, v_start), slice(v_start, rows), slice(q_stop, rows))
        return tuple(
            LinearWeights(qkv.weight[cut], None if qkv.bias is None else qkv.bias[cut])
            for cut in cuts
        )

    def _check_separate(self) -> None:
        for name, heads in (("q", self.num_heads), ("v", self.heads_kv)):
            shape = getattr(self, name).weight.shape
            if shape[0] % heads:
                raise ValueError(
                    f"{name} weight must have a multiple of {heads} rows, one for each head and "
                    f"feature, got shape {shape}"
                )
        rows, shape = self.heads_kv * self.head_dim, self.k.weight.shape
        if shape[0] != rows:
            raise ValueError(
                f"k weight must have {rows} rows, {self.heads_kv} heads of {self.head_dim} to fit "
                f"q weight {self.q.weight.shape}, got shape {shape}"
            )

    def _check_out(self) -> None:
        wanted = (self.model_dim, self.num_heads * self.head_dim_v)
        if self.out.weight.shape != wanted:
            qkv = self.qkv
            names = ("qkv", qkv) if isinstance(qkv, LinearWeights) else ("v", self.v)
            raise ValueError(
                f"out weight must have shape {wanted} to fit {names[0]} weight "
                f"{names[1].weight.shape}, got {self.out.weight.shape}"
            )
        dtype = self.q.weight.dtype
        for name in ("k", "v", "out"):
            other = getattr(self, name).weight.dtype
            if other != dtype:
                raise TypeError(
                    f"{name} weight must have the dtype of q weight, {dtype}, got {other}"
                )

    def _check_additions(self) -> None:
        wanted: list[tuple[str, Any, tuple[int, ...]]] = []
        if self.sinks is not None:
            wanted.append(("sinks", self.sinks, (self.num_heads,)))
        if self.extra is not None:
            widths = (self.head_dim, self.head_dim_v)
            for i, (array, width) in enumerate(zip(self.extra, widths, strict=True)):
                wanted.append((f"extra[{i}]", array, (self.heads_kv, width)))
        for name, array, shape in wanted:
            check_float_array(name, array)
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
            if array.dtype != self.q.weight.dtype:
                raise TypeError(
                    f"{name} must have the dtype of the weights, {self.q.weight.dtype}, "
                    f"got {array.dtype}"
                )
