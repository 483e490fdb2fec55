"""Calls of a layout that has been seen before: the same answers and the same errors."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn import repeat

pytest.importorskip("numba")
pytestmark = pytest.mark.unguarded


@pytest.fixture(autouse=True)
def forget():
    repeat.forget()
    yield
    repeat.forget()


def arrays(rng, shape=(2, 3, 5, 8), dtype=np.float32):
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


def the_long_way(*inputs, **options):
    """The same, by lengths that mean nothing: calls that have them are not kept."""
    return fastattn.attention(*inputs, **options, q_len=inputs[0].shape[-2])


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, None), "align": "top_left"},
    "scaled": {"scale": 0.3, "softcap": 2.0},
    "chunk": {"chunk": 2},
    "align": {"causal": True, "align": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_other_arrays_of_the_same_layout(name, dtype, rng):
    for _ in range(3):
        inputs = arrays(rng, dtype=dtype)
        out = fastattn.attention(*inputs, **OPTIONS[name])
        assert out.tobytes() == the_long_way(*inputs, **OPTIONS[name]).tobytes()
        assert out.flags.c_contiguous
        assert out.dtype == dtype
    assert len(repeat._known) == 1


def reversed_rows(a):
    return a[..., ::-1, :]


def seqlen_first(a):
    return np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)


def read_only(a):
    a.setflags(write=False)
    return a


def one_head(a):
    return a[0, 0]


def one_batch_for_all(a):
    return np.broadcast_to(a[:1], a.shape)


@pytest.mark.parametrize(
    "view", [reversed_rows, seqlen_first, read_only, one_head, one_batch_for_all]
)
def test_layouts(view, rng):
    for _ in range(2):
        inputs = [view(a) for a in arrays(rng)]
        out = fastattn.attention(*inputs)
        assert out.tobytes() == the_long_way(*inputs).tobytes()
        assert out.shape == inputs[0].shape
    assert len(repeat._known) == 1


def test_keys_that_broadcast(rng):
    for _ in range(2):
        q, k, v = arrays(rng)
        out = fastattn.attention(q, k[0], v[0])
        assert out.tobytes() == the_long_way(q, k[0], v[0]).tobytes()


def test_many_keys_and_one_query(rng):
    """The keys are split over work items, and the parts merged by a second kernel."""
    for _ in range(2):
        q = rng.standard_normal((1, 2, 1, 16), dtype=np.float32)
        k, v = (rng.standard_normal((1, 2, 5000, 16), dtype=np.float32) for _ in range(2))
        with fastattn.num_threads(2):
            out = fastattn.attention(q, k, v)
        assert out.tobytes() == the_long_way(q, k, v).tobytes()


def test_results_are_new_arrays(rng):
    inputs = arrays(rng)
    first = fastattn.attention(*inputs)
    before = first.copy()
    second = fastattn.attention(*arrays(rng))
    assert not np.shares_memory(first, second)
    assert first.tobytes() == before.tobytes()


def not_aligned(shape):
    """float32 zeros at an odd address."""
    return np.zeros(4 * np.prod(shape) + 1, np.uint8)[1:].view(np.float32).reshape(shape)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("view", [np.array, reversed_rows, seqlen_first, one_head])
def test_results_in_memory_of_the_caller(view, lse, rng):
    for _ in range(3):
        out = view(np.full((2, 3, 5, 8), np.nan, np.float32))
        inputs = arrays(rng, out.shape)
        found = fastattn.attention(*inputs, out=out, return_lse=lse)
        wanted = the_long_way(*inputs, return_lse=lse)
        for a, b in zip(found, wanted, strict=True) if lse else [(found, wanted)]:
            np.testing.assert_array_equal(a, b)
        assert (found[0] if lse else found) is out
    assert len(repeat._known) == 1


def test_the_layout_of_the_memory_of_the_caller_counts(rng):
    q, k, v = arrays(rng)
    wanted = fastattn.attention(q, k, v)
    for view in (np.array, reversed_rows, seqlen_first):
        out = view(np.full(q.shape, np.nan, np.float32))
        assert fastattn.attention(q, k, v, out=out) is out
        np.testing.assert_array_equal(out, wanted)
    assert len(repeat._known) == 4
    for wrong in (out[..., :4], out[:1], out.astype(np.float64), np.broadcast_to(out[:1], q.shape)):
        with pytest.raises((TypeError, ValueError), match="out must"):
            fastattn.attention(q, k, v, out=wrong)


def test_memory_that_may_not_be_written_to_is_still_refused(rng):
    q, k, v = arrays(rng)
    out = np.empty_like(q)
    fastattn.attention(q, k, v, out=out)
    for name, inputs in {"q": (out, k, v), "k": (q, out, v), "v": (q, k, out)}.items():
        with pytest.raises(ValueError, match=f"out must not overlap {name}"):
            fastattn.attention(*inputs, out=out)
    with pytest.raises(ValueError, match="out must be writeable"):
        fastattn.attention(q, k, v, out=read_only(out))
    with pytest.raises(ValueError, match="out must be aligned"):
        fastattn.attention(q, k, v, out=not_aligned(q.shape))
    assert len(repeat._known) == 1


def test_lines_of_one_array_in_turn_are_no_overlap(rng):
    both, (_, k, v) = np.empty((2, 3, 5, 16), np.float32), arrays(rng)
    for _ in range(2):
        both[..., ::2] = rng.standard_normal((2, 3, 5, 8))
        out = fastattn.attention(both[..., ::2], k, v, out=both[..., 1::2])
        np.testing.assert_array_equal(out, the_long_way(both[..., ::2].copy(), k, v))


def test_a_bias_with_a_result_in_memory_of_the_caller(rng):
    for _ in range(2):
        inputs, bias, out = (
            arrays(rng),
            rng.standard_normal((5, 5), np.float32),
            np.empty((2, 3, 5, 8), "f4"),
        )
        fastattn.attention(*inputs, bias=bias, out=out)
        np.testing.assert_array_equal(out, the_long_way(*inputs, bias=bias))
        within = out.reshape(-1)[:25].reshape(5, 5)  # of the layout that is known
        with pytest.raises(ValueError, match="out must not overlap bias"):
            fastattn.attention(*inputs, bias=within, out=out)
    assert len(repeat._known) == 1


def test_arrays_that_are_not_aligned(rng):
    """The layout does not say: the address does."""
    inputs = arrays(rng)
    expected = fastattn.attention(*inputs)
    odd = not_aligned(inputs[0].shape)
    odd[...] = inputs[0]
    assert not odd.flags.aligned
    assert fastattn.attention(odd, *inputs[1:]).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"chunk": 2}, {"chunk": 2.0}),
        ({"window": (1, 1)}, {"window": (1.0, 1)}),
        ({"align": 1}, {"align": 1.0}),
        ({"window": (1, 1)}, {"window": (True, 1)}),
    ],
)
def test_equal_options_of_a_wrong_type_are_still_refused(good, bad, rng):
    inputs = arrays(rng)
    fastattn.attention(*inputs, **good)
    with pytest.raises((TypeError, ValueError)):
        fastattn.attention(*inputs, **bad)


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("name", ["mask", "bias", "lse"])
def test_masks_biases_and_lse(name, rank, rng):
    """Other ones each time, seen again by their layout."""
    for _ in range(3):
        inputs = [a[(0,) * (4 - rank)] for a in arrays(rng)]
        bias = rng.standard_normal((5, 5)).astype(np.float32)
        bias[2] = -np.inf  # a row that sees no key
        options = {"mask": {"mask": bias > 0}, "bias": {"bias": bias}, "lse": {}}[name]
        found = fastattn.attention(*inputs, **options, return_lse=name == "lse")
        wanted = the_long_way(*inputs, **options, return_lse=name == "lse")
        for a, b in zip(found, wanted, strict=True) if name == "lse" else [(found, wanted)]:
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes()
    assert len(repeat._known) == 1


SLOPES = {
    "of heads": lambda a: a[0],
    "of the batch": lambda a: a,
    "backwards": lambda a: a[:, ::-1],
    "of one entry": lambda a: a[:1],
    "float64": lambda a: a.astype(np.float64),
}


@pytest.mark.parametrize("name", SLOPES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_other_slopes_and_sinks_of_the_same_layout(name, dtype, rng):
    both, held = [rng.standard_normal((2, 3), np.float32) for _ in range(2)], []
    for _ in range(3):
        inputs = arrays(rng, dtype=dtype)
        # What a call made of them is gone: nothing else may happen to lie where it did.
        held += [np.zeros(n, t) for n in (3, 6) for t in "fd" for _ in range(20)]
        alibi, sinks = SLOPES[name](both[0]), both[1][0].astype(dtype)
        for a in both:
            a[...] = rng.standard_normal((2, 3))  # in the same memory
        for options in ({"alibi": alibi}, {"sinks": sinks}, {"alibi": alibi, "sinks": sinks}):
            for lse in (False, True):
                found = fastattn.attention(*inputs, **options, return_lse=lse)
                wanted = the_long_way(*inputs, **options, return_lse=lse)
                for a, b in zip(found, wanted, strict=True) if lse else [(found, wanted)]:
                    assert a.tobytes() == b.tobytes()
    assert len(repeat._known) == 6


def test_slopes_and_sinks_of_one_head_and_with_lengths(rng):
    for _ in range(2):
        inputs, one = arrays(rng), rng.standard_normal(1, np.float32)
        three, lengths = rng.standard_normal(3, np.float32), rng.integers(0, 6, 2)
        found = fastattn.attention(*(a[0, 0] for a in inputs), alibi=one, sinks=-one)
        wanted = the_long_way(*(a[0, 0] for a in inputs), alibi=one, sinks=-one)
        assert found.tobytes() == wanted.tobytes()
        options = {"alibi": three, "sinks": -three, "kv_len": lengths, "return_lse": True}
        found = fastattn.attention(*inputs, **options)
        for a, b in zip(found, the_long_way(*inputs, **options), strict=True):
            assert a.tobytes() == b.tobytes()
    assert len(repeat._known) == 2


def test_a_row_that_sees_no_key_has_its_sink_as_lse(rng):
    for sinks in rng.standard_normal((20, 3), np.float32):  # some are not sink * log2(e) * ln(2)
        options = {"causal": True, "align": -2, "sinks": sinks}
        _, lse = fastattn.attention(*arrays(rng), **options, return_lse=True)
        np.testing.assert_array_equal(lse[:, :, :2], np.broadcast_to(sinks[:, None], (2, 3, 2)))


@pytest.mark.parametrize("name", ["alibi", "sinks"])
def test_slopes_and_sinks_by_the_same_rules(name, rng):
    inputs, good = arrays(rng), np.ones(3)
    fastattn.attention(*inputs, **{name: good})
    for wrong in ([1, 1, 1], np.ones(2), np.ones(3, int), np.array([1, 1e39, 1])):
        with pytest.raises((TypeError, ValueError), match=f"{name} must"):
            fastattn.attention(*inputs, **{name: wrong})
    if name == "alibi":
        with pytest.raises(ValueError, match="alibi must be finite, got nan"):
            fastattn.attention(*inputs, alibi=np.array([1, np.nan, 1]))
    assert len(repeat._known) == 1


def test_which_arrays_are_given_counts(rng):
    """One of the shape of a mask may be a bias, and a mask may broadcast in several ways."""
    q, k, v = arrays(rng, (2, 3, 5, 8), np.float64)
    bias = rng.standard_normal((3, 5, 5))
    for options in ({"bias": bias}, {"mask": bias > 0}, {"mask": bias[0] > 0}, {"bias": bias[:1]}):
        for _ in range(2):
            found = fastattn.attention(q, k, v, **options)
            np.testing.assert_array_equal(found, the_long_way(q, k, v, **options))
    assert len(repeat._known) == 4


def test_torchs_signature_with_masks(rng):
    for _ in range(2):
        inputs = arrays(rng)
        added = rng.standard_normal((5, 5)).astype(np.float32)
        for attn_mask, meaning in ((added, {"bias": added}), (added > 0, {"mask": added > 0})):
            found = fastattn.scaled_dot_product_attention(*inputs, attn_mask)
            np.testing.assert_array_equal(found, the_long_way(*inputs, **meaning))
    assert len(repeat._known) == 2


def test_what_is_not_kept(rng):
    q, k, v = arrays(rng)
    swapped = q.astype(q.dtype.newbyteorder())
    fastattn.attention(swapped, k, v)
    fastattn.attention(q, k, v, backend="numpy")
    fastattn.attention(q, k, v, align=np.array([0, 1]))
    fastattn.attention(q, k, v, dropout_p=0.5)
    fastattn.attention(q, k, v, sinks=[1.0, 1.0, 1.0])
    fastattn.attention(q, k, v, q_len=4)
    fastattn.attention(q, k, v, kv_len=4)
    fastattn.attention(q, k, v, mask=np.ones((5, 5), bool).tolist())
    fastattn.attention(q[:, :0], k, v)
    fastattn.attention(q[None], k[None], v[None])  # whose places need a table
    fastattn.attention(q[None], k[None], v[None], out=np.empty_like(q[None]))
    assert not repeat._known


def test_a_bounded_number_is_kept(monkeypatch, rng):
    monkeypatch.setattr(repeat, "MOST", 3)
    for seqlen in range(1, 9):
        fastattn.attention(*arrays(rng, (1, 1, seqlen, 4)))
    assert 1 <= len(repeat._known) <= 3


def test_the_number_of_threads_counts(rng):
    inputs = arrays(rng, (1, 2, 700, 64))
    with fastattn.num_threads(1):
        one = fastattn.attention(*inputs)
    with fastattn.num_threads(2):
        two = fastattn.attention(*inputs)
    assert one.tobytes() == two.tobytes()
    assert len(repeat._known) == 2


class NoHash(float):
    def __hash__(self):
        raise OSError("no hash")


def test_options_that_cannot_be_looked_up(rng):
    inputs = arrays(rng)
    expected = fastattn.attention(*inputs, scale=0.5)
    assert fastattn.attention(*inputs, scale=NoHash(0.5)).tobytes() == expected.tobytes()
    with pytest.raises(TypeError, match="softcap must be"):
        fastattn.attention(*inputs, softcap=[0.5])
    assert len(repeat._known) == 1


def test_equal_options_of_other_types_are_others():
    tokens = [repeat.token_of("auto", one) for one in (1, True, 1.0)]
    assert len(set(map(id, tokens))) == 3
    assert repeat.token_of("auto", 1.0) is tokens[2]
    with pytest.raises(TypeError, match="options must be scalars"):
        repeat.token_of("auto", (1,))
