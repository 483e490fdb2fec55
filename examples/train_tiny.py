"""Train a two-layer character model in NumPy: fastattn's layers and their gradients, and Adam.

    python examples/train_tiny.py
    python examples/train_tiny.py --steps 500 --text my.txt --plot loss.png

Shows a progress bar and the loss, plots it, and writes a few lines in the style of the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastattn import nn

TEXT = Path(__file__).with_name("harbour.txt")
TOKENS, MODEL_DIM, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16
RATE, DECAYS, EPS = 3e-3, (0.9, 0.99), 1e-8  # of Adam


@dataclass(frozen=True, slots=True, eq=False)
class CharacterModel:
    """The parameters."""

    characters: np.ndarray  # (num_characters, MODEL_DIM), for the characters read and written
    positions: np.ndarray  # (TOKENS, MODEL_DIM)
    layers: tuple[nn.TransformerLayerWeights, ...]
    norm: nn.LayerNormWeights


def make_model(rng: np.random.Generator, num_characters: int) -> CharacterModel:
    """Small random weights, float32."""

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.05)

    def linear(out_features: int, in_features: int) -> nn.LinearWeights:
        return nn.LinearWeights(normal(out_features, in_features), normal(out_features) * 0)

    def norm() -> nn.LayerNormWeights:
        return nn.LayerNormWeights(np.ones(MODEL_DIM, np.float32), np.zeros(MODEL_DIM, np.float32))

    def layer() -> nn.TransformerLayerWeights:
        return nn.TransformerLayerWeights(
            attention=nn.MultiHeadWeights(
                linear(3 * MODEL_DIM, MODEL_DIM), linear(MODEL_DIM, MODEL_DIM), HEADS
            ),
            attention_norm=norm(),
            up=linear(4 * MODEL_DIM, MODEL_DIM),
            down=linear(MODEL_DIM, 4 * MODEL_DIM),
            mlp_norm=norm(),
            norm_first=True,
        )

    layers = tuple(layer() for _ in range(LAYERS))
    return CharacterModel(
        normal(num_characters, MODEL_DIM), normal(TOKENS, MODEL_DIM), layers, norm()
    )


def hidden_states(model: CharacterModel, tokens: np.ndarray) -> list[np.ndarray]:
    """What goes into each layer, and what comes out of the last: (batch, tokens, model_dim)."""
    states = [model.characters[tokens] + model.positions[: tokens.shape[-1]]]
    for layer in model.layers:
        states.append(nn.transformer_layer(states[-1], layer, causal=True))
    return states


def log_probabilities(model: CharacterModel, state: np.ndarray) -> np.ndarray:
    """Of the next character after each token, (batch, tokens, num_characters)."""
    logits = nn.layer_norm(state, model.norm) @ model.characters.T
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def loss_and_gradients(
    model: CharacterModel, tokens: np.ndarray, following: np.ndarray
) -> tuple[float, CharacterModel]:
    """Mean of -log p(following character), and its gradient by all parameters."""
    states = hidden_states(model, tokens)
    log_p = log_probabilities(model, states[-1])
    place = (*np.indices(following.shape), following)
    loss = -float(log_p[place].mean())
    dlogits = np.exp(log_p)
    dlogits[place] -= 1
    dlogits /= np.float32(following.size)
    normed = nn.layer_norm(states[-1], model.norm)
    read = nn.LinearWeights(model.characters)
    dnormed, dread = nn.linear_backward(dlogits, normed, read)
    dstate, dnorm = nn.norm_backward(dnormed, states[-1], model.norm)
    dlayers = []
    for state, layer in zip(states[-2::-1], model.layers[::-1], strict=True):
        dstate, dlayer = nn.transformer_layer_backward(dstate, state, layer, causal=True)
        dlayers.append(dlayer)
    dcharacters = dread.weight
    np.add.at(dcharacters, tokens, dstate)
    dpositions = np.zeros_like(model.positions)
    dpositions[: tokens.shape[-1]] = dstate.sum(axis=0)
    gradients = CharacterModel(dcharacters, dpositions, tuple(dlayers[::-1]), dnorm)
    return loss, gradients


def arrays_of(record: Any) -> Iterator[np.ndarray]:
    """The arrays of a record of parameters, in one order for a model and its gradients."""
    if isinstance(record, np.ndarray):
        yield record
    elif isinstance(record, tuple):
        for part in record:
            yield from arrays_of(part)
    elif is_dataclass(record):
        for field in fields(record):
            if field.init:
                yield from arrays_of(getattr(record, field.name))


class Adam:
    """Kingma and Ba 2015, arXiv:1412.6980, algorithm 1: updates the arrays in place."""

    def __init__(self, model: CharacterModel):
        self.arrays = list(arrays_of(model))
        self.means = [np.zeros_like(a) for a in self.arrays]
        self.squares = [np.zeros_like(a) for a in self.arrays]
        self.steps = 0

    def step(self, gradients: CharacterModel) -> None:
        self.steps += 1
        mean_decay, square_decay = (np.float32(decay) for decay in DECAYS)
        rate = np.float32(RATE / (1 - DECAYS[0] ** self.steps))
        correction = np.float32((1 - DECAYS[1] ** self.steps) ** -0.5)
        for a, g, mean, square in zip(
            self.arrays, arrays_of(gradients), self.means, self.squares, strict=True
        ):
            mean += (1 - mean_decay) * (g - mean)
            square += (1 - square_decay) * (g * g - square)
            a -= rate * mean / (np.sqrt(square) * correction + np.float32(EPS))


def batches(rng: np.random.Generator, text: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random pieces of the text, (batch, tokens), and the characters that follow each."""
    while True:
        start = rng.integers(0, len(text) - TOKENS, BATCH)[:, None] + np.arange(TOKENS)
        yield text[start], text[start + 1]


def write(model: CharacterModel, tokens: list[int], length: int, rng: np.random.Generator) -> None:
    """Append `length` characters that the model finds likely."""
    for _ in range(length):
        seen = np.array(tokens[-TOKENS:])[None]
        log_p = log_probabilities(model, hidden_states(model, seen)[-1])[0, -1] / 0.7
        p = np.exp(log_p.astype(float))
        tokens.append(int(rng.choice(len(p), p=p / p.sum())))


def plot(losses: list[float], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss, nats a character", ylim=(0, None))
    figure.savefig(path, dpi=120)


def main() -> None:
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--plot", type=Path, default=Path("train_tiny.png"))
    options = parser.parse_args()
    text = " ".join(options.text.read_text(encoding="utf-8").split())
    alphabet = sorted(set(text))
    codes = np.array([alphabet.index(c) for c in text])
    rng = np.random.default_rng(0)
    model = make_model(rng, len(alphabet))
    adam, losses = Adam(model), []
    with Progress() as progress:
        task = progress.add_task("", total=options.steps)
        for _, (tokens, following) in zip(range(options.steps), batches(rng, codes), strict=False):
            loss, gradients = loss_and_gradients(model, tokens, following)
            adam.step(gradients)
            losses.append(loss)
            progress.update(task, advance=1, description=f"loss {loss:.3f}")
    plot(losses, options.plot)
    written = [alphabet.index(c) for c in "The "]
    write(model, written, 200, rng)
    print("".join(alphabet[n] for n in written))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, plotted in {options.plot}")


if __name__ == "__main__":
    main()
