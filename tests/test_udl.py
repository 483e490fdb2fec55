"""fastattn.udl: the book's printed answers, and its formulas, with tokens as columns."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from fastattn import udl

EXERCISE = Path(__file__).parent.parent / "examples" / "udl_exercise.py"


@pytest.fixture
def exercise():
    return runpy.run_path(str(EXERCISE))


def softmax_formula(scores):
    weights = np.exp(scores - scores.max(axis=0))
    return weights / weights.sum(axis=0)


def head_formula(X, head, scale):
    omega_v, omega_q, omega_k, beta_v, beta_q, beta_k = head
    v, q, k = beta_v + omega_v @ X, beta_q + omega_q @ X, beta_k + omega_k @ X
    return v @ softmax_formula(scale * (k.T @ q))


def make_head(rng, features, head_dim, head_dim_v):
    rows = (head_dim_v, head_dim, head_dim)
    omegas = [rng.standard_normal((r, features)) for r in rows]
    return udl.Head(*omegas, *[rng.standard_normal((r, 1)) for r in rows])


# --- the book's answers -------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "slack"), [(np.float64, 1e-9), (np.float32, 3e-5)])
def test_exercise_12_2(exercise, dtype, slack, backend):
    X, parameters = exercise["draw"]()
    answer = udl.multihead_scaled_self_attention(X.astype(dtype), **parameters, backend=backend)
    assert answer.dtype == dtype
    np.testing.assert_allclose(answer, exercise["ANSWER"], rtol=0, atol=0.0005 + slack)


def test_positional_call_of_the_notebook(exercise):
    X, p = exercise["draw"]()
    order = [
        f"{kind}_{role}{head}" for head in "12" for kind in ("omega", "beta") for role in "vqk"
    ]
    answer = udl.multihead_scaled_self_attention(X, *(p[name] for name in order), p["omega_c"])
    np.testing.assert_allclose(answer, exercise["ANSWER"], rtol=0, atol=0.00051)


def test_exercise_script_says_whether_it_is_the_books_answer(exercise, capsys):
    assert exercise["main"]() == 0
    assert "as in the book" in capsys.readouterr().out
    exercise["ANSWER"][0, 0] += 0.01
    assert exercise["main"]() == 1
    assert "NOT" in capsys.readouterr().out


def test_notebook_12_1(backend):
    """Plain self-attention of three tokens, drawn from seed 3, with parameters from seed 0."""
    X = np.random.RandomState(3).normal(size=(3, 4)).T
    random = np.random.RandomState(0)
    omega_q, omega_k, omega_v = (random.normal(size=(4, 4)) for _ in range(3))
    beta_q, beta_k, beta_v = (random.normal(size=(4, 1)) for _ in range(3))
    answer = udl.self_attention(
        X, omega_v, omega_q, omega_k, beta_v, beta_q, beta_k, backend=backend
    )
    expected = [
        [0.94744244, -0.24348429, -0.91310441, -0.44522983],
        [1.64201168, -0.08470004, 4.02764044, 2.18690791],
        [1.61949281, -0.06641533, 3.96863308, 2.15858316],
    ]
    np.testing.assert_allclose(answer.T, expected, rtol=0, atol=1e-8)


# --- the formulas -------------------------------------------------------------------------------


def test_softmax_cols_sums_columns_to_one(rng):
    scores = rng.standard_normal((5, 3))
    weights = udl.softmax_cols(scores)
    np.testing.assert_allclose(weights, np.exp(scores) / np.exp(scores).sum(axis=0), rtol=1e-14)
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-14)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_softmax_cols_is_stable(shift, rng):
    scores = rng.standard_normal((5, 3))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        shifted = udl.softmax_cols(scores + shift)
    np.testing.assert_allclose(shifted, udl.softmax_cols(scores), rtol=1e-10)


def test_softmax_cols_keeps_the_dtype_and_its_input():
    scores = np.ones((2, 2), np.float32)
    assert udl.softmax_cols(scores).dtype == np.float32
    np.testing.assert_array_equal(scores, 1)
    np.testing.assert_array_equal(udl.softmax_cols([[0], [0]]), [[0.5], [0.5]])


@pytest.mark.parametrize(
    ("function", "scale"),
    [(udl.self_attention, 1.0), (udl.scaled_dot_product_self_attention, 5**-0.5)],
    ids=["plain", "scaled"],
)
def test_one_head(function, scale, backend, rng):
    X = rng.standard_normal((7, 11))
    head = make_head(rng, 7, 5, 3)
    ours = function(X, *head, backend=backend)
    np.testing.assert_allclose(ours, head_formula(X, head, scale), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_any_number_of_heads(num_heads, tokens, backend, rng):
    X = rng.standard_normal((24, tokens))
    heads = [make_head(rng, 24, 6, 4) for _ in range(num_heads)]
    omega_c = rng.standard_normal((24, 4 * num_heads))
    ours = udl.multihead_self_attention(
        X, [tuple(head) for head in heads], omega_c, backend=backend
    )
    if tokens:
        heads = [head_formula(X, head, 6**-0.5) for head in heads]
        np.testing.assert_allclose(ours, omega_c @ np.concatenate(heads), rtol=0, atol=1e-11)
    assert ours.shape == (24, tokens)


def loop_over_tokens(X, E, head, masked):
    """Equations 12.2 to 12.5, one query and one key at a time, with the scale of 12.9."""
    omega_v, omega_q, omega_k, beta_v, beta_q, beta_k = head
    columns = []
    for n in range(X.shape[1]):
        seen = range(n + 1) if masked else range(E.shape[1])
        query = beta_q[:, 0] + omega_q @ X[:, n]
        keys = [beta_k[:, 0] + omega_k @ E[:, m] for m in seen]
        weights = np.exp([key @ query / np.sqrt(len(query)) for key in keys])
        values = [beta_v[:, 0] + omega_v @ E[:, m] for m in seen]
        columns.append(sum(a * v for a, v in zip(weights / weights.sum(), values, strict=True)))
    return np.stack(columns, axis=1)


def test_masked_tokens_see_no_later_ones(backend, rng):
    X = rng.standard_normal((7, 11))
    head = make_head(rng, 7, 5, 3)
    ours = udl.masked_self_attention(X, *head, backend=backend)
    np.testing.assert_allclose(ours, loop_over_tokens(X, X, head, True), rtol=0, atol=1e-12)


def test_cross_attention(backend, rng):
    X, E = rng.standard_normal((7, 11)), rng.standard_normal((9, 4))
    of_x, of_e = make_head(rng, 7, 5, 3), make_head(rng, 9, 5, 3)
    head = of_e._replace(omega_q=of_x.omega_q)
    ours = udl.cross_attention(X, E, *head, backend=backend)
    np.testing.assert_allclose(ours, loop_over_tokens(X, E, head, False), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["masked", "cross"])
def test_any_number_of_heads_masked_and_cross(kind, backend, rng):
    X, E = rng.standard_normal((8, 6)), rng.standard_normal((8, 9))
    heads = [make_head(rng, 8, 4, 2) for _ in range(3)]
    omega_c = rng.standard_normal((5, 6))
    if kind == "masked":
        ours = udl.multihead_self_attention(X, heads, omega_c, masked=True, backend=backend)
        parts = [loop_over_tokens(X, X, head, True) for head in heads]
    else:
        ours = udl.multihead_cross_attention(X, E, heads, omega_c, backend=backend)
        parts = [loop_over_tokens(X, E, head, False) for head in heads]
    np.testing.assert_allclose(ours, omega_c @ np.concatenate(parts), rtol=0, atol=1e-12)


def test_strided_and_read_only_input(rng, backend):
    X = rng.standard_normal((14, 22))[::2, ::-2]
    X.flags.writeable = False
    head = make_head(rng, 7, 5, 3)
    ours = udl.self_attention(X, *head, backend=backend)
    np.testing.assert_allclose(ours, head_formula(X, head, 1), rtol=0, atol=1e-12)


# --- errors -------------------------------------------------------------------------------------


def call_two_heads(**changes):
    names = [
        f"{kind}_{role}{head}" for head in "12" for kind in ("omega", "beta") for role in "vqk"
    ]
    arguments = {name: np.zeros((4, 8 if name.startswith("omega") else 1)) for name in names}
    arguments |= {"X": np.zeros((8, 6)), "omega_c": np.zeros((8, 8))} | changes
    return udl.multihead_scaled_self_attention(**arguments)


def call_heads(heads):
    return udl.multihead_self_attention(np.zeros((8, 6)), heads, np.zeros((8, 8)))


HEAD = udl.Head(*[np.zeros((4, 8))] * 3, *[np.zeros((4, 1))] * 3)

ERRORS = {
    "X-int": (
        lambda: call_two_heads(X=np.zeros((8, 6), int)),
        TypeError,
        "X must be float32 or float64, got int64",
    ),
    "X-rank": (
        lambda: call_two_heads(X=np.zeros(8)),
        ValueError,
        "X must have shape (D, N), got (8,)",
    ),
    "first-omega": (
        lambda: call_two_heads(omega_q1=np.zeros((4, 7))),
        ValueError,
        "omega_q1 must have shape (rows, 8) to fit X, got (4, 7)",
    ),
    "first-omega-rank": (
        lambda: call_two_heads(omega_v1=np.zeros(8)),
        ValueError,
        "omega_v1 must have shape (rows, 8) to fit X, got (8,)",
    ),
    "key-rows": (
        lambda: call_two_heads(omega_k1=np.zeros((3, 8))),
        ValueError,
        "omega_k1 must have shape (4, 8), got (3, 8)",
    ),
    "second-head": (
        lambda: call_two_heads(omega_v2=np.zeros((5, 8))),
        ValueError,
        "omega_v2 must have shape (4, 8), got (5, 8)",
    ),
    "beta-row": (
        lambda: call_two_heads(beta_q2=np.zeros(4)),
        ValueError,
        "beta_q2 must have shape (4, 1), got (4,)",
    ),
    "omega-c": (
        lambda: call_two_heads(omega_c=np.zeros((8, 7))),
        ValueError,
        "omega_c must have shape (rows, 8) to fit the heads, got (8, 7)",
    ),
    "one-head": (
        lambda: udl.self_attention(np.zeros((8, 6)), *HEAD._replace(beta_v=np.zeros((1, 4)))),
        ValueError,
        "beta_v must have shape (4, 1), got (1, 4)",
    ),
    "E-features": (
        lambda: udl.cross_attention(np.zeros((8, 6)), np.zeros((9, 6)), *HEAD),
        ValueError,
        "omega_v must have shape (rows, 9) to fit E, got (4, 8)",
    ),
    "E-keys": (
        lambda: udl.cross_attention(
            np.zeros((8, 6)), np.zeros((9, 6)), *HEAD._replace(omega_v=np.zeros((4, 9)))
        ),
        ValueError,
        "omega_k must have shape (4, 9), got (4, 8)",
    ),
    "E-rank": (
        lambda: udl.multihead_cross_attention(np.zeros((8, 6)), np.zeros(9), [HEAD], np.eye(4)),
        ValueError,
        "E must have shape (D, N), got (9,)",
    ),
    "no-heads": (
        lambda: call_heads([]),
        ValueError,
        "heads must hold at least one head, got none",
    ),
    "short-head": (
        lambda: call_heads([HEAD, HEAD[:5]]),
        ValueError,
        "heads[1] must hold 6 arrays",
    ),
    "heads-differ": (
        lambda: call_heads([HEAD, HEAD._replace(omega_k=np.zeros((3, 8)))]),
        ValueError,
        "omega_k of heads[1] must have shape (4, 8), got (3, 8)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
