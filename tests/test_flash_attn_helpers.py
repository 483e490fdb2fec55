"""fastattn.flash_attn.bert_padding and .layers.rotary."""

from __future__ import annotations

import flash_oracle
import numpy as np
import pytest
from test_flash_attn import F4, normal

from fastattn.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)
from fastattn.flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from fastattn.flash_attn.layers.rotary import apply_rotary_emb


def test_unpad_and_pad(rng):
    x, mask = normal(rng, 3, 5, 2, 4), np.array([[1, 1, 0, 0, 0], [0] * 5, [0, 2, 1, 1, 1]])
    tokens, indices, edges, longest, used = unpad_input(x, mask)
    assert indices.tolist() == [0, 1, 11, 12, 13, 14]
    assert edges.tolist() == [0, 2, 2, 6]
    assert (edges.dtype, used.dtype) == (np.int32, np.int32)
    assert (longest, used.tolist()) == (4, [2, 0, 4])
    np.testing.assert_array_equal(tokens, x.reshape(15, 2, 4)[indices])
    back = pad_input(tokens, indices, 3, 5)
    np.testing.assert_array_equal(back, x * (mask[..., None, None] > 0))


def test_places_that_are_kept_unused(rng):
    x, mask = normal(rng, 2, 3), np.array([[True, False, False], [True, True, False]])
    unused = np.array([[False, True, False], [False, False, False]])
    tokens, indices, edges, longest, used = unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 3, 4]
    assert (edges.tolist(), longest, used.tolist()) == ([0, 2, 4], 2, [1, 2])
    np.testing.assert_array_equal(tokens, x.ravel()[indices])


def test_padding_with_gradients(torch):
    x = torch.randn(2, 4, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    tokens, indices, edges, longest, used = unpad_input(x, mask)
    assert (edges.dtype, indices.dtype, longest) == (torch.int32, torch.int64, 3)
    assert used.tolist() == [2, 3]
    pad_input(tokens * 2, indices, 2, 4).sum().backward()
    np.testing.assert_array_equal(x.grad, (2 * mask)[..., None].expand(2, 4, 3))


def test_a_padded_batch_is_its_packed_tokens(rng):
    q, mask = normal(rng, 3, 6, 2, 8), np.arange(6) < np.array([4, 6, 1])[:, None]
    tokens, indices, edges, longest, _ = unpad_input(q, mask)
    out = flash_attn_varlen_func(*[tokens] * 3, edges, edges, longest, longest, causal=True)
    out = pad_input(out, indices, 3, 6)
    for b, count in enumerate((4, 6, 1)):
        one = q[b : b + 1, :count]
        np.testing.assert_array_equal(out[b, :count], flash_attn_func(*[one] * 3, causal=True)[0])


def test_rows_by_index(rng):
    x = normal(rng, 5, 2)
    np.testing.assert_array_equal(index_first_axis(x, np.array([4, 0])), x[[4, 0]])
    found = index_put_first_axis(x[:2], [3, 1], 4)
    np.testing.assert_array_equal(found, [[0, 0], x[1], [0, 0], x[0]])


PADDING_RULES = [
    (lambda x: index_first_axis(x, [5]), "indices must lie between 0 and 4, got 5 to 5"),
    (lambda x: index_first_axis(x, [-1]), "indices must lie between 0 and 4, got -1 to -1"),
    (lambda x: index_first_axis(x, [0.0]), "indices must be ints with one axis"),
    (lambda x: index_put_first_axis(x, [0, 1], 9), "indices must have one for each row of values"),
    (lambda x: unpad_input(x, np.ones((5, 3))), "attention_mask must be bool or ints, got float64"),
    (lambda x: unpad_input(x, np.ones((5, 3), int)), "attention_mask must have shape (5, 2), got"),
    (lambda x: unpad_input(x[0], [[1]]), "hidden_states must have rank 2 or more, got shape (2,)"),
]


@pytest.mark.parametrize(("call", "message"), PADDING_RULES, ids=lambda value: "")
def test_padding_rule(call, message):
    with pytest.raises(RuntimeError) as caught:
        call(np.ones((5, 2), F4))
    assert str(caught.value).startswith(message)


# --- rotary embeddings --------------------------------------------------------------------------


def angles(rng, positions, pairs, dtype=F4):
    phases = rng.random((positions, pairs)) * 6
    return np.cos(phases).astype(dtype), np.sin(phases).astype(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, np.array([1, 4])], ids=str)
