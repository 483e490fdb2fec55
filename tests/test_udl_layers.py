"""The book's transformer layer and positions, against plain loops over columns and torch."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn import udl


def make_layer(rng, features, heads, hidden):
    def draw(*shape):
        return rng.standard_normal(shape) / np.sqrt(shape[1])

    head_dim = features // heads
    return udl.TransformerLayer(
        heads=[
            udl.Head(
                *(draw(head_dim, features) for _ in range(3)), *(draw(head_dim, 1) for _ in "vqk")
            )
            for _ in range(heads)
        ],
        omega_c=draw(features, features),
        gamma_1=rng.uniform(0.5, 2, (features, 1)),
        delta_1=draw(features, 1),
        omega_0=draw(hidden, features),
        omega_1=draw(features, hidden),
        beta_0=draw(hidden, 1),
        beta_1=draw(features, 1),
        gamma_2=rng.uniform(0.5, 2, (features, 1)),
        delta_2=draw(features, 1),
    )


def normalised(column, gamma, delta):
    mean = sum(column) / len(column)
    variance = sum((value - mean) ** 2 for value in column) / len(column)
    return gamma[:, 0] * (column - mean) / np.sqrt(variance + 1e-5) + delta[:, 0]


def test_layer_norm_is_of_each_column(backend, rng):
    X, gamma, delta = rng.standard_normal((6, 9)), rng.random((6, 1)), rng.random((6, 1))
    ours = udl.layer_norm(X, gamma, delta, backend=backend)
    exact = np.stack([normalised(X[:, n], gamma, delta) for n in range(9)], axis=1)
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-12)


def test_mlp_is_of_each_column(rng):
    layer = make_layer(rng, 6, 2, 10)
    X = rng.standard_normal((6, 9))
    before = X.copy()
    ours = udl.mlp(X, layer.omega_0, layer.omega_1, layer.beta_0, layer.beta_1)
    for n in range(9):
        hidden = [
            max(0.0, b + w @ X[:, n])
            for b, w in zip(layer.beta_0[:, 0], layer.omega_0, strict=True)
        ]
        exact = [b + w @ hidden for b, w in zip(layer.beta_1[:, 0], layer.omega_1, strict=True)]
        np.testing.assert_allclose(ours[:, n], exact, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_transformer_layer_matches_torch(dtype, masked, torch, backend, rng):
    """torch's layer has the same four lines; its tokens are rows."""
    layer = make_layer(rng, 24, 3, 40)
    module = torch.nn.TransformerEncoderLayer(24, 3, 40, activation="relu", batch_first=True)
    module = module.eval().double()
    parts = list(zip(*layer.heads, strict=True))  # v, q, k, and their betas
    stacked = [np.concatenate(parts[n]) for n in (1, 2, 0, 4, 5, 3)]
    values = {
        "self_attn.in_proj_weight": np.concatenate(stacked[:3]),
        "self_attn.in_proj_bias": np.concatenate(stacked[3:]),
        "self_attn.out_proj.weight": layer.omega_c,
        "self_attn.out_proj.bias": np.zeros(24),
        "linear1.weight": layer.omega_0,
        "linear1.bias": layer.beta_0,
        "linear2.weight": layer.omega_1,
        "linear2.bias": layer.beta_1,
        "norm1.weight": layer.gamma_1,
        "norm1.bias": layer.delta_1,
        "norm2.weight": layer.gamma_2,
        "norm2.bias": layer.delta_2,
    }
    names = module.state_dict()
    module.load_state_dict(
        {name: torch.from_numpy(a).reshape(names[name].shape) for name, a in values.items()}
    )
    X = rng.standard_normal((24, 13))
    hidden = torch.from_numpy(~np.tri(13, dtype=bool)) if masked else None
    with torch.no_grad():
        theirs = module(torch.from_numpy(X.T[None].copy()), src_mask=hidden)[0].numpy().T
    ours = udl.transformer_layer(X.astype(dtype), layer, masked=masked, backend=backend)
    assert ours.dtype == dtype
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=100 * np.finfo(dtype).eps)


def test_layer_leaves_its_input_alone(rng):
    X = rng.standard_normal((8, 5))
    before = X.copy()
    udl.transformer_layer(X, make_layer(rng, 8, 2, 12))
    np.testing.assert_array_equal(X, before)


def test_positional_encodings_tell_columns_apart():
    """Π has the sinusoids of Vaswani et al. 2017, and no two columns alike."""
    Pi = udl.positional_encodings(6, 50)
    assert Pi.shape == (6, 50)
    for n in (0, 1, 49):
        for d in range(6):
            angle = n / 10000 ** (2 * (d // 2) / 6)
            assert Pi[d, n] == pytest.approx(np.cos(angle) if d % 2 else np.sin(angle), abs=1e-14)
    distances = np.linalg.norm(Pi[:, :, None] - Pi[:, None], axis=0) + np.eye(50)
    assert distances.min() > 0.1


def test_positions_are_added(rng):
    """Self-attention is equivariant to the order of the tokens; with positions it is not."""
    X = rng.standard_normal((8, 5))
    layer, order = make_layer(rng, 8, 2, 12), [3, 0, 4, 1, 2]
    plain = udl.transformer_layer(X, layer)
    np.testing.assert_allclose(
        udl.transformer_layer(X[:, order], layer), plain[:, order], atol=1e-12
    )
    Pi = udl.positional_encodings(8, 20)
    placed = udl.add_positions(X, Pi)
    np.testing.assert_array_equal(placed, X + Pi[:, :5])
    assert udl.add_positions(X.astype(np.float32), Pi).dtype == np.float32
    shuffled = udl.transformer_layer(udl.add_positions(X[:, order], Pi), layer)
    assert np.abs(shuffled - udl.transformer_layer(placed, layer)[:, order]).max() > 0.1


def change(name, *shape):
    layer = make_layer(np.random.default_rng(0), 8, 2, 12)
    return udl.transformer_layer(np.zeros((8, 5)), layer._replace(**{name: np.zeros(shape)}))


ERRORS = {
    "omega-c": (
        lambda: change("omega_c", 7, 8),
        "omega_c must have 8 rows to be added to X, got 7",
    ),
    "gamma": (lambda: change("gamma_1", 8), "gamma must have shape (8, 1), got (8,)"),
    "delta": (lambda: change("delta_2", 7, 1), "delta must have shape (8, 1), got (7, 1)"),
    "omega-0": (lambda: change("omega_0", 12, 7), "omega_0 must have shape (rows, 8), got (12, 7)"),
    "omega-1": (lambda: change("omega_1", 8, 7), "omega_1 must have shape (rows, 12), got (8, 7)"),
    "beta-0": (lambda: change("beta_0", 12), "beta_0 must have shape (12, 1), got (12,)"),
    "beta-1": (lambda: change("beta_1", 7, 1), "beta_1 must have shape (8, 1), got (7, 1)"),
    "short-Pi": (
        lambda: udl.add_positions(np.zeros((8, 5)), np.zeros((8, 4))),
        "Pi must have shape (8, 5 or more) to fit X, got (8, 4)",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, message):
    with pytest.raises(ValueError, match=r".") as raised:
        call()
    assert str(raised.value) == message
