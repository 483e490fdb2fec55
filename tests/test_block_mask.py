"""Block masks: every block has the kind that the dense mask says, and the picture shows it."""

from __future__ import annotations

import re
import sys
import tracemalloc

import numpy as np
import pytest

from fastattn import mods
from fastattn.block_mask import FULL, PARTIAL, PIECE, SKIPPED, BlockMask, create_block_mask

IDS = np.sort(np.random.default_rng(1).integers(0, 5, (2, 130)))
MASKS = {
    "causal": (mods.causal, None, None, ()),
    "window": (mods.sliding_window(30, 7), None, None, ()),
    "dilated": (mods.dilated_window(None, None, 64), None, None, ()),
    "document": (mods.document_mask(), 2, None, (IDS,)),
    "heads": (lambda b, h, i, j, aux: j < aux[0][h] + b, 2, 3, (np.array([0, 64, 500]),)),
    "everything": (mods.and_masks(), None, None, ()),
    "nothing": (lambda b, h, i, j, aux: False, 2, 2, ()),
}


@pytest.mark.parametrize("block", [(16, 64), (64, 16), (7, 13), (1000, 1)], ids=str)
@pytest.mark.parametrize("size", [(130, 130), (1, 130), (130, 1), (64, 128)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_kinds_are_those_of_the_dense_mask(name, size, block):
    mask_mod, batch, heads, aux = MASKS[name]
    mask = create_block_mask(mask_mod, batch, heads, *size, aux=aux, block=block)
    dense = mask.to_dense()
    assert mask.shape == dense.shape == (batch or 1, heads or 1, *size)
    m_blocks, n_blocks = -(-size[0] // block[0]), -(-size[1] // block[1])
    assert mask.kinds.shape == (*dense.shape[:2], m_blocks, n_blocks)
    for m, n in np.ndindex(m_blocks, n_blocks):
        rows = slice(m * block[0], (m + 1) * block[0])
        part = dense[:, :, rows, n * block[1] : (n + 1) * block[1]]
        kind = np.where(part.any((2, 3)), PARTIAL, SKIPPED)
        kind[part.all((2, 3))] = FULL
        np.testing.assert_array_equal(mask.kinds[:, :, m, n], kind)
    np.testing.assert_array_equal(mask.visited, (mask.kinds != SKIPPED).sum(-1))
    assert mask.sparsity == np.mean(mask.kinds == SKIPPED)
    computed = np.repeat(np.repeat(mask.kinds != SKIPPED, block[0], axis=2), block[1], axis=3)
    computed = computed[:, :, : size[0], : size[1]]
    assert mask.pairs == int(computed.sum() / (dense.shape[0] * dense.shape[1]))


@pytest.mark.parametrize("name", MASKS)
def test_the_dense_mask_is_the_mask_mod(name):
    mask_mod, batch, heads, aux = MASKS[name]
    dense = create_block_mask(mask_mod, batch, heads, 130, 130, aux=aux).to_dense()
    for b, h, i, j in [(0, 0, 0, 0), (0, 0, 129, 3), (1, 2, 50, 90), (1, 1, 64, 64)]:
        b, h = min(b, (batch or 1) - 1), min(h, (heads or 1) - 1)
        assert dense[b, h, i, j] == bool(mask_mod(b, h, i, j, aux))


def test_pieces_join(monkeypatch):
    whole = create_block_mask(mods.causal, None, None, 200, 300, block=(16, 16))
    for piece in (1, 600, 3000, 10_000):
        monkeypatch.setattr("fastattn.block_mask.PIECE", piece)
        parts = create_block_mask(mods.causal, None, None, 200, 300, block=(16, 16))
        np.testing.assert_array_equal(parts.kinds, whole.kinds)


def test_memory_is_that_of_a_piece():
    tracemalloc.start()
    try:
        create_block_mask(mods.sliding_window(100, 100), None, None, 4096, 4096)
        assert tracemalloc.get_traced_memory()[1] < 64 * PIECE < 4096 * 4096
    finally:
        tracemalloc.stop()


def test_what_is_alike_for_all_is_stored_once():
    mask = create_block_mask(mods.causal, 8, 16, 256, 256)
    assert mask.kinds.shape == (8, 16, 4, 4)
    assert mask.kinds.strides[:2] == mask.visited.strides[:2] == (0, 0)


def test_frozen_and_hashable_by_identity():
    one, two = (create_block_mask(mods.causal, None, None, 64, 64) for _ in range(2))
    assert one != two
    assert len({one, two, one}) == 2
    assert one.mask_mod == two.mask_mod
    with pytest.raises(AttributeError):
        one.shape = (1, 1, 1, 1)
    with pytest.raises(ValueError, match="read-only"):
        one.kinds[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        one.visited[...] = 0


@pytest.mark.parametrize("sizes", [(0, 0, 4, 4), (1, 1, 0, 4), (1, 1, 300, 0)])
def test_nothing_at_all(sizes):
    mask = create_block_mask(mods.causal, *sizes)
    assert mask.to_dense().shape == sizes
    assert mask.sparsity == mask.pairs == 0
    assert str(mask) == repr(mask)


def test_picture():
    mask = create_block_mask(mods.sliding_window(64, 0), None, None, 192, 256)
    assert repr(mask) == "BlockMask(shape=(1, 1, 192, 256), block=(64, 64), 58.3 % skipped)"
    assert str(mask).splitlines() == [
        repr(mask),
        "|░   |",
        "|░░  |",
        "| ░░ |",
        "█ full, ░ partial, blank skipped",
    ]


def test_picture_of_many_blocks_is_small():
    lines = str(create_block_mask(mods.causal, None, None, 3000, 5000, block=(8, 8))).splitlines()
    assert len(lines) <= 34
    assert max(map(len, lines[1:-1])) <= 66
    assert re.fullmatch(r"\|░+ +\|", lines[1])
    assert lines[-2].startswith("|█")


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    mask = create_block_mask(mods.document_mask(), 2, None, 130, 130, aux=(IDS,))
    ax = mask.plot(batch=1)
    assert ax.get_xlim() == (0, 130)
    assert ax.get_ylim() == (130, 0)
    np.testing.assert_array_equal(ax.images[0].get_array(), mask.kinds[1, 0])
    assert mask.plot(ax=ax) is ax
    import matplotlib.pyplot as plt

    plt.close(ax.figure)


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        create_block_mask(mods.causal, None, None, 4, 4).plot()


BAD = [
    ({"seqlen_q": -1}, ValueError, "seqlen_q must be an int >= 0, got -1"),
    ({"seqlen_k": 2.0}, TypeError, "seqlen_k must be an int >= 0, got float"),
    ({"batch": True}, TypeError, "batch must be an int >= 0, got bool"),
    ({"heads": -3}, ValueError, "heads must be an int >= 0, got -3"),
    ({"batch": 2**31}, ValueError, "batch must be below 2**31, got 2147483648"),
    (
        {"seqlen_q": np.timedelta64(1, "s")},
        TypeError,
        "seqlen_q must be an int >= 0, got timedelta64",
    ),
    ({"block": (0, 64)}, ValueError, "block_m must be an int >= 1, got 0"),
    ({"block": (64, None)}, TypeError, "block_n must be an int >= 1, got NoneType"),
    ({"block": 64}, TypeError, "block must be (block_m, block_n), got 64"),
    ({"block": (1, 2, 3)}, TypeError, "block must be (block_m, block_n), got (1, 2, 3)"),
    ({"aux": IDS}, TypeError, "aux must be a tuple of arrays and numbers, got ndarray"),
    ({"mask_mod": lambda b, h, i, j: j <= i}, TypeError, "mask_mod must be a function of (b, h,"),
    ({"mask_mod": lambda b, h, i, j, aux: j}, TypeError, "mask_mod must return bool"),
    (
        {"mask_mod": lambda b, h, i, j, aux: j < b},
        ValueError,
        "batch must be given for a mask_mod that uses b, got None",
    ),
    (
        {"mask_mod": lambda b, h, i, j, aux: j < h},
        ValueError,
        "heads must be given for a mask_mod that uses h, got None",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments(change, error, message):
    arguments = {"mask_mod": mods.causal, "batch": None, "heads": None, "seqlen_q": 8}
    with pytest.raises(error, match=re.escape(message)):
        create_block_mask(**{**arguments, "seqlen_k": 8, **change})


def test_type():
    assert isinstance(create_block_mask(mods.causal, 1, 1, 1, 1), BlockMask)
