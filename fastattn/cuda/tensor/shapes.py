"""The tiles of a forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from .tiles import Accumulator, SharedTile
from .tilings import Tiling


@dataclass(frozen=True)
class Shapes:
    """Its tiles in shared memory, and a warp's in registers."""

    q: SharedTile  # also out, at the end
    k: SharedTile
    v: SharedTile
    scores: Accumulator
    output: Accumulator

    @property
    def weights(self) -> int:
        """Registers of a thread for the scores as factors of the next product."""
        return self.scores.size * self.v.item // 4

    @classmethod
    def of(cls, tiling: Tiling) -> Shapes:
        v = SharedTile.of(tiling.block_n, tiling.head_dim_v, item=tiling.item)
        return cls(
            SharedTile.of(tiling.block_m, tiling.head_dim, tiling.head_dim_v, item=tiling.item),
            SharedTile.of(tiling.block_n, tiling.head_dim, item=tiling.item),
            v,
            Accumulator(tiling.warp_m, tiling.block_n),
            Accumulator(tiling.warp_m, tiling.head_dim_v, v.v_neighbours),
        )
