"""What JAX does to functions, done to fastattn.jax: jit, vmap, grad, scan; and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from other_process import with_jax
from test_jax_face import arrays, lengths


@pytest.mark.parametrize(
    "axes",
    [
        (0, 0, 0, 0, 0, 0),
        (0, None, None, None, None, None),
        (None, 2, None, None, None, None),
        (None, None, None, None, 0, None),
        (1, None, 0, 2, None, 0),
    ],
    ids=str,
)
@with_jax
def test_vmap_is_one_call(axes):
    """Of each operand, whichever are mapped: the same as one by one, gradients too."""
    import jax
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention, handlers

    rng = np.random.default_rng(1)
    single = [*arrays(), np.zeros((1, 4, 5, 7), np.float32), np.zeros((2, 1, 5, 7), bool)]
    single.append(lengths(3, 7))
    several = []
    for axis, a in zip(axes, single, strict=True):
        shape = np.shape(a) if axis is None else (3, *np.shape(a))
        drawn = rng.integers(2, 7, shape) if a.dtype == np.int32 else rng.standard_normal(shape)
        drawn = drawn < 0.5 if a.dtype == bool else drawn.astype(a.dtype)
        several.append(jnp.asarray(drawn if axis is None else np.moveaxis(drawn, 0, axis)))

    def gradients(q, k, v, bias, mask, kv_len):
        def loss(q, k, v, bias):
            flags = {"key_value_seq_lengths": kv_len, "local_window_size": (2, 3)}
            out = dot_product_attention(q, k, v, bias, mask, **flags)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    calls = []
    plain = handlers.attention, handlers.attention_backward
    try:
        handlers.attention = lambda *a, **b: calls.append(1) or plain[0](*a, **b)
        handlers.attention_backward = lambda *a, **b: calls.append(2) or plain[1](*a, **b)
        mapped = jax.vmap(gradients, axes)(*several)
    finally:
        handlers.attention, handlers.attention_backward = plain
    assert sorted(calls) == [1, 2], calls
    for n in range(3):
        pairs = zip(several, axes, strict=True)
        one = [a if axis is None else jnp.take(a, n, axis) for a, axis in pairs]
        for alone, all_of_them in zip(
            *map(jax.tree.leaves, (gradients(*one), mapped)), strict=True
        ):
            np.testing.assert_allclose(all_of_them[n], alone, rtol=0, atol=3e-6)


# --- other transformations ----------------------------------------------------------------------


@with_jax
def test_scan_and_checkpoint():
    """Three layers, each recomputed in the backward pass, are three layers."""
    import jax
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention

    q, k, v = arrays(seqlen_q=7, heads_q=2)
    keys = jnp.stack([k, k * 2, k - 1])

    @jax.checkpoint
    def layer(x, k):
        return x + dot_product_attention(x, k, v, is_causal=True), None

    def at_once(x, keys):
        return jax.lax.scan(layer, x, keys)[0].sum()

    def one_by_one(x, keys):
        for k in keys:
            x += dot_product_attention(x, k, v, is_causal=True)
        return x.sum()

    ours, plain = (jax.jit(jax.grad(f, (0, 1)))(q, keys) for f in (at_once, one_by_one))
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)


@with_jax
def test_scale_may_be_a_parameter():
    import jax

    from fastattn.jax import dot_product_attention

    q, k, v = arrays()
    found = []
    for attention in (dot_product_attention, jax.nn.dot_product_attention):
        loss = lambda scale, attention=attention: (attention(q, k, v, scale=scale)[0, 0]).sum()  # noqa: E731
        found.append(jax.jit(jax.value_and_grad(loss))(0.7))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@with_jax
def test_gradient_by_a_constant_bias_is_not_computed():
    import jax
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention, handlers

    q, k, v = arrays()
    bias = jnp.ones((5, 7))
    asked = []
    plain = handlers.attention_backward
    try:
        handlers.attention_backward = lambda *a, **b: (
            asked.append(b["return_dbias"]) or plain(*a, **b)
        )
        jax.grad(lambda q: dot_product_attention(q, k, v, bias).sum())(q)
        jax.grad(lambda bias: dot_product_attention(q, k, v, bias).sum())(bias)
    finally:
        handlers.attention_backward = plain
    assert asked == [False, True], asked


@with_jax
def test_residual_has_no_gradient():
    import jax

    from fastattn.jax import dot_product_attention

    q, k, v = arrays()
    gradient = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert not gradient.any()


@with_jax
def test_second_derivatives_are_refused():
    import jax

    from fastattn.jax import dot_product_attention

    q, k, v = arrays()
    first = jax.grad(lambda q: dot_product_attention(q, k, v).sum())
    for second in (jax.grad(lambda q: first(q).sum()), jax.jacfwd(first)):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            second(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: dot_product_attention(q, k, v), (q,), (q,))


@with_jax
def test_large_calls_at_once():
    """As many as there are threads and more, which callbacks of JAX may not survive."""
    import jax
    import jax.numpy as jnp

    import fastattn
    from fastattn.jax import dot_product_attention

    q, k, v = arrays(batch=4, seqlen_q=512, seqlen_k=512)

    @jax.jit
    def several(q, k, v):
        return jnp.stack([dot_product_attention(q + n, k, v) for n in range(6)])

    found = several(q, k, v)
    heads_first = [np.asarray(a).swapaxes(1, 2) for a in (q + 5, k, v)]
    expected = fastattn.attention(*heads_first).swapaxes(1, 2)
    np.testing.assert_array_equal(found[5], expected)


@with_jax
def test_failures_in_the_kernel_are_errors_of_jax():
    import jax

    from fastattn.jax import dot_product_attention, handlers

    def fail(*arrays, **arguments):
        raise MemoryError("out of memory, says the test")

    plain, handlers.attention = handlers.attention, fail
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="MemoryError: out of memory, says"):
            dot_product_attention(*arrays())
    finally:
        handlers.attention = plain


# --- arguments ----------------------------------------------------------------------------------

Q, K = (2, 5, 4, 8), (2, 7, 2, 8)
BAD = {
    "rank 2": ({"query": (5, 8)}, ValueError, r"query must have rank 4 .* got shape \(5, 8\)"),
    "rank 5": ({"key": (1, *K)}, ValueError, "key must have rank 4"),
    "head_dim_v": ({"value": (2, 7, 2, 9)}, ValueError, "key and value must have the same shape"),
    "head_dim": ({"query": (2, 5, 4, 6)}, ValueError, "the same batch and head_dim"),
    "batch": ({"query": (1, 5, 4, 8)}, ValueError, "the same batch and head_dim"),
    "heads": ({"query": (2, 5, 3, 8)}, ValueError, "query heads must be .* got 3 and 2"),
    "dtype": ({"value": np.zeros(K, np.float16)}, ValueError, "the same dtype, got float32, .*16"),
    "mask": ({"mask": np.zeros((5, 7))}, ValueError, "mask must be bool, got float64. Pass"),
    "mask of 2 heads": (
        {"mask": np.ones((1, 2, 5, 7), bool)},
        (ValueError, AssertionError),
        r"mask must broadcast to .* here \(2, 4, 5, 7\), got \(1, 2, 5, 7\)",
    ),
    "mask of rank 5": ({"mask": np.ones((1, 1, 1, 5, 7), bool)}, ValueError, "mask must broadcast"),
    "bias of other keys": (
        {"bias": np.ones((5, 6))},
        (ValueError, TypeError),
        "bias must broadcast to",
    ),
    "int64 lengths": (
        {"query_seq_lengths": np.array([3, 4])},
        ValueError,
        r"query_seq_lengths must be int32 of shape \(2,\), got int64",
    ),
    "one length": ({"key_value_seq_lengths": lengths(3)}, ValueError, r"got int32 of shape \(1,\)"),
    "window": ({"local_window_size": (None, 2)}, TypeError, r"pair of ints, got \(None, 2\)"),
    "implementation": ({"implementation": "fast"}, ValueError, "must be None .* got 'fast'"),
}
STRICTER = {  # JAX takes them
    "ints": (
        {name: np.ones(K, np.int32) for name in ("query", "key", "value")},
        TypeError,
        "query must be float16, bfloat16, float32 or float64, got int32",
    ),
    "complex bias": ({"bias": np.ones((5, 7), complex)}, TypeError, "bias must be .* complex128"),
    "scale": ({"scale": float("nan")}, ValueError, "scale must be finite in float32, got nan"),
    "is_causal": ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
}


@pytest.mark.parametrize("name", [*BAD, *STRICTER])
@with_jax
def test_refuses(name):
    """Where JAX does too, an `except` that expects its error gets ours."""
    import jax

    from fastattn.jax import dot_product_attention

    change, error, message = (BAD | STRICTER)[name]
    given = {"query": Q, "key": K, "value": K} | change
    for name_there in ("query", "key", "value"):
        if isinstance(given[name_there], tuple):
            given[name_there] = np.ones(given[name_there], np.float32)
    if name in BAD:
        with pytest.raises(error):
            jax.nn.dot_product_attention(**given)
    with pytest.raises(error, match=message):
        dot_product_attention(**given)


@with_jax
def test_export():
    """A program with the calls in it, for any batch, and its gradient, after serialisation."""
    import jax
    import jax.numpy as jnp
    from jax import export

    from fastattn.jax import dot_product_attention

    def program(x):
        return dot_product_attention(x, x, x, is_causal=True)

    names = ("fastattn_forward", "fastattn_backward")
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 5, 2, 8"), jnp.float32)
    exported = export.export(jax.jit(program), disabled_checks=checks)(shape)
    again = export.deserialize(exported.serialize(vjp_order=1))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 2, 8)), jnp.float32)
    np.testing.assert_array_equal(again.call(x), program(x))
    ours, direct = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (again.call, program))
    np.testing.assert_array_equal(ours, direct)
