"""Pictures of what attention looks at. They need matplotlib: pip install matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .api import attention as _attention
from .optional import pyplot
from .signatures import passing_keywords_to
from .weights import FOREIGN, attention_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

INCHES = 0.3  # of a row or column that has a text
MOST_INCHES = 12.0


@passing_keywords_to(_attention, *FOREIGN)
def attention(
    q: ArrayLike,
    k: ArrayLike,
    *,
    head: int | tuple[int, ...] = 0,
    rows: slice = slice(None),
    columns: slice = slice(None),
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    **arguments: Any,
) -> Axes:
    """Draw the probabilities of one head: a row for each query, a column for each key.

    Parameters
    ----------
    q, k : as in fastattn.attention
    head : int, or one int for each axis of q before the tokens: (batch, head). Alone, it is the
        head of the first member of the batch.
    rows, columns : slices of queries and keys, which are drawn
    tokens, key_tokens : their texts, (seqlen_q,) and (seqlen_k,), along the axes. Default none;
        for keys, those of the queries where there are as many.
    ax : matplotlib axes to draw on. Default new ones, of a size at which texts can be read.
    arguments : scale, causal, mask, ... as in fastattn.attention_weights

    Returns
    -------
    ax : the axes; ax.figure.savefig("attention.png") keeps the picture

    Raises
    ------
    ValueError   not a text for each token; others as fastattn.attention
    IndexError   there is no such head
    ImportError  matplotlib is not installed
    """
    weights = attention_weights(q, k, rows=rows, **arguments)
    seqlen_q, seqlen_k = np.shape(q)[-2], np.shape(k)[-2]
    shown = _of_head(weights, head)[:, columns]
    texts = _texts(tokens, key_tokens, seqlen_q, seqlen_k)
    ax = _draw(shown, texts, rows, columns, ax, cmap="Blues", vmin=0)
    ax.figure.colorbar(ax.images[-1], ax=ax, label="probability")
    return ax


@passing_keywords_to(_attention, *FOREIGN)
def mask(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    heads: int = 1,
    head: int = 0,
    rows: slice = slice(None),
    columns: slice = slice(None),
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    **arguments: Any,
) -> Axes:
    """Draw which keys each query may see: those are dark.

    Parameters
    ----------
    seqlen_q, seqlen_k : numbers of queries and keys. Default as many keys as queries.
    heads, head : how many heads there are, and which is drawn
    rows, columns, tokens, key_tokens, ax : as in attention()
    arguments : causal, window, chunk, mask, bias, mask_mod, ... as in fastattn.attention_weights

    Returns
    -------
    ax : the axes

    Raises
    ------
    As attention().
    """
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    # Between zeros all scores are alike: what weighs nothing is hidden.
    q, k = (np.zeros((heads, length, 1), np.float32) for length in (seqlen_q, seqlen_k))
    seen = attention_weights(q, k, rows=rows, **arguments)[head][:, columns] > 0
    texts = _texts(tokens, key_tokens, seqlen_q, seqlen_k)
    return _draw(seen, texts, rows, columns, ax, cmap="Blues", vmin=0, vmax=1.5)


def _of_head(weights: np.ndarray, head: int | tuple[int, ...]) -> np.ndarray:
    """(num_rows, seqlen_k) of weights (..., heads, num_rows, seqlen_k) or of one head alone."""
    weights = weights[None] if weights.ndim == 2 else weights
    given = head if isinstance(head, tuple) else (head,)
    index = (*[0] * (weights.ndim - 2 - len(given)), *given)
    if len(index) != weights.ndim - 2:
        raise IndexError(f"head must be at most {weights.ndim - 2} ints, got {head}")
    return weights[index]


def _texts(
    tokens: Sequence[str] | None, key_tokens: Sequence[str] | None, seqlen_q: int, seqlen_k: int
) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """The texts of queries and keys."""
    if key_tokens is None and seqlen_q == seqlen_k:
        key_tokens = tokens
    for name, texts, length in (("tokens", tokens, seqlen_q), ("key_tokens", key_tokens, seqlen_k)):
        if texts is not None and len(texts) != length:
            raise ValueError(f"{name} must be {length} texts, one for each token, got {len(texts)}")
    return tokens, key_tokens


def _draw(
    values: np.ndarray,
    texts: tuple[Sequence[str] | None, Sequence[str] | None],
    rows: slice,
    columns: slice,
    ax: Axes | None,
    **options: Any,
) -> Axes:
    ax = _new_axes(values.shape, texts) if ax is None else ax
    ax.imshow(values, interpolation="nearest", aspect="auto", **options)
    ax.set(xlabel="key", ylabel="query")
    for axis, text, part in ((ax.yaxis, texts[0], rows), (ax.xaxis, texts[1], columns)):
        if text is not None:
            labels = list(text)[part]
            axis.set_ticks(range(len(labels)), labels)
    ax.xaxis.set_tick_params(rotation=90)
    return ax


def _new_axes(shape: tuple[int, ...], texts: tuple[Any, Any]) -> Axes:
    plt = pyplot("fastattn.plot")
    height, width = (
        4.8 if text is None else min(max(2.5, 1.5 + INCHES * length), MOST_INCHES)
        for text, length in zip(texts, shape, strict=True)
    )
    return plt.subplots(figsize=(width + 1, height), layout="constrained")[1]
