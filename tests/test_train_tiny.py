"""examples/train_tiny.py learns, and step by step as the same model does in PyTorch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_tiny.py"
STEPS = 20


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(example):
    text = " ".join(example.TEXT.read_text(encoding="utf-8").split())
    alphabet = sorted(set(text))
    codes = np.array([alphabet.index(c) for c in text])
    pieces = example.batches(np.random.default_rng(0), codes)
    return len(alphabet), [next(pieces) for _ in range(STEPS)]


@pytest.fixture(scope="module")
def trained(example, data):
    """(losses, arrays before, arrays after) of STEPS steps."""
    num_characters, pieces = data
    model = example.make_model(np.random.default_rng(1), num_characters)
    before = [a.copy() for a in example.arrays_of(model)]
    adam, losses = example.Adam(model), []
    for tokens, following in pieces:
        loss, gradients = example.loss_and_gradients(model, tokens, following)
        adam.step(gradients)
        losses.append(loss)
    return losses, before, list(example.arrays_of(model))


def test_the_loss_falls(trained):
    losses, _, _ = trained
    assert losses[0] == pytest.approx(3.6, abs=0.3)
    assert losses[-1] < losses[0] - 0.8


@pytest.mark.slow
def test_every_step_is_that_of_torch(example, data, trained):
    torch = pytest.importorskip("torch")
    losses, before, after = trained
    arrays = [torch.from_numpy(a.copy()).requires_grad_() for a in before]
    rate, betas = example.RATE, example.DECAYS
    adam = torch.optim.Adam(arrays, lr=rate, betas=betas, eps=example.EPS)
    for (tokens, following), ours in zip(data[1], losses, strict=True):
        loss = torch_loss(torch, example, arrays, *map(torch.from_numpy, (tokens, following)))
        adam.zero_grad()
        loss.backward()
        adam.step()
        assert loss.item() == pytest.approx(ours, abs=1e-4)
    dim = example.MODEL_DIM
    for a, b in zip(arrays, after, strict=True):
        a = a.detach().numpy()
        if a.shape == (3 * dim,):
            # The loss does not depend on the bias of the keys: Adam makes steps of its rounding.
            a, b = (np.delete(c, slice(dim, 2 * dim)) for c in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def torch_loss(torch, example, arrays, tokens, following):
    """The model of the example, of its arrays in their order."""
    functional = torch.nn.functional
    characters, positions, *layers = arrays
    layers, norm = layers[:-2], layers[-2:]
    x = characters[tokens] + positions
    heads, dim = example.HEADS, example.MODEL_DIM
    for n in range(0, len(layers), 12):
        qkv, qkv_bias, out, out_bias, w1, b1, up, up_bias, down, down_bias, w2, b2 = layers[
            n : n + 12
        ]
        y = functional.linear(functional.layer_norm(x, (dim,), w1, b1), qkv, qkv_bias)
        q, k, v = (a.unflatten(-1, (heads, -1)).transpose(1, 2) for a in y.chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.linear(y.transpose(1, 2).flatten(2), out, out_bias)
        y = functional.linear(functional.layer_norm(x, (dim,), w2, b2), up, up_bias)
        x = x + functional.linear(functional.gelu(y), down, down_bias)
    logits = functional.linear(functional.layer_norm(x, (dim,), *norm), characters)
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())
