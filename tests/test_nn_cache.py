"""nn.KVCache: the same bits however a text is divided into calls; nothing half-written."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn import nn
from fastattn.plan import SPLIT_N

DIVISIONS = {
    "prefill": [2500],
    "chunks": [700, 1, 1023, 1, 256, 519],
    "decode-late": [2490, *[1] * 10],
    "decode-early": [*[1] * 5, 2495],
}


def heads(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def in_parts(cache, q, k, v, parts, **options):
    """attend() of consecutive parts of the tokens, joined."""
    results, start = [], 0
    for size in parts:
        part = np.s_[..., start : start + size, :]
        results.append(cache.attend(q[part], k[part], v[part], **options))
        start += size
    return np.concatenate(results, axis=-2)


def qkv(rng, tokens, batch=(2,), heads_q=4, heads_kv=2, head_dim=8, dtype=np.float32):
    q = heads(rng, *batch, heads_q, tokens, head_dim, dtype=dtype)
    return q, *(heads(rng, *batch, heads_kv, tokens, head_dim, dtype=dtype) for _ in "kv")


def same(backend, ours, exact):
    if backend == "cpu":
        np.testing.assert_array_equal(ours, exact)
    else:  # BLAS adds in an order of its own
        np.testing.assert_allclose(ours, exact, rtol=0, atol=64 * np.finfo(exact.dtype).eps)


@pytest.mark.parametrize("left", [None, 0, 100, 1500])
@pytest.mark.parametrize("division", DIVISIONS)
def test_any_division_gives_the_bits_of_one_call(division, left, backend, rng):
    q, k, v = qkv(rng, 2500, batch=(), heads_q=2, heads_kv=1)
    cache = nn.KVCache(1, 8, left=left)
    whole = fastattn.attention(q, k, v, causal=True, window=(left, 0), backend=backend)
    ours = in_parts(cache, q, k, v, DIVISIONS[division], backend=backend)
    same(backend, ours, whole)
    assert cache.seqlen == 2500


@pytest.mark.parametrize(
    ("dtype", "num_threads"), [(np.float32, 1), (np.float32, 2), (np.float16, 2), (np.float64, 2)]
)
def test_decoding_past_many_moves_of_the_window(dtype, num_threads, backend, rng):
    """Keys are given up again and again; what is left still has its absolute places."""
    q, k, v = qkv(rng, 9000, batch=(), heads_q=2, heads_kv=1, head_dim=4, dtype=dtype)
    cache = nn.KVCache(1, 4, dtype=dtype, left=70, reserve=1)
    sizes = np.random.default_rng(1).integers(1, 300, 100)
    sizes = [*sizes[np.cumsum(sizes) < 9000].tolist()]
    with fastattn.num_threads(num_threads):
        whole = fastattn.attention(q, k, v, window=(70, 0), backend=backend)
        ours = in_parts(cache, q, k, v, [*sizes, 9000 - sum(sizes)], backend=backend)
    same(backend, ours, whole)
    assert cache.start == 7 * SPLIT_N
    assert cache.slots <= 4 * (70 + SPLIT_N)


@pytest.mark.parametrize(
    "options",
    [
        {"alibi": np.array([0.5, 0.1, 0.01, 0.001])},
        {"softcap": 3.0, "scale": 0.4},
        {"sinks": np.array([0.0, 1.0, -2.0, 3.0])},
    ],
    ids=["alibi", "softcap", "sinks"],
)
@pytest.mark.parametrize("left", [None, 300])
def test_options_of_the_core(left, options, backend, rng):
    q, k, v = qkv(rng, 1300, batch=())
    cache = nn.KVCache(2, 8, left=left)
    whole = fastattn.attention(q, k, v, window=(left, 0), backend=backend, **options)
    ours = in_parts(cache, q, k, v, [700, 590, *[1] * 10], backend=backend, **options)
    same(backend, ours, whole)


@pytest.mark.parametrize("left", [None, 20])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_mask_and_bias_count_all_keys(name, left, backend, rng):
    q, k, v = qkv(rng, 2140, batch=(), heads_q=1, heads_kv=1)
    bias = heads(rng, 2140, 2140)
    given = {"mask": bias > -1, "bias": bias}[name]
    whole = fastattn.attention(q, k, v, window=(left, 0), backend=backend, **{name: given})
    cache, start = nn.KVCache(1, 8, left=left), 0
    for size in [2090, 49, 1]:
        stop = start + size
        part = np.s_[..., start:stop, :]
        options = {name: given[..., start:stop, :stop]}
        ours = cache.attend(q[part], k[part], v[part], backend=backend, **options)
        same(backend, ours, whole[part])
        start = stop
    assert cache.start == (2 * SPLIT_N if left else 0)


def test_a_mask_that_broadcasts_over_keys_is_left_alone(rng):
    q, k, v = qkv(rng, 1500)
    cache = nn.KVCache(2, 8, batch=(2,), left=10)
    cache.append(k, v)
    cache.append(k[..., :600, :], v[..., :600, :])
    hidden = np.zeros((1, 1), bool)
    assert cache.start
    assert not cache.attend(*(a[..., :1, :] for a in (q, k, v)), mask=hidden).any()


def test_a_narrower_window_is_kept_and_causal_may_be_off(backend, rng):
    q, k, v = qkv(rng, 400)
    cache = nn.KVCache(2, 8, batch=(2,), left=100)
    ours = in_parts(cache, q, k, v, [300, 100], window=(20, 0), backend=backend)
    same(backend, ours, fastattn.attention(q, k, v, window=(20, 0), backend=backend))
    cache = nn.KVCache(2, 8, batch=(2,), left=100)
    ours = cache.attend(q, k, v, causal=False, backend=backend)
    same(backend, ours, fastattn.attention(q, k, v, window=(100, None), backend=backend))


def test_lse_is_passed_on(backend, rng):
    q, k, v = qkv(rng, 40)
    out, lse = nn.KVCache(2, 8, batch=(2,)).attend(q, k, v, return_lse=True, backend=backend)
    exact = fastattn.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    np.testing.assert_array_equal(out, exact[0])
    np.testing.assert_array_equal(lse, exact[1])


# --- memory -------------------------------------------------------------------------------------


def test_memory_doubles_up_to_the_capacity(rng):
    _, k, v = qkv(rng, 1, batch=())
    cache = nn.KVCache(2, 8, reserve=3, capacity=20)
    seen = []
    for _ in range(20):
        cache.append(k, v)
        seen.append(cache.slots)
    assert seen == [3, 3, 3, 4, *[8] * 4, *[16] * 8, *[20] * 4]


def test_reserved_memory_is_not_moved(rng):
    _, k, v = qkv(rng, 10, batch=())
    cache = nn.KVCache(2, 8, reserve=40)
    first, _ = cache.append(k, v)
    for _ in range(3):
        keys, values = cache.append(k, v)
        assert keys.ctypes.data == first.ctypes.data
    np.testing.assert_array_equal(values, np.concatenate([v] * 4, axis=-2))


def test_views_handed_out_keep_what_they_show(rng):
    _, k, v = qkv(rng, 600, batch=())
    cache = nn.KVCache(2, 8, left=10)
    shown = []
    for _ in range(12):
        keys, _ = cache.append(k, v)
        shown.append((keys, keys.copy()))
    for keys, before in shown:
        np.testing.assert_array_equal(keys, before)


def test_a_prompt_longer_than_the_window_is_not_kept(rng):
    _, k, v = qkv(rng, 9000, batch=())
    cache = nn.KVCache(2, 8, left=50)
    cache.append(k, v)
    assert cache.slots == 9000
    keys, _ = cache.append(k[..., :1, :], v[..., :1, :])
    assert cache.start == 8 * SPLIT_N
    assert cache.slots == SPLIT_N
    np.testing.assert_array_equal(keys[..., :-1, :], k[..., cache.start :, :])


def test_bfloat16(backend, rng):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (a.astype(bfloat16) for a in qkv(rng, 30, batch=()))
    cache = nn.KVCache(2, 8, dtype=bfloat16)
    ours = in_parts(cache, q, k, v, [20, *[1] * 10], backend=backend)
    whole = fastattn.attention(q, k, v, causal=True, backend=backend)
    slack = 0 if backend == "cpu" else 0.02
    np.testing.assert_allclose(ours.astype(float), whole.astype(float), rtol=0, atol=slack)


def test_values_of_another_width(backend, rng):
    q, k, _ = qkv(rng, 30)
    v = heads(rng, 2, 2, 30, 5)
    cache = nn.KVCache(2, 8, head_dim_v=5, batch=(2,))
    ours = in_parts(cache, q, k, v, [20, 10], backend=backend)
    same(backend, ours, fastattn.attention(q, k, v, causal=True, backend=backend))


@pytest.mark.parametrize("left", [None, 40])
def test_truncate_takes_tokens_back(left, backend, rng):
    q, k, v = qkv(rng, 1300, batch=())
    cache = nn.KVCache(2, 8, left=left)
    in_parts(cache, q, k, v, [700, 500], backend=backend)
    wrong = [a[..., :200, :][..., ::-1, :] for a in (q, k, v)]
    cache.attend(*wrong, backend=backend)
    cache.truncate(1200)
    part = np.s_[..., 1200:, :]
    ours = cache.attend(q[part], k[part], v[part], backend=backend)
    whole = fastattn.attention(q, k, v, window=(left, 0), backend=backend)
    same(backend, ours, whole[part])


# --- errors -------------------------------------------------------------------------------------


def small(**options):
    return nn.KVCache(2, 4, batch=(3,), **options)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def full(left=None):
    cache = small(left=left)
    cache.append(zeros(3, 2, 2500, 4), zeros(3, 2, 2500, 4))
    cache.append(zeros(3, 2, 2500, 4), zeros(3, 2, 2500, 4))
    return cache


def decode(cache, **options):
    return cache.attend(zeros(3, 4, 1, 4), zeros(3, 2, 1, 4), zeros(3, 2, 1, 4), **options)


ERRORS = {
    "capacity": (
        lambda: small(capacity=5).append(zeros(3, 2, 6, 4), zeros(3, 2, 6, 4)),
        ValueError,
        "k must keep the cache within its capacity of 5 tokens, got 6 after 0",
    ),
    "k-list": (
        lambda: small().append([1.0], zeros(3, 2, 1, 4)),
        TypeError,
        "k must be a NumPy array, got list",
    ),
    "k-heads": (
        lambda: small().append(zeros(3, 4, 1, 4), zeros(3, 2, 1, 4)),
        ValueError,
        "k must have shape (3, 2, tokens, 4), got (3, 4, 1, 4)",
    ),
    "v-width": (
        lambda: small().append(zeros(3, 2, 1, 4), zeros(3, 2, 1, 5)),
        ValueError,
        "v must have shape (3, 2, tokens, 4), got (3, 2, 1, 5)",
    ),
    "v-rank": (
        lambda: small().append(zeros(3, 2, 1, 4), zeros(2, 1, 4)),
        ValueError,
        "v must have shape (3, 2, tokens, 4), got (2, 1, 4)",
    ),
    "v-tokens": (
        lambda: small().append(zeros(3, 2, 1, 4), zeros(3, 2, 2, 4)),
        ValueError,
        "k and v must have the same number of tokens, got (3, 2, 1, 4) and (3, 2, 2, 4)",
    ),
    "dtype": (
        lambda: small().append(zeros(3, 2, 1, 4, dtype=np.float64), zeros(3, 2, 1, 4)),
        TypeError,
        "k must have the dtype of the cache, float32, got float64",
    ),
    "int": (
        lambda: small(dtype=np.int64),
        TypeError,
        "dtype must be float16, bfloat16, float32 or float64, got int64",
    ),
    "heads": (lambda: nn.KVCache(0, 4), ValueError, "heads_kv must be an int >= 1, got 0"),
    "dim": (lambda: nn.KVCache(2, 4.0), TypeError, "head_dim must be an int >= 0, got float"),
    "left": (lambda: small(left=-1), ValueError, "left must be an int >= 0, got -1"),
    "truncate": (lambda: small().truncate(1), ValueError, "seqlen must lie from 0 to 0, got 1"),
    "truncate-left": (
        lambda: full(left=10).truncate(2000),
        ValueError,
        "seqlen must be at least 2058, as tokens before 2048 were given up, got 2000",
    ),
    "window": (
        lambda: decode(full(left=10), window=(11, 0)),
        ValueError,
        "window must reach at most left=10 keys back, as the cache keeps no more, got 11",
    ),
    "counted": (
        lambda: decode(full(left=10), kv_start=3),
        ValueError,
        "kv_start must not be given to a cache with left=10, which does not keep the first keys",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("left", [None, 40])
@pytest.mark.parametrize(
    "change",
    [
        {"q": zeros(3, 4, 2000, 5)},
        {"k": zeros(3, 2, 2000, 5)},
        {"v": zeros(3, 2, 1999, 4)},
        {"backend": "gpu"},
        {"unknown": 1},
        {"mask": zeros(7)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_written_on_error(change, left, rng):
    """Also where room had to be made for the tokens, and keys were given up."""
    k = heads(rng, 3, 2, 3000, 4)
    cache = small(left=left, capacity=5000)
    cache.append(k, -k)
    memory, before = cache.keys.ctypes.data, (cache.seqlen, cache.start, cache.slots)
    call = {name: zeros(3, 4 if name == "q" else 2, 2000, 4) for name in "qkv"} | change
    with pytest.raises((ValueError, TypeError)):
        cache.attend(**call)
    assert (cache.seqlen, cache.start, cache.slots) == before
    assert cache.keys.ctypes.data == memory
    np.testing.assert_array_equal(cache.keys, k[..., cache.start :, :])
    np.testing.assert_array_equal(cache.values, -k[..., cache.start :, :])


def test_a_full_cache_takes_no_more(rng):
    cache = small(capacity=5)
    cache.append(zeros(3, 2, 5, 4), zeros(3, 2, 5, 4))
    with pytest.raises(ValueError, match="capacity of 5 tokens, got 1 after 5"):
        cache.append(zeros(3, 2, 1, 4), zeros(3, 2, 1, 4))
    assert cache.seqlen == 5
