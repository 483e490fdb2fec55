"""fastattn.jax beside jax.nn: results, residuals and gradients, and what JAX does to functions."""

from __future__ import annotations

import numpy as np
import pytest
from other_process import with_jax

TOLERANCE = {"float64": 3e-6, "float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}
SMALL = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads_q": 4, "heads_kv": 2}
EMPTY_ROWS = np.array([[1, 0, 1, 0, 0, 1, 1]] * 2 + [[0] * 7] * 2 + [[0, 0, 0, 0, 0, 0, 1]], bool)
HIDING = np.where(EMPTY_ROWS, 0.5, -np.inf).astype(np.float32)
HIDING[3] = 1.0


def lengths(*numbers):
    return np.array(numbers, np.int32)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, more rows than keys": {"is_causal": True, "seqlen_q": 9, "seqlen_k": 3},
    "one row": {"is_causal": True, "seqlen_q": 1},
    "window": {"local_window_size": 1},
    "window, left": {"local_window_size": (2, 0)},
    "window, right": {"local_window_size": (0, 3)},
    "window past the keys": {"local_window_size": (1, 1), "seqlen_q": 11},
    "window to the right of the row": {"local_window_size": (-1, 3)},
    "window to the left of the row": {"local_window_size": (3, -1)},
    "window of nothing": {"local_window_size": (-1, -1)},
    "window far away": {"local_window_size": (-9, 20)},
    "causal window": {"local_window_size": (2, 2), "is_causal": True},
    "causal window of nothing": {"local_window_size": (-1, 3), "is_causal": True},
    "mask, rows of nothing": {"mask": EMPTY_ROWS},
    "mask and causal": {"mask": EMPTY_ROWS[None, ::-1], "is_causal": True},
    "mask of heads": {"mask": np.arange(4 * 7).reshape(4, 1, 7) % 3 > 0},
    "mask of the batch": {"mask": np.arange(2 * 7).reshape(2, 1, 1, 7) % 3 > 0},
    "mask of one": {"mask": np.array(False)},
    "bias": {"bias": np.linspace(-3, 3, 2 * 4 * 5 * 7, dtype=np.float32).reshape(2, 4, 5, 7)},
    "bias of rows": {"bias": np.linspace(-3, 3, 5, dtype=np.float32)[:, None]},
    "bias of heads": {"bias": np.linspace(-3, 3, 4 * 7).reshape(1, 4, 1, 7)},
    "bias of -inf": {"bias": HIDING},
    "bias of -inf and causal": {"bias": HIDING, "is_causal": True},
    "rows": {"query_seq_lengths": lengths(3, 99)},
    "keys": {"key_value_seq_lengths": lengths(3, 99)},
    "no keys": {"key_value_seq_lengths": lengths(-1, 0), "query_seq_lengths": lengths(0, 2)},
    "no batch": {"batch": 0, "is_causal": True},
    "scale": {"scale": -0.3},
    "scale of 0": {"scale": 0, "local_window_size": 1},
    "keys of no length": {"seqlen_k": 0, "query_seq_lengths": lengths(3, 5)},
    "rows of no length": {"seqlen_q": 0},
    "float64": {"dtype": "float64", "mask": EMPTY_ROWS},
    "float16": {"dtype": "float16", "mask": EMPTY_ROWS, "query_seq_lengths": lengths(3, 5)},
    "bfloat16": {"dtype": "bfloat16", "bias": HIDING, "is_causal": True},
}


def arrays(dtype="float32", **sizes):
    """Return q, k and v of JAX; batch 0 stands for arrays without that axis."""
    import jax.numpy as jnp

    batch, seqlen_q, seqlen_k, heads_q, heads_kv = (SMALL | sizes).values()
    rng = np.random.default_rng(0)
    shapes = (seqlen_q, heads_q, 8), (seqlen_k, heads_kv, 8), (seqlen_k, heads_kv, 8)
    lead = (batch,) if batch else ()
    return [jnp.asarray(rng.standard_normal(lead + shape), dtype) for shape in shapes]


def loss_of(attention, flags):
    """Return the function of q, k, v and bias whose gradients are compared: all rows count."""
    import jax.numpy as jnp

    def loss(q, k, v, bias):
        biased = {} if bias is None else {"bias": bias}
        out, residual = attention(q, k, v, **flags, **biased, return_residual=True)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return (out * weights).sum(dtype="float32"), (out, residual)

    return loss


QUICK = [
    "causal",
    "window past the keys",
    "window to the right of the row",
    "mask, rows of nothing",
    "bias of -inf and causal",
    "no keys",
    "no batch",
    "bfloat16",
]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in QUICK)]
)
@with_jax
def test_agrees_with_jax(name):
    import jax

    from fastattn.jax import dot_product_attention

    case = dict(CASES[name])
    sizes = {size: case.pop(size) for size in (*SMALL, "dtype") if size in case}
    operands = (*arrays(**sizes), case.pop("bias", None))
    wanted = tuple(n for n, a in enumerate(operands) if a is not None)
    results = []
    for attention in (dot_product_attention, jax.nn.dot_product_attention):
        if name == "float16" and results:  # jax.nn cannot compile it for the CPU
            operands = [None if a is None else a.astype("float32") for a in operands]
        loss = loss_of(attention, case)
        differentiated = jax.value_and_grad(loss, wanted, has_aux=True)
        ((_, outs), gradients) = jax.jit(differentiated)(*operands)
        results.append([*outs, *gradients])
    ours, theirs = results
    tolerance = TOLERANCE[sizes.get("dtype", "float32")]
    names = ["out", "residual", "dq", "dk", "dv", "dbias"]
    for a, b, of in zip(ours, theirs, names, strict=False):
        assert a.shape == b.shape, of
        assert a.dtype == (sizes.get("dtype", b.dtype) if of != "dbias" else b.dtype), of
        a, b = (np.asarray(x.astype(a.dtype), np.float64) for x in (a, b))
        if name == "bias of -inf" and of in ("dq", "dk", "dbias"):
            # Of the rows without a key, which are NaN, JAX's gradients are NaN too.
            assert np.isnan(b).any(), of
            continue
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=of)


@with_jax
def test_bias_may_be_of_any_numbers():
    import jax
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention

    q, k, v = arrays()
    for bias in (jnp.arange(7), jnp.arange(7) > 3, 2.0, jnp.ones((5, 7), jnp.bfloat16)):
        theirs = jax.nn.dot_product_attention(q, k, v, bias)
        ours = dot_product_attention(q, k, v, bias)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-6)


@with_jax
def test_float64_is_float64():
    import jax

    import fastattn
    from fastattn.jax import dot_product_attention

    q, k, v = arrays("float64")
    core = fastattn.attention(*(np.asarray(a).swapaxes(1, 2) for a in (q, k, v)))
    ours = dot_product_attention(q, k, v)
    np.testing.assert_allclose(ours, core.swapaxes(1, 2), rtol=0, atol=1e-15)
    theirs = jax.nn.dot_product_attention(q, k, v)
    assert 1e-9 < np.abs(ours - theirs).max() < 3e-6  # JAX's softmax is float32


@with_jax
def test_nan_of_a_hidden_key_stays_there():
    import jax.numpy as jnp

    from fastattn.jax import dot_product_attention

    q, k, v = arrays()
    v = v.at[:, 5:].set(jnp.nan)
    assert np.isfinite(dot_product_attention(q, k, v, is_causal=True)).all()