def test_rotary(interleaved, offsets, rng):
    x, (cos, sin) = normal(rng, 2, 5, 3, 8), angles(rng, 12, 3)
    found = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    for b, offset in enumerate(np.broadcast_to(offsets, 2)):
        places = offset + np.arange(5)
        expected = flash_oracle.rotate_rows(x[b], cos, sin, places, interleaved)
        np.testing.assert_allclose(found[b], expected, 1e-6, 1e-6)


def test_rotary_of_packed_tokens(rng):
    x, (cos, sin) = normal(rng, 7, 2, 8), angles(rng, 9, 4)
    edges, offsets = np.array([0, 3, 3, 7], np.int32), np.array([2, 0, 5])
    found = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=edges, max_seqlen=4)
    places = [2, 3, 4, 5, 6, 7, 8]
    expected = flash_oracle.rotate_rows(x, cos, sin, places, False)
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)


def test_rotary_in_place(torch, rng):
    x, (cos, sin) = normal(rng, 1, 4, 2, 8), angles(rng, 4, 4)
    expected = apply_rotary_emb(x, cos, sin)
    tensor = torch.from_numpy(x.copy())
    assert apply_rotary_emb(tensor, torch.from_numpy(cos), torch.from_numpy(sin)) is not tensor
    assert apply_rotary_emb(tensor, cos, sin, inplace=True) is tensor
    np.testing.assert_array_equal(tensor.numpy(), expected)
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x
    np.testing.assert_array_equal(x, expected)


def test_rotary_of_halves_rounds_once(rng):
    x, (cos, sin) = normal(rng, 1, 4, 2, 8, dtype="f2"), angles(rng, 4, 4, "f2")
    exact = apply_rotary_emb(*(a.astype(float) for a in (x, cos, sin)))
    np.testing.assert_array_equal(apply_rotary_emb(x, cos, sin), exact.astype("f2"))


READ_ONLY = np.broadcast_to(np.ones((), F4), (1, 4, 2, 8))
ROTARY_RULES = [
    ({"x": np.ones((4, 2, 8), F4)}, "x must have shape (batch, seqlen, heads, head_dim), got (4, "),
    ({"cu_seqlens": [0, 4]}, "x must have shape (tokens, heads, head_dim), got (1, 4, 2, 8)"),
    ({"cos": np.ones((4, 4))}, "cos must have the dtype of what it turns, float32, got float64"),
    ({"cos": np.ones(4, F4)}, "cos must have shape (positions, rotary_dim / 2), got (4,)"),
    (
        {"inplace": True, "x": READ_ONLY},
        "x must be writeable, native and aligned, got float32 with ",
    ),
    ({"cos": np.ones((4, 5), F4)}, "cos and sin must have the same shape, of at most half the h"),
    ({"seqlen_offsets": 1}, "cos must have a row for each position from 0 to 4, got 4"),
    ({"seqlen_offsets": -1}, "seqlen_offsets must lie between 0 and"),
    (
        {"inplace": True, "x": np.ones((1, 4, 2, 8), F4).tolist()},
        "x must be an array of NumPy or a",
    ),
    ({"x": np.ones((1, 4, 2, 8), int)}, "x must be float16, bfloat16, float32 or float64, got int"),
]


@pytest.mark.parametrize(("change", "message"), ROTARY_RULES, ids=lambda value: "")
def test_rotary_rule(change, message):
    tables = np.ones((4, 4), F4)
    with pytest.raises(RuntimeError) as caught:
        apply_rotary_emb(**{"x": np.ones((1, 4, 2, 8), F4), "cos": tables, "sin": tables} | change)
    assert str(caught.value).startswith(message)


def test_rotary_refuses_gradients(torch):
    x = torch.ones(1, 4, 2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^x must not require a gradient"):
        apply_rotary_emb(x, torch.ones(4, 4), torch.ones(4, 4))
